"""Convert a corpus to the `.bin` and `.idx` files that Megatron's indexed datasets read."""

import json
import os
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

import megasink
from megasink.data import chat, output
from megasink.data.corpus import Corpus, Document, Skipped
from megasink.data.encode import Encoded, EncoderSettings, encode_in_order
from megasink.data.output import LOSS_MASK, file_of, output_problems, partial_of
from megasink.data.tokenizer import leading_ids, load_tokenizer, tokenizer_hash
from megasink.errors import ConfigError, UserError

_BATCH_CHARACTERS = 1 << 19
_BATCH_DOCUMENTS = 512
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


def default_workers() -> int:
    """Return the number of processors available to this process."""
    return len(os.sched_getaffinity(0))


def preprocess(
    corpus: Corpus,
    output_prefix: str | Path,
    tokenizer_folder: str | Path,
    *,
    seq_length: int | None = None,
    workers: int | None = None,
    overwrite: bool = False,
) -> PreprocessReport:
    """Tokenize `corpus` into `PREFIX.bin`, `PREFIX.idx` and `PREFIX.json` (metadata).

    Every document is one Megatron document: BOS if the tokenizer adds it itself, the text, and EOD;
    or a conversation, with nothing around what the chat template gives. Of conversations,
    `PREFIX_loss_mask.bin` and `.idx` hold a byte per token of the same documents: 1 for responses.
    The files appear only when complete: a killed run leaves nothing that loads, and the next run
    removes its remains. The bytes do not depend on `workers`.

    Args:
        corpus: the documents.
        output_prefix: path of the files without suffix; its folder is created.
        tokenizer_folder: a Hugging Face folder, see `load_tokenizer`.
        seq_length: tokens of the context, for a corpus of conversations, and only for one.
        workers: number of tokenizing processes; None uses every processor, 1 starts no process.
        overwrite: replace files of the same prefix.

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
    tokenizer = load_tokenizer(folder)
    with output.writing(prefix):
        # not len(tokenizer): some vocabularies have holes
        files = _Files(prefix, max(tokenizer.get_vocab().values()) + 1, with_mask=corpus.chat)
        documents = corpus.tracked("tokenizing")
        facts: dict[str, Any]
        if seq_length is None:
            texts = EncoderSettings(
                tokenizer_json=tokenizer.backend_tokenizer.to_str(),
                before=leading_ids(tokenizer),
                after=[tokenizer.eos_token_id],
                dtype=files.dtype,
            )
            facts = {"before_document": texts.before, "after_document": texts.after}
            counts = files.add(encode_in_order(_batches(documents, _text), texts, workers))
        else:
            chats = chat.chat_settings(tokenizer, files.dtype, corpus.json_key, seq_length)
            facts = {"kind": "chat", "seq_length": seq_length} | chat.template_facts(chats)
            records = _batches(documents, _record)
            counts = files.add(encode_in_order(records, chats, workers))
            if not counts["documents"]:
                raise UserError(_nothing_kept(corpus, counts, seq_length))
        files.close()
        report = PreprocessReport(
            output_prefix=prefix,
            tokenizer_folder=folder,
            vocab_size=len(tokenizer),
            skipped=corpus.skipped,
            seconds=time.perf_counter() - start,
            seq_length=seq_length,
            chat={name: counts[name] for name in chat.COUNTS} if corpus.chat else {},
            **{name: counts[name] for name in _COUNTS},
        )
        sidecar = _sidecar(report, corpus, files.dtype, tokenizer) | facts
        partial_of(prefix, ".json").write_text(json.dumps(sidecar, indent=2) + "\n")
        output.publish(prefix, output.CHAT if corpus.chat else output.TEXT)
    return report


def _text(document: Document) -> str:
    return document.text


def _record(document: Document) -> tuple[str, str]:
    return document.text, document.source


def _batches[Item](
    documents: Iterable[Document], item_of: Callable[[Document], Item]
) -> Iterator[list[Item]]:
    batch: list[Item] = []
    size = 0
    for document in documents:
        batch.append(item_of(document))
        size += len(document.text)
        if size >= _BATCH_CHARACTERS or len(batch) >= _BATCH_DOCUMENTS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


class _Files:
    """Megatron's writers of the partial files of a data set."""

    def __init__(self, prefix: Path, vocab_size: int, *, with_mask: bool):
        with warnings.catch_warnings():
            # importing megatron.core warns of every missing NVIDIA package; none is needed
            warnings.simplefilter("ignore")
            from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder
        dtype = DType.optimal_dtype(vocab_size)
        self.dtype: str = dtype.__name__
        kinds = {"": dtype} | ({LOSS_MASK: np.uint8} if with_mask else {})
        self._writers = {
            name: IndexedDatasetBuilder(str(partial_of(prefix, f"{name}.bin")), dtype=kind)
            for name, kind in kinds.items()
        }
        self._prefix = prefix

    def add(self, encoded: Iterable[Encoded]) -> Counter[str]:
        """Write the documents of batches, and return their counts."""
        counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        for batch in encoded:
            start = 0
            for length in batch.lengths:
                part = slice(start, start + length)
                self._writers[""].add_document(batch.tokens[part], [length])
                if batch.loss_mask is not None:
                    self._writers[LOSS_MASK].add_document(batch.loss_mask[part], [length])
                start += length
            counts.update(batch.counts)
            counts["documents"] += len(batch.lengths)
            counts["tokens"] += start
            counts["text_bytes"] += batch.text_bytes
            counts["largest_id"] = max(counts["largest_id"], int(batch.tokens.max(initial=0)))
        return counts

    def close(self) -> None:
        """Write the indices."""
        for name, writer in self._writers.items():
            writer.finalize(str(partial_of(self._prefix, f"{name}.idx")))


def _nothing_kept(corpus: Corpus, counts: Counter[str], seq_length: int) -> str:
    return (
        f"no conversation in {' '.join(corpus.inputs)} has a response in the first {seq_length:,} "
        f"tokens: in {counts['beyond_context']} it begins later (raise --seq-length), "
        f"{counts['no_response']} have none and {counts['empty']} no message"
    )


def _sidecar(
    report: PreprocessReport, corpus: Corpus, dtype: str, tokenizer: Any
) -> dict[str, Any]:
    return {
        **{name: getattr(report, name) for name in _COUNTS},
        **report.chat,
        "skipped": asdict(report.skipped),
        "inputs": corpus.inputs,
        "json_key": corpus.json_key,
        "dtype": dtype,
        "vocab_size": report.vocab_size,
        "tokenizer": {"folder": str(report.tokenizer_folder), "sha256": tokenizer_hash(tokenizer)},
        "versions": {"megasink": megasink.__version__}
        | {p: version(p) for p in ("megatron-core", "tokenizers", "transformers")},
    }
