"""Convert a corpus to the `.bin` and `.idx` files that Megatron's indexed datasets read."""

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import megasink
from megasink.data import output, resume
from megasink.data.corpus import Corpus, Skipped, default_workers
from megasink.data.encode import Encoded, EncoderSettings, encode_in_order
from megasink.data.output import LENGTHS, Written, file_of, output_problems, partial_of
from megasink.data.parts import Place
from megasink.data.text_tokenizer import Part, parts_of, text_json
from megasink.data.tokenizer import leading_ids, tokenizer_hash
from megasink.data.tokenizer_process import from_tokenizer
from megasink.data.writer import IndexedWriter, token_dtype
from megasink.errors import ConfigError
from megasink.printable import say

_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 512
_SAVE_SECONDS = 10.0  # what a kill costs at most
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
        return [file_of(self.output_prefix, s) for s in output.FILES]

    @property
    def megatron_flags(self) -> list[str]:
        """The flags that train on this data."""
        return [
            *("--data-path", str(self.output_prefix)),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(self.tokenizer_folder)),
        ]


def preprocess(
    corpus: Corpus,
    output_prefix: str | Path,
    tokenizer_folder: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    trained: tuple[int, bool] | None = None,
    parse_special_tokens: bool = False,
) -> PreprocessReport:
    """Tokenize `corpus` into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.json` (metadata).

    Every document is one Megatron document: BOS if the tokenizer adds it itself, the text, and EOD.
    The files appear only when complete: a killed or interrupted run leaves nothing that loads. The
    same call goes on from its remains, to the same bytes; another call removes them. The bytes do
    not depend on `workers`. Memory does not grow with the corpus.

    Args:
        corpus: the documents.
        output_prefix: path of the files without suffix; its folder is created.
        tokenizer_folder: a Hugging Face folder, see `load_tokenizer`.
        workers: number of tokenizing processes; None uses every processor, 1 none but this.
            One more reads the tokenizer, and ends.
        overwrite: replace files of the same prefix.
        trained: vocabulary size and BOS of a tokenizer that was trained for this call, which
            another process may need to know (see `Progress`).
        parse_special_tokens: see `TextTokenizer`.
    """
    start = time.perf_counter()
    prefix, folder = Path(output_prefix), Path(tokenizer_folder)
    workers = default_workers() if workers is None else workers
    problems = output_problems(prefix, corpus.inputs, overwrite=overwrite)
    if workers < 1:
        problems.append(f"--workers {workers}: at least 1")
    if problems:
        raise ConfigError(problems)
    made = from_tokenizer(folder, _settings, parse=parse_special_tokens)
    settings = made.settings
    with output.writing(prefix):
        files = _Files(prefix, settings.dtype, resume.made_of(corpus, settings), trained)
        try:
            counts = files.write(corpus, settings, workers)
        finally:
            files.close()
        files.finish()
        report = PreprocessReport(
            output_prefix=prefix,
            tokenizer_folder=folder,
            vocab_size=made.vocab_size,
            skipped=corpus.skipped,
            seconds=time.perf_counter() - start,
            **{name: counts[name] for name in _COUNTS},
        )
        output.write_sidecar(prefix, _sidecar(report, corpus, made))
        output.publish(prefix)
    return report


class _Made(NamedTuple):
    """The facts taken from a tokenizer: how to encode, its size and `tokenizer_hash`."""

    settings: EncoderSettings
    vocab_size: int
    sha256: str


def _settings(tokenizer: Any, *, parse: bool) -> _Made:
    settings = EncoderSettings(
        tokenizer_json=text_json(tokenizer),
        before=leading_ids(tokenizer),
        after=[tokenizer.eos_token_id],
        dtype=token_dtype(max(tokenizer.get_vocab().values()) + 1),  # some vocabularies have holes
        parse_special_tokens=parse,
    )
    return _Made(settings, len(tokenizer), tokenizer_hash(tokenizer))


def _batches(corpus: Corpus, places: deque[Place | None]) -> Iterator[list[Part]]:
    """Yield batches, and append to `places` how far each goes; None inside a document."""
    batch: list[Part] = []
    size = 0
    for document in corpus.tracked("tokenizing"):
        for part in parts_of(document.text, document.source):
            batch.append(part)
            size += len(part.text)
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                places.append(corpus.place if part.last else None)
                yield batch
                batch, size = [], 0
    if batch:
        places.append(corpus.place)
        yield batch


class _Files:
    """The partial files of a data set, new or of a run that was killed."""

    def __init__(self, prefix: Path, dtype: str, made_of: str, trained: tuple[int, bool] | None):
        self._prefix, self._made_of, self._trained = prefix, made_of, trained
        before = resume.load(prefix)
        if before is None or before.made_of != made_of:
            output.clear_partial(prefix)
            counts = dict.fromkeys(_COUNTS, 0)
            before = resume.Progress(made_of, trained, Place(), counts, Written())
        elif before.place.documents:
            say(f"{prefix}: going on after {before.place.documents:,} documents of an earlier run")
        self._place, self._counts = before.place, Counter(before.counts)
        paths = partial_of(prefix, ".bin"), partial_of(prefix, LENGTHS)
        self._writer = IndexedWriter(*paths, dtype, before.written)
        resume.save(prefix, before)

    def write(self, corpus: Corpus, settings: EncoderSettings, workers: int) -> Counter[str]:
        """Write the rest of the corpus, and return the counts of all of it."""
        places: deque[Place | None] = deque()
        corpus.start = self._place
        saved = time.monotonic()
        for batch in encode_in_order(_batches(corpus, places), settings, workers):
            self._add(batch)
            place = places.popleft()
            if place is not None and time.monotonic() - saved >= _SAVE_SECONDS:
                self._save(place)
                saved = time.monotonic()
        return self._counts

    def _add(self, batch: Encoded) -> None:
        counts = self._counts
        self._writer.add(batch.tokens, batch.lengths, batch.last)
        counts["documents"] += sum(batch.last)
        counts["tokens"] += len(batch.tokens)
        counts["text_bytes"] += batch.text_bytes
        counts["largest_id"] = max(counts["largest_id"], int(batch.tokens.max(initial=0)))

    def _save(self, place: Place) -> None:
        """Record that everything up to `place` is on disk."""
        written = self._writer.sync()
        assert written is not None
        counts = dict(self._counts)
        progress = resume.Progress(self._made_of, self._trained, place, counts, written)
        resume.save(self._prefix, progress)

    def finish(self) -> None:
        """Write the index."""
        self._writer.finish(partial_of(self._prefix, ".idx"))

    def close(self) -> None:
        """Close the files as they are."""
        self._writer.close()


def _sidecar(report: PreprocessReport, corpus: Corpus, made: _Made) -> dict[str, Any]:
    settings = made.settings
    return {
        **{name: getattr(report, name) for name in _COUNTS},
        "skipped": asdict(report.skipped),
        "inputs": corpus.inputs,
        "json_key": corpus.json_key,
        "split_documents": corpus.is_split,
        "dtype": settings.dtype,
        "vocab_size": report.vocab_size,
        "tokenizer": {"folder": str(report.tokenizer_folder), "sha256": made.sha256},
        "versions": {"megasink": megasink.__version__}
        | {p: version(p) for p in ("megatron-core", "tokenizers", "transformers")},
        "before_document": settings.before,
        "after_document": settings.after,
        "parse_special_tokens": settings.parse_special_tokens,
        **({"partition": list(corpus.partition)} if corpus.partition else {}),
    }
