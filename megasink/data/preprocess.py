"""Convert a corpus to the `.bin` and `.idx` files that Megatron's indexed datasets read."""

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

import megasink
from megasink.console.printable import say
from megasink.data import dataset_files, resume
from megasink.data.corpus import Corpus, Skipped, default_workers
from megasink.data.dataset_files import LENGTHS, Validation, Written, partial_of
from megasink.data.encode import Encoded, EncoderSettings, encode_in_order, from_tokenizer
from megasink.data.hf_tokenizer import id_count, leading_ids, tokenizer_hash
from megasink.data.indexed_dataset import IndexedWriter, token_dtype
from megasink.data.input_files import Place
from megasink.data.text_tokenizer import Part, parts_of, text_json
from megasink.errors import ConfigError, UserError

_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 512
_SAVE_SECONDS = 10.0  # the most that a kill costs
_COUNTS = ("documents", "tokens", "text_bytes", "largest_id")


@dataclass(frozen=True)
class PreprocessReport:
    """Counts of the files written; `validation` has those of the documents that were drawn."""

    # `tokens` includes EOD (and BOS); `text_bytes` is the UTF-8 size of the documents.

    documents: int
    tokens: int
    text_bytes: int
    largest_id: int
    skipped: Skipped
    files: list[Path]
    validation: "PreprocessReport | None" = None


def preprocess(
    corpus: Corpus,
    output_prefix: str | Path,
    tokenizer_folder: str | Path,
    *,
    workers: int | None = None,
    overwrite: bool = False,
    trained: tuple[int, bool] | None = None,
    parse_special_tokens: bool = False,
    validation: Validation | None = None,
) -> PreprocessReport:
    """Tokenize `corpus` into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.json` (metadata).

    Every document is BOS if the tokenizer adds it, the text, and EOD. The files appear only when
    complete; the same call continues from partial files, to the same bytes. `trained` has the
    vocabulary size and BOS of a tokenizer that was trained for this call. `validation` moves some
    documents into `validation_of(PREFIX)`.
    """
    prefix, folder = Path(output_prefix), Path(tokenizer_folder)
    workers = default_workers() if workers is None else workers
    prefixes = [prefix] if validation is None else [prefix, dataset_files.validation_of(prefix)]
    problems = [
        problem
        for each in prefixes
        for problem in dataset_files.output_problems(each, corpus.inputs, overwrite=overwrite)
    ]
    if workers < 1:
        problems.append(f"--workers {workers}: use 1 or more")
    if problems:
        raise ConfigError(problems)
    made = from_tokenizer(folder, _settings, parse=parse_special_tokens)
    settings = made.settings
    made_of = resume.made_of(corpus, settings, validation)
    with dataset_files.writing(*prefixes):
        files = _Files(prefixes, settings.dtype, made_of, trained)
        try:
            counts = files.write(corpus, settings, workers, validation)
        finally:
            files.close()
        _check_both(counts, validation)
        files.finish()
        report: PreprocessReport | None = None
        for each, of_set in zip(reversed(prefixes), reversed(counts), strict=True):
            numbers = {name: of_set[name] for name in _COUNTS}
            about = numbers | _sidecar(corpus, made, folder)
            if validation is not None and report:
                about |= dataset_files.record_of(validation, prefix, is_part=bool(corpus.partition))
            dataset_files.write_sidecar(each, about)
            report = PreprocessReport(
                **numbers,
                skipped=corpus.skipped,
                files=[
                    *(dataset_files.file_of(each, suffix) for suffix in dataset_files.FILES),
                    *(report.files if report else ()),
                ],
                validation=report,
            )
        for each in reversed(prefixes):  # PREFIX last: it names the other
            dataset_files.publish(each)
    assert report is not None
    return report


def _check_both(counts: Sequence[Counter[str]], validation: Validation | None) -> None:
    """Raise UserError if training or validation has no document."""
    documents = [of_set["documents"] for of_set in counts]
    if validation is not None and not all(documents):
        none = "training: use a smaller" if documents[1] else "validation: use a larger"
        number = sum(documents)
        raise UserError(
            f"--validation {validation.share:g} of {number} document{'s' * (number != 1)} "
            f"leaves none for {none} share, more documents, or --split-documents paragraphs, "
            "which divides text files"
        )


class _Made(NamedTuple):
    """The facts taken from a tokenizer: encoding, size and `tokenizer_hash`."""

    settings: EncoderSettings
    vocab_size: int
    sha256: str


def _settings(tokenizer: Any, *, parse: bool) -> _Made:
    settings = EncoderSettings(
        tokenizer_json=text_json(tokenizer),
        before=leading_ids(tokenizer),
        after=[tokenizer.eos_token_id],
        dtype=token_dtype(id_count(tokenizer)),
        parse_special_tokens=parse,
    )
    return _Made(settings, id_count(tokenizer), tokenizer_hash(tokenizer))


def _batches(
    corpus: Corpus, ends: deque[tuple[Place | None, list[int]]], validation: Validation | None
) -> Iterator[list[Part]]:
    """Yield batches, and append to `ends` each place (None in a document) and its parts' sets."""
    batch: list[Part] = []
    sets: list[int] = []
    size, partition = 0, (corpus.partition or (1, 1))[0]
    for document in corpus.tracked("tokenizing"):
        drawn = validation is not None and validation.has(corpus.place.documents - 1, partition)
        for part in parts_of(document.text, document.source):
            batch.append(part)
            sets.append(int(drawn))
            size += len(part.text)
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                ends.append((corpus.place if part.last else None, sets))
                yield batch
                batch, sets, size = [], [], 0
    if batch:
        ends.append((corpus.place, sets))
        yield batch


class _Files:
    """The partial files of data sets, new or from a killed run."""

    def __init__(
        self, prefixes: list[Path], dtype: str, made_of: str, trained: tuple[int, bool] | None
    ):
        self._prefixes, self._made_of, self._trained = prefixes, made_of, trained
        before = resume.load(prefixes[0])
        if before is None or before.made_of != made_of:
            dataset_files.clear_partial(*prefixes)
            counts = [dict.fromkeys(_COUNTS, 0) for _ in prefixes]
            written = [Written() for _ in prefixes]
            before = resume.Progress(made_of, trained, Place(), counts, written)
        elif done := before.place.documents:
            say(f"{prefixes[0]}: resuming after {done:,} documents of an earlier run")
        self._place, self._counts = before.place, [Counter(counts) for counts in before.counts]
        self._writers = [
            IndexedWriter(partial_of(prefix, ".bin"), partial_of(prefix, LENGTHS), dtype, start)
            for prefix, start in zip(prefixes, before.written, strict=True)
        ]
        resume.save(prefixes[0], before)

    def write(
        self, corpus: Corpus, settings: EncoderSettings, workers: int, validation: Validation | None
    ) -> list[Counter[str]]:
        """Write the rest of the corpus, and return the counts of the whole corpus by data set."""
        ends: deque[tuple[Place | None, list[int]]] = deque()
        corpus.start = self._place
        saved = time.monotonic()
        batches = _batches(corpus, ends, validation)
        for batch in encode_in_order(batches, settings, workers):
            place, sets = ends.popleft()
            self._add(batch, np.array(sets))
            if place is not None and time.monotonic() - saved >= _SAVE_SECONDS:
                self._save(place)
                saved = time.monotonic()
        return self._counts

    def _add(self, batch: Encoded, sets: NDArray[np.integer]) -> None:
        """Append each part of a batch to its data set."""
        for number, (writer, counts) in enumerate(zip(self._writers, self._counts, strict=True)):
            is_here = sets == number
            tokens = batch.tokens[np.repeat(is_here, batch.lengths)]
            last = list(compress(batch.last, is_here))
            writer.add(tokens, list(compress(batch.lengths, is_here)), last)
            counts["documents"] += sum(last)
            counts["tokens"] += len(tokens)
            counts["text_bytes"] += sum(compress(batch.text_bytes, is_here))
            counts["largest_id"] = max(counts["largest_id"], int(tokens.max(initial=0)))

    def _save(self, place: Place) -> None:
        """Record that everything up to `place` is on disk."""
        written = [writer.sync() for writer in self._writers]
        on_disk = [each for each in written if each is not None]
        assert len(on_disk) == len(written)
        counts = [dict(of_set) for of_set in self._counts]
        progress = resume.Progress(self._made_of, self._trained, place, counts, on_disk)
        resume.save(self._prefixes[0], progress)

    def finish(self) -> None:
        """Write the indices."""
        for prefix, writer in zip(self._prefixes, self._writers, strict=True):
            writer.finish(partial_of(prefix, ".idx"))

    def close(self) -> None:
        """Close the files unfinished."""
        for writer in self._writers:
            writer.close()


def _sidecar(corpus: Corpus, made: _Made, folder: Path) -> dict[str, Any]:
    settings = made.settings
    return {
        "skipped": asdict(corpus.skipped),
        "inputs": corpus.inputs,
        "json_key": corpus.json_key,
        "split_documents": corpus.is_split,
        "dtype": settings.dtype,
        "vocab_size": made.vocab_size,
        "tokenizer": {"folder": str(folder), "sha256": made.sha256},
        "versions": {"megasink": megasink.__version__}
        | {p: version(p) for p in ("megatron-core", "tokenizers", "transformers")},
        "before_document": settings.before,
        "after_document": settings.after,
        "parse_special_tokens": settings.parse_special_tokens,
        **({"partition": list(corpus.partition)} if corpus.partition else {}),
    }
