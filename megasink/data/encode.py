"""Encode batches of documents, in this process or in workers, and return them in order.

For text, workers import only this file: no torch, transformers or Megatron.
"""

import multiprocessing
import os
import re
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from megasink.errors import UserError

# `tokenizers` needs hundreds of bytes per token of one text, and a character may be four tokens:
# longer documents are split into segments.
_SEGMENT = 1 << 20  # characters
_SEARCH = 1 << 16
_WORD_START = re.compile(r"(?<=\S) (?=\S)")


class Part(NamedTuple):
    """A part of a long document: a worker does not need the whole."""

    text: str
    first: bool = True
    last: bool = True


@dataclass(frozen=True, slots=True)
class Encoded:
    """A batch of documents, concatenated.

    Attributes:
        tokens: [N] ids, N the sum of `lengths`.
        lengths: tokens of each document, or part of one.
        last: whether a document ends with each of them; None if all do.
        text_bytes: UTF-8 size of the text.
        loss_mask: [N] uint8, 1 for the tokens that are targets; None if all are.
        counts: what else was counted (see `chat`).
    """

    tokens: NDArray[np.integer]
    lengths: list[int]
    text_bytes: int
    loss_mask: NDArray[np.uint8] | None = None
    counts: Counter[str] = field(default_factory=Counter)
    last: list[bool] | None = None


class Settings[Item](Protocol):
    """What a worker needs to encode a batch of items."""

    def encoder(self) -> Callable[[list[Item]], Encoded]:
        """Return the function that encodes batches, in the process that calls it."""


@dataclass(frozen=True, slots=True)
class EncoderSettings:
    """Settings for texts: the tokenizer as JSON, and the ids put around every document."""

    tokenizer_json: str
    before: list[int]
    after: list[int]
    dtype: str

    def encoder(self) -> "Encoder":
        """Return the encoder of texts."""
        return Encoder(self)


class Encoder:
    """Turns a list of texts into an `Encoded`. Special tokens spelled out in a text stay text."""

    def __init__(self, settings: EncoderSettings):
        from tokenizers import Tokenizer

        self.settings = settings
        self.tokenizer = Tokenizer.from_str(settings.tokenizer_json)
        self.tokenizer.encode_special_tokens = True

    def __call__(self, texts: Sequence[str | Part]) -> Encoded:
        # Not one list of all ids: each would take ten times the memory of an array entry.
        pieces: list[NDArray[np.integer]] = []
        lengths = []
        parts = [text if isinstance(text, Part) else Part(text) for text in texts]
        for part in parts:
            start = len(pieces)
            if part.first:
                pieces.append(self._array(self.settings.before))
            pieces += map(self._ids, segments(part.text))
            if part.last:
                pieces.append(self._array(self.settings.after))
            lengths.append(sum(map(len, pieces[start:])))
        size = sum(len(part.text.encode()) for part in parts)
        return Encoded(np.concatenate(pieces), lengths, size, last=[part.last for part in parts])

    def _ids(self, text: str) -> NDArray[np.integer]:
        # It leaves out the offsets of the tokens, which take 40% of the time of `encode`. One text
        # at a time: a worker is one thread.
        (encoding,) = self.tokenizer.encode_batch_fast([text], add_special_tokens=False)
        return self._array(encoding.ids)

    def _array(self, ids: list[int]) -> NDArray[np.integer]:
        return np.array(ids, dtype=self.settings.dtype)


def segments(text: str, limit: int = _SEGMENT) -> Iterator[str]:
    """Split `text` into pieces of at most `limit` characters, at the space before a word.

    Every common tokenizer splits there too, so the ids equal those of the whole text.
    """
    return joined_segments((text,), limit)


def joined_segments(pieces: Iterable[str], limit: int = _SEGMENT) -> Iterator[str]:
    """Split the text that `pieces` add up to as `segments` does, without all of it in memory."""
    text, start = "", 0
    for piece in pieces:
        text, start = text[start:] + piece, 0
        while len(text) - start > limit:
            end = start + limit
            match = _WORD_START.search(text, max(start + 1, end - _SEARCH), end)
            cut = match.start() if match else end  # no space in 64k characters: a token may differ
            yield text[start:cut]
            start = cut
    yield text[start:]


def parts_of(pieces: Iterable[str]) -> Iterator[Part]:
    """Split a document, given in pieces, into parts that are encoded by themselves."""
    found = joined_segments(pieces)
    part, first = next(found), True
    for following in found:
        yield Part(part, first, last=False)
        part, first = following, False
    yield Part(part, first)


def encode_in_order[Item](
    batches: Iterable[list[Item]], settings: Settings[Item], workers: int
) -> Iterator[Encoded]:
    """Encode `batches` in `workers` processes (1: in this one); yield results in order.

    Raises:
        UserError: a worker process died, or raised it.
    """
    if workers == 1:
        yield from map(settings.encoder(), batches)
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


_encoder: Callable[..., Encoded] | None = None


def _start_worker[Item](settings: Settings[Item]) -> None:
    global _encoder
    follow_parent()
    _encoder = settings.encoder()


def follow_parent() -> None:
    """Leave Ctrl-C to the parent, which ends its pool, and end with it. Called in a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    # A parent killed by SIGKILL cannot end its pool, and the workers would wait forever.
    threading.Thread(target=wait, daemon=True).start()


def _encode[Item](batch: list[Item]) -> Encoded:
    assert _encoder is not None
    return _encoder(batch)
