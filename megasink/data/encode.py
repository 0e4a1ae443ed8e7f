"""Encode batches of documents, in this process or in workers, and return them in order.

Workers for text import no torch, transformers or Megatron.
"""

import multiprocessing
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.console.signals import follow, starting_processes
from megasink.data.hf_tokenizer import load_tokenizer
from megasink.data.text_tokenizer import Part, TextTokenizer
from megasink.errors import UserError


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of documents, concatenated."""

    tokens: NDArray[np.integer]  # [N] ids, N the sum of `lengths`
    lengths: list[int]  # tokens of each document, or part of one
    last: list[bool]  # whether a document ends with each
    text_bytes: list[int]  # UTF-8 size of the text of each


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Settings of `TextTokenizer`, and the ids around every document."""

    tokenizer_json: str
    before: list[int]
    after: list[int]
    dtype: str
    parse_special_tokens: bool = False


class Encoder:
    """Turns a list of texts, or parts of them, into an `Encoded`."""

    def __init__(self, settings: EncoderSettings):
        self.settings = settings
        self.tokenizer = TextTokenizer(
            settings.tokenizer_json, parse_special_tokens=settings.parse_special_tokens
        )

    def __call__(self, parts: Sequence[Part]) -> Encoded:
        # Not one list of all ids: each would take ten times the memory of an array entry.
        pieces: list[NDArray[np.integer]] = []
        lengths = []
        for part in parts:
            start = len(pieces)
            if part.first:
                pieces.append(self._array(self.settings.before))
            pieces.append(self._array(self.tokenizer.part_ids(part)))
            if part.last:
                pieces.append(self._array(self.settings.after))
            lengths.append(sum(map(len, pieces[start:])))
        sizes = [len(part.text.encode()) for part in parts]
        return Encoded(np.concatenate(pieces), lengths, [part.last for part in parts], sizes)

    def _array(self, ids: list[int]) -> NDArray[np.integer]:
        return np.array(ids, dtype=self.settings.dtype)


def encode_in_order(
    batches: Iterable[list[Part]], settings: EncoderSettings, workers: int
) -> Iterator[Encoded]:
    """Encode `batches` in `workers` processes (1: in this one); yield results in order."""
    if workers == 1:
        yield from map(Encoder(settings), batches)
        return
    pool = ProcessPoolExecutor(
        workers,
        # not fork: the caller has threads (torch, rich), so a forked child can deadlock
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_start_worker,
        initargs=(settings,),
    )
    pending: deque[Future[Encoded]] = deque()
    try:
        for batch in batches:
            with starting_processes():
                pending.append(pool.submit(_encode, batch))
            # bounded: reading does not run ahead of encoding
            if len(pending) > 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    except BrokenProcessPool as error:
        raise UserError(
            f"one of {workers} tokenizing processes died, possibly out of memory: "
            "use fewer --workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encoder: Encoder | None = None


def _start_worker(settings: EncoderSettings) -> None:
    global _encoder
    follow_parent()
    _encoder = Encoder(settings)


def follow_parent() -> None:
    """In a worker, leave Ctrl-C to the parent, and end when the parent ends."""
    follow()
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    # A parent killed by SIGKILL cannot end its pool, and the workers would wait forever.
    threading.Thread(target=wait, daemon=True).start()


def _encode(batch: list[Part]) -> Encoded:
    assert _encoder is not None
    return _encoder(batch)


def from_tokenizer[Result](
    folder: Path, function: Callable[..., Result], *args: Any, **kwargs: Any
) -> Result:
    """Return ``function(tokenizer, *args, **kwargs)`` for the tokenizer of `load_tokenizer`."""
    # In a short-lived process, because transformers takes 0.58 GB with torch, 0.08 GB without.
    if "transformers" in sys.modules:
        return function(load_tokenizer(folder), *args, **kwargs)
    for torch in (False, True):
        pool = ProcessPoolExecutor(
            1, multiprocessing.get_context("spawn"), initializer=_start, initargs=(torch,)
        )
        with pool:
            try:
                with starting_processes():
                    called = pool.submit(_call, folder, function, args, kwargs)
                return called.result()
            except BrokenProcessPool:
                break  # a script without a __main__ guard, or too little memory
            except UserError:
                # transformers may need torch for this one, or explain the reason better with it.
                if torch:
                    raise
    return function(load_tokenizer(folder), *args, **kwargs)


def _start(torch: bool) -> None:
    follow_parent()
    if not torch:
        # Python's mark for a module that cannot be imported.
        sys.modules["torch"] = None  # type: ignore[assignment]
        # Otherwise transformers advises to install it.
        os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"] = "1"


def _call(folder: Path, function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return function(load_tokenizer(folder), *args, **kwargs)
