"""A corpus to the `.bin` and `.idx` files that Megatron's GPTDataset reads."""

import fcntl
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import megasink
from megasink.atomic import sync, sync_folder
from megasink.data.corpus import Corpus, Document, Skipped
from megasink.data.encode import Encoded, EncoderSettings, encode_in_order
from megasink.data.tokenizer import leading_ids, load_tokenizer, tokenizer_hash
from megasink.errors import ConfigError, UserError

_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 512
_SUFFIXES = (".json", ".bin", ".idx")
"""In the order they appear: Megatron loads nothing without the `.idx`."""
_COUNTS = ("documents", "tokens", "text_bytes", "largest_id")


@dataclass(frozen=True)
class PreprocessReport:
    """What was written. `tokens` counts EOD (and BOS) too; `text_bytes` is the documents' UTF-8;
    `largest_id` is that of a token which occurs."""

    output_prefix: Path
    tokenizer_folder: Path
    documents: int
    tokens: int
    text_bytes: int
    largest_id: int
    vocab_size: int
    skipped: Skipped
    seconds: float

    @property
    def files(self) -> list[Path]:
        """The files written."""
        return [_file(self.output_prefix, s) for s in _SUFFIXES]

    @property
    def megatron_flags(self) -> list[str]:
        """The flags that train on it."""
        return [
            *("--data-path", str(self.output_prefix)),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(self.tokenizer_folder)),
        ]


def default_workers() -> int:
    """The processors this process may run on."""
    return len(os.sched_getaffinity(0))


def preprocess(
    corpus: Corpus,
    output_prefix: str | Path,
    tokenizer_folder: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
) -> PreprocessReport:
    """Tokenize `corpus` into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.json` (of what).

    Every document is one Megatron document: the BOS token if the tokenizer puts one itself, its
    text, and EOD. The files appear when they are complete: a run that is killed leaves nothing that
    loads, and the next one clears what it left. The bytes do not depend on `workers`.

    Args:
        corpus: the documents.
        output_prefix: path of the files without their suffix; its folder is created.
        tokenizer_folder: a Hugging Face folder, see `load_tokenizer`.
        workers: processes that tokenize; None takes every processor, 1 starts none.
        overwrite: replace files of the same prefix.

    Raises:
        ConfigError: files that exist, a prefix that is none or lies in an input, `workers` below 1.
        UserError: what iterating `corpus` and `load_tokenizer` raise; another run writing the same
            prefix; a file that cannot be written.
    """
    start = time.perf_counter()
    prefix, folder = Path(output_prefix), Path(tokenizer_folder)
    workers = default_workers() if workers is None else workers
    problems = output_problems(prefix, corpus.inputs, overwrite=overwrite)
    if workers < 1:
        problems.append(f"--workers {workers}: at least 1")
    if problems:
        raise ConfigError(problems)
    tokenizer = load_tokenizer(folder)
    with _writing(prefix):
        # not len(tokenizer): some vocabularies have holes
        dtype, builder = _builder(_partial(prefix, ".bin"), max(tokenizer.get_vocab().values()) + 1)
        settings = EncoderSettings(
            tokenizer_json=tokenizer.backend_tokenizer.to_str(),
            before=leading_ids(tokenizer),
            after=[tokenizer.eos_token_id],
            dtype=dtype,
        )
        batches = _batches(corpus.tracked("tokenizing"))
        counts = _add(builder, encode_in_order(batches, settings, workers))
        builder.finalize(str(_partial(prefix, ".idx")))
        report = PreprocessReport(
            output_prefix=prefix,
            tokenizer_folder=folder,
            vocab_size=len(tokenizer),
            skipped=corpus.skipped,
            seconds=time.perf_counter() - start,
            **counts,
        )
        sidecar = _sidecar(report, corpus, settings, tokenizer)
        _partial(prefix, ".json").write_text(json.dumps(sidecar, indent=2) + "\n")
        _publish(prefix)
    return report


def output_problems(prefix: Path, inputs: Sequence[str], *, overwrite: bool) -> list[str]:
    """Why `prefix` cannot be written to when `inputs` are read, one sentence each."""
    if prefix.suffix in (".bin", ".idx"):
        return [f"--output {prefix} is a prefix: leave {prefix.suffix} off"]
    written = {_file(prefix, s).resolve() for s in _SUFFIXES}
    problems = [
        f"--output {prefix} is written to what is read, {i}: put it elsewhere"
        for i in map(Path, inputs)
        # the next run would take what this one wrote in a folder for documents
        if i.resolve() in written or (i.is_dir() and prefix.resolve().is_relative_to(i.resolve()))
    ]
    if problems:
        return problems
    existing = [str(f) for f in (_file(prefix, s) for s in _SUFFIXES) if f.exists()]
    if existing and not overwrite:
        return [f"{', '.join(existing)} exist: pass --overwrite, or another --output"]
    return []


def _file(prefix: Path, suffix: str) -> Path:
    return prefix.with_name(prefix.name + suffix)  # with_suffix would cut "web.v2"


def _partial(prefix: Path, suffix: str) -> Path:
    return _file(prefix, suffix + ".partial")


def _batches(documents: Iterable[Document]) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for document in documents:
        batch.append(document.text)
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _builder(path: Path, vocab_size: int) -> tuple[str, Any]:
    """Megatron's writer of `path`, and the name of the token type it takes for the vocabulary."""
    with warnings.catch_warnings():
        # importing megatron.core warns of every NVIDIA package that is not there; none is needed
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    dtype = DType.optimal_dtype(vocab_size)
    return dtype.__name__, IndexedDatasetBuilder(str(path), dtype=dtype)


def _add(builder: Any, encoded: Iterable[Encoded]) -> dict[str, int]:
    counts = dict.fromkeys(_COUNTS, 0)
    for batch in encoded:
        start = 0
        for length in batch.lengths:
            builder.add_document(batch.tokens[start : start + length], [length])
            start += length
        counts["documents"] += len(batch.lengths)
        counts["tokens"] += start
        counts["text_bytes"] += batch.text_bytes
        counts["largest_id"] = max(counts["largest_id"], int(batch.tokens.max(initial=0)))
    return counts


def _sidecar(
    report: PreprocessReport, corpus: Corpus, settings: EncoderSettings, tokenizer: Any
) -> dict[str, Any]:
    return {
        **{name: getattr(report, name) for name in _COUNTS},
        "skipped": asdict(report.skipped),
        "inputs": corpus.inputs,
        "json_key": corpus.json_key,
        "dtype": settings.dtype,
        "before_document": settings.before,
        "after_document": settings.after,
        "vocab_size": report.vocab_size,
        "tokenizer": {"folder": str(report.tokenizer_folder), "sha256": tokenizer_hash(tokenizer)},
        "versions": {"megasink": megasink.__version__}
        | {p: version(p) for p in ("megatron-core", "tokenizers", "transformers")},
    }


@contextmanager
def _writing(prefix: Path) -> Iterator[None]:
    """Hold `prefix` for this run alone; leave no partial file, of this run or an older one.

    The lock is the kernel's, so that of a dead process holds nothing. A file of that name which is
    not empty is somebody else's: it is locked, and left as it is.
    """
    try:
        prefix.parent.mkdir(parents=True, exist_ok=True)
        lock = _file(prefix, ".lock")
        with _locked(lock, prefix):
            try:
                _clear_partial(prefix)
                yield
            finally:
                _clear_partial(prefix)
                if lock.stat().st_size == 0:
                    lock.unlink()
    except OSError as error:
        raise UserError(f"{prefix} cannot be written: {error.strerror or error}") from error


@contextmanager
def _locked(lock: Path, prefix: Path) -> Iterator[None]:
    while True:
        # Not waiting where the name is that of a pipe.
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another run is writing {prefix}: wait for it") from None
            except OSError:
                pass  # a file system without locks
            # The run before may have removed the file between our opening and locking it.
            if lock.exists() and os.path.samestat(os.fstat(file), lock.stat()):
                yield
                return
        finally:
            os.close(file)


def _clear_partial(prefix: Path) -> None:
    for suffix in _SUFFIXES:
        _partial(prefix, suffix).unlink(missing_ok=True)


def _publish(prefix: Path) -> None:
    for suffix in _SUFFIXES:
        with _partial(prefix, suffix).open("rb") as file:
            sync(file)
    # Before the old .bin goes, so that its .idx never stands beside the new one.
    _file(prefix, ".idx").unlink(missing_ok=True)
    # Megatron caches sample indices under the prefix's name, whatever the files hold.
    shutil.rmtree(prefix / "cache" / "GPTDataset_indices", ignore_errors=True)
    for suffix in _SUFFIXES:
        _partial(prefix, suffix).rename(_file(prefix, suffix))
    sync_folder(prefix.parent)
