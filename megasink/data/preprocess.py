"""Convert a corpus to the `.bin` and `.idx` files that Megatron's GPTDataset reads."""

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
"""In order of publication: Megatron loads nothing without the `.idx`."""
_COUNTS = ("documents", "tokens", "text_bytes", "largest_id")


@dataclass(frozen=True)
class PreprocessReport:
    """Counts of the files written. `tokens` includes EOD (and BOS); `text_bytes` is the UTF-8 size
    of the documents; `largest_id` is the largest token id that occurs."""

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
        """The flags that train on this data."""
        return [
            *("--data-path", str(self.output_prefix)),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(self.tokenizer_folder)),
        ]


def default_workers() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0))


def preprocess(
    corpus: Corpus,
    output_prefix: str | Path,
    tokenizer_folder: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
) -> PreprocessReport:
    """Tokenize `corpus` into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.json` (metadata).

    Every document is one Megatron document: BOS if the tokenizer adds it itself, the text, and EOD.
    The files appear only when complete: a killed run leaves nothing that loads, and the next run
    removes its remains. The bytes do not depend on `workers`.

    Args:
        corpus: the documents.
        output_prefix: path of the files without suffix; its folder is created.
        tokenizer_folder: a Hugging Face folder, see `load_tokenizer`.
        workers: number of tokenizing processes; None uses every processor, 1 starts no process.
        overwrite: replace files of the same prefix.

    Raises:
        ConfigError: existing files, an invalid prefix or one inside an input, or `workers` below 1.
        UserError: errors of iterating `corpus` and of `load_tokenizer`, another run that writes the
            same prefix, or a file that cannot be written.
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
    """Return why `prefix` cannot be written to, given `inputs`, one sentence per problem."""
    if prefix.suffix in (".bin", ".idx"):
        return [f"--output {prefix} is a prefix: leave {prefix.suffix} off"]
    written = {_file(prefix, s).resolve() for s in _SUFFIXES}
    problems = [
        f"--output {prefix} would write into the input {i}: choose another place"
        for i in map(Path, inputs)
        # the next run would read this run's output in the folder as documents
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
    """Create Megatron's writer for `path`; return the name of its token type, and the writer."""
    with warnings.catch_warnings():
        # importing megatron.core warns of every missing NVIDIA package; none is needed
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
    """Lock `prefix` for this run, and remove partial files of this run or an older one.

    The lock is the kernel's, so a dead process holds none. A non-empty file of that name belongs to
    someone else: it is locked, and left as it is.
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
        # Do not block if the name is a pipe.
        file = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK, 0o666)
        try:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another run is writing {prefix}: wait for it") from None
            except OSError:
                pass  # a file system without locks
            # The previous run may have removed the file between our open and lock.
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
    # Before replacing the old .bin, so that its .idx never goes with the new one.
    _file(prefix, ".idx").unlink(missing_ok=True)
    # Megatron caches sample indices by prefix, regardless of the content.
    shutil.rmtree(prefix / "cache" / "GPTDataset_indices", ignore_errors=True)
    for suffix in _SUFFIXES:
        _partial(prefix, suffix).rename(_file(prefix, suffix))
    sync_folder(prefix.parent)
