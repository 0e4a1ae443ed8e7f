"""Convert a corpus to the `.bin` and `.idx` files that Megatron's indexed datasets read."""

import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import megasink
from megasink.data import chat, output, resume
from megasink.data.corpus import Corpus, Document, Skipped, default_workers
from megasink.data.encode import Encoded, EncoderSettings, encode_in_order
from megasink.data.output import LENGTHS, LOSS_MASK, Written, file_of, output_problems, partial_of
from megasink.data.parts import Place
from megasink.data.text_tokenizer import parts_of, text_json
from megasink.data.tokenizer import leading_ids, tokenizer_hash
from megasink.data.tokenizer_process import from_tokenizer
from megasink.data.writer import IndexedWriter, token_dtype
from megasink.errors import ConfigError, UserError
from megasink.printable import say

_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 512
_SAVE_SECONDS = 10.0  # what a kill costs at most
_COUNTS = ("documents", "tokens", "text_bytes", "largest_id")


@dataclass(frozen=True)
class PreprocessReport:
    """Counts of the files written. `tokens` includes EOD (and BOS); `text_bytes` is the UTF-8 size
    of the documents; `largest_id` is the largest token id that occurs; `chat` holds the counts of
    chat data (see `megasink.data.chat.COUNTS`), and is empty for text."""

    output_prefix: Path
    tokenizer_folder: Path
    documents: int
    tokens: int
    text_bytes: int
    largest_id: int
    vocab_size: int
    skipped: Skipped
    seconds: float
    seq_length: int | None = None
    chat: dict[str, int] = field(default_factory=dict)

    @property
    def files(self) -> list[Path]:
        """The files written."""
        suffixes = output.TEXT if self.seq_length is None else output.CHAT
        return [file_of(self.output_prefix, s) for s in suffixes]

    @property
    def megatron_flags(self) -> list[str]:
        """The flags that train on this data."""
        length = [] if self.seq_length is None else ["--seq-length", str(self.seq_length)]
        return [
            *length,
            *("--data-path", str(self.output_prefix)),
            *("--tokenizer-type", "HuggingFaceTokenizer"),
            *("--tokenizer-model", str(self.tokenizer_folder)),
        ]


def preprocess(
    corpus: Corpus,
    output_prefix: str | Path,
    tokenizer_folder: str | Path,
    *,
    seq_length: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
    trained: tuple[int, bool] | None = None,
    parse_special_tokens: bool = False,
) -> PreprocessReport:
    """Tokenize `corpus` into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.json` (metadata).

    Every document is one Megatron document: BOS if the tokenizer adds it itself, the text, and EOD;
    or a conversation, with nothing around what the chat template gives. Of conversations,
    `PREFIX_loss_mask.bin` and `.idx` hold a byte per token of the same documents: 1 for responses.
    The files appear only when complete: a killed or interrupted run leaves nothing that loads. The
    same call goes on from its remains, to the same bytes; another call removes them. The bytes do
    not depend on `workers`. Memory does not grow with the corpus.

    Args:
        corpus: the documents.
        output_prefix: path of the files without suffix; its folder is created.
        tokenizer_folder: a Hugging Face folder, see `load_tokenizer`.
        seq_length: tokens of the context, for a corpus of conversations, and only for one.
        workers: number of tokenizing processes; None uses every processor, 1 none but this.
            One more reads the tokenizer, and ends.
        overwrite: replace files of the same prefix.
        trained: vocabulary size and BOS of a tokenizer that was trained for this call, which
            another process may need to know (see `Progress`).
        parse_special_tokens: see `TextTokenizer`; conversations always do.

    Raises:
        ConfigError: existing files, an invalid prefix or one inside an input, or `workers` or
            `seq_length` below 1.
        UserError: errors of iterating `corpus` and of `load_tokenizer`, another run that writes the
            same prefix, a file that cannot be written, or conversations of which none is kept.
    """
    start = time.perf_counter()
    prefix, folder = Path(output_prefix), Path(tokenizer_folder)
    workers = default_workers() if workers is None else workers
    problems = output_problems(prefix, corpus.inputs, overwrite=overwrite)
    if workers < 1:
        problems.append(f"--workers {workers}: at least 1")
    if seq_length is not None and seq_length < 1:
        problems.append(f"--seq-length {seq_length}: at least 1")
    if problems:
        raise ConfigError(problems)
    if corpus.chat != (seq_length is not None):
        raise ValueError("seq_length belongs to a corpus of conversations")
    made = from_tokenizer(
        folder, _settings, corpus.json_key, seq_length, parse=parse_special_tokens
    )
    settings, facts = made.settings, made.facts
    if corpus.partition:
        facts["partition"] = list(corpus.partition)
    with output.writing(prefix):
        files = _Files(
            prefix, settings.dtype, resume.made_of(corpus, settings), trained, chat=corpus.chat
        )
        try:
            counts = files.write(corpus, settings, workers)
        finally:
            files.close()
        if seq_length is not None and not counts["documents"]:
            raise UserError(_nothing_kept(corpus, counts, seq_length))
        files.finish()
        report = PreprocessReport(
            output_prefix=prefix,
            tokenizer_folder=folder,
            vocab_size=made.vocab_size,
            skipped=corpus.skipped,
            seconds=time.perf_counter() - start,
            seq_length=seq_length,
            chat={name: counts[name] for name in chat.COUNTS} if corpus.chat else {},
            **{name: counts[name] for name in _COUNTS},
        )
        output.write_sidecar(prefix, _sidecar(report, corpus, made) | facts)
        output.publish(prefix, output.CHAT if corpus.chat else output.TEXT)
    return report


class _Made(NamedTuple):
    """What is taken of a tokenizer: how to encode, what the sidecar tells of it, and its size and
    `tokenizer_hash`."""

    settings: EncoderSettings | chat.ChatSettings
    facts: dict[str, Any]
    vocab_size: int
    sha256: str


def _settings(
    tokenizer: Any, json_key: str, seq_length: int | None, *, parse: bool = False
) -> _Made:
    dtype = token_dtype(max(tokenizer.get_vocab().values()) + 1)  # some vocabularies have holes
    settings: EncoderSettings | chat.ChatSettings
    facts: dict[str, Any]
    if seq_length is None:
        settings = EncoderSettings(
            tokenizer_json=text_json(tokenizer),
            before=leading_ids(tokenizer),
            after=[tokenizer.eos_token_id],
            dtype=dtype,
            parse_special_tokens=parse,
        )
        facts = {"before_document": settings.before, "after_document": settings.after}
        facts["parse_special_tokens"] = parse
    else:
        settings = chat.chat_settings(tokenizer, dtype, json_key, seq_length)
        facts = {"kind": "chat", "seq_length": seq_length} | chat.template_facts(settings)
    return _Made(settings, facts, len(tokenizer), tokenizer_hash(tokenizer))


def _items(document: Document, is_chat: bool) -> Iterator[tuple[Any, int, bool]]:
    """Yield what is encoded of a document, its characters, and whether the document ends there."""
    if is_chat:
        yield (document.text, document.source), len(document.text), True
        return
    for part in parts_of(document.pieces(), document.source):
        yield part, len(part.text), part.last


def _batches(corpus: Corpus, places: deque[Place | None]) -> Iterator[list[Any]]:
    """Yield batches, and append to `places` how far each goes; None inside a document."""
    batch: list[Any] = []
    size = 0
    for document in corpus.tracked("tokenizing"):
        for item, characters, last in _items(document, corpus.chat):
            batch.append(item)
            size += characters
            if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
                places.append(corpus.place if last else None)
                yield batch
                batch, size = [], 0
    if batch:
        places.append(corpus.place)
        yield batch


class _Files:
    """The partial files of a data set, new or of a run that was killed."""

    def __init__(
        self,
        prefix: Path,
        dtype: str,
        made_of: str,
        trained: tuple[int, bool] | None,
        *,
        chat: bool,
    ):
        self._prefix, self._made_of, self._trained = prefix, made_of, trained
        kinds = {"": dtype} | ({LOSS_MASK: "uint8"} if chat else {})
        before = resume.load(prefix)
        if before is None or before.made_of != made_of or set(before.written) != set(kinds):
            output.clear_partial(prefix)
            counts = dict.fromkeys(_COUNTS, 0)
            written = dict.fromkeys(kinds, Written())
            before = resume.Progress(made_of, trained, Place(), counts, written)
        elif before.place.documents:
            say(f"{prefix}: going on after {before.place.documents:,} documents of an earlier run")
        self._place, self._counts = before.place, Counter(before.counts)
        self._writers = {
            name: IndexedWriter(
                partial_of(prefix, f"{name}.bin"),
                partial_of(prefix, name + LENGTHS),
                kind,
                before.written[name],
            )
            for name, kind in kinds.items()
        }
        resume.save(prefix, before)

    def write(self, corpus: Corpus, settings: Any, workers: int) -> Counter[str]:
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
        self._writers[""].add(batch.tokens, batch.lengths, batch.last)
        if batch.loss_mask is not None:
            self._writers[LOSS_MASK].add(batch.loss_mask, batch.lengths)
        counts.update(batch.counts)
        counts["documents"] += len(batch.lengths) if batch.last is None else sum(batch.last)
        counts["tokens"] += len(batch.tokens)
        counts["text_bytes"] += batch.text_bytes
        counts["largest_id"] = max(counts["largest_id"], int(batch.tokens.max(initial=0)))

    def _save(self, place: Place) -> None:
        """Record that everything up to `place` is on disk."""
        written = {name: writer.sync() for name, writer in self._writers.items()}
        done = {name: how_far for name, how_far in written.items() if how_far is not None}
        assert len(done) == len(written)
        counts = dict(self._counts)
        progress = resume.Progress(self._made_of, self._trained, place, counts, done)
        resume.save(self._prefix, progress)

    def finish(self) -> None:
        """Write the indices."""
        for name, writer in self._writers.items():
            writer.finish(partial_of(self._prefix, f"{name}.idx"))

    def close(self) -> None:
        """Close the files as they are."""
        for writer in self._writers.values():
            writer.close()


def _nothing_kept(corpus: Corpus, counts: Counter[str], seq_length: int) -> str:
    return (
        f"no conversation in {' '.join(corpus.inputs)} has a response in the first {seq_length:,} "
        f"tokens: in {counts['beyond_context']} it begins later (raise --seq-length), "
        f"{counts['no_response']} have none and {counts['empty']} no message"
    )


def _sidecar(report: PreprocessReport, corpus: Corpus, made: _Made) -> dict[str, Any]:
    return {
        **{name: getattr(report, name) for name in _COUNTS},
        **report.chat,
        "skipped": asdict(report.skipped),
        "inputs": corpus.inputs,
        "json_key": corpus.json_key,
        "dtype": made.settings.dtype,
        "vocab_size": report.vocab_size,
        "tokenizer": {"folder": str(report.tokenizer_folder), "sha256": made.sha256},
        "versions": {"megasink": megasink.__version__}
        | {p: version(p) for p in ("megatron-core", "tokenizers", "transformers")},
    }
