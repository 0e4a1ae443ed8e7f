"""The sequences that a model reads: of texts, or of random and repeated tokens (P2.5)."""

import hashlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.options import KEPT, SEQ_LENGTH, AnalysisOptions
from megasink.analysis.result_schemas import RunFacts
from megasink.console.printable import printable
from megasink.data.corpus import Corpus, Document
from megasink.data.hf_tokenizer import leading_ids
from megasink.data.input_files import BYTE_ORDER_MARK
from megasink.data.replaced_tokens import Replacement, replacement
from megasink.data.text_tokenizer import text_tokenizer
from megasink.errors import UserError

SHORTEST = 2
SYNTHETIC = 100
"""Number of sequences in each synthetic dataset, as in P2."""
MADE = ("random", "repeated")
"""Synthetic datasets (P2.5)."""


def shown(datasets: Iterable[str]) -> list[str]:
    """Return the datasets that count in the results: texts, or else the first made-up kind."""
    names = list(dict.fromkeys(datasets))
    return [name for name in names if name not in MADE] or names[:1]


@dataclass(frozen=True)
class Sample:
    """One sequence to run."""

    tokens: tuple[int, ...]  # ids, BOS included
    dataset: str  # the input that it belongs to
    source: str  # where the text came from
    # Number of targets, counted from the end, that enter the loss; None for all.
    scored: int | None = None
    # Places of tokens other than text, counted from the end (1: the last token). Their targets
    # have no bytes, and enter the loss only.
    replaced: tuple[int, ...] = ()
    inside: bool = False  # the sample continues a text, behind tokens that stand before texts

    @property
    def first_target(self) -> int:
        """Place of the first token that enters the loss."""
        return 1 if self.scored is None else len(self.tokens) - self.scored


@dataclass(frozen=True)
class Inputs:
    """The input sequences of a model."""

    samples: list[Sample]  # the sequences, as the model reads them
    facts: RunFacts  # facts about them and the options, for the results


def inputs_of(
    options: AnalysisOptions, model: ProbedModel, texts: Iterable[str] | None = None
) -> Inputs:
    """Return the sequences that the options select, from `texts` if given, otherwise from files."""
    most, length, drawn = model.text_positions, options.seq_length, options.random_lengths
    if problem := options.positions_problem(most, model.facts["name"]):
        raise UserError(problem)
    if drawn is not None:
        length = drawn[1]
    elif length is None:
        length = SEQ_LENGTH if most is None else min(SEQ_LENGTH, most)
    samples = list(_samples(options, length, model, texts))
    if drawn is not None:
        samples = cut_at_random(samples, drawn, options.seed)
    highest = max(max(sample.tokens) for sample in samples)
    if highest >= model.vocabulary:
        raise unknown_id(model, highest)
    replaced = replacement_for(options, model)
    samples = with_replaced_tokens(samples, replaced)
    samples = [replace(sample, tokens=(*model.first, *sample.tokens)) for sample in samples]
    facts = RunFacts(
        **options.some("data", "inputs", "bos", "max_samples", "random_lengths", "seed"),
        seq_length=length,
        replaced_positions=None if replaced is None else list(replaced.positions),
        replaced_with=None if replaced is None else replaced.value,
        device=str(model.device),
        data_sha256=data_hash(samples),
    )
    return Inputs(samples, facts)


def unknown_id(model: ProbedModel, highest: int) -> UserError:
    """Return the error for a token that the model does not have."""
    return UserError(
        f"the tokenizer {model.tokenizer.name_or_path} gives token id {highest}, but the model's "
        f"vocabulary has {model.vocabulary} tokens: pass its tokenizer (--tokenizer)"
    )


def _samples(
    options: AnalysisOptions, length: int, model: ProbedModel, texts: Iterable[str] | None
) -> Iterator[Sample]:
    """Yield the sequences of up to `length` tokens."""
    tokenizer, most = model.tokenizer, options.max_samples
    if texts is not None or "natural" in options.inputs:
        parse = options.parse_special_tokens
        reader = Reader(tokenizer, options.bos, parse_special_tokens=parse)
        if texts is not None:
            yield from texts_in_memory(reader, texts, length, most)
        else:
            how: dict[str, Any] = {"seq_length": length, "max_samples": most}
            yield from text_samples(reader, options.data, **how, json_key=options.json_key)
    count = SYNTHETIC if most is None else min(most, SYNTHETIC)
    ids = [i for i in tokenizer.get_vocab().values() if i < model.vocabulary]
    for kind in (kind for kind in MADE if kind in options.inputs):
        ones = 1 if kind == "repeated" else length  # one random token, repeated
        exclude = tokenizer.all_special_ids
        made = random_sequences(count, ones, ids, options.seed, exclude)
        for i, tokens in enumerate(made):
            yield Sample(tuple(tokens) * (length // ones), kind, f"{kind}:{i}")


def replacement_for(options: AnalysisOptions, model: ProbedModel) -> Replacement | None:
    """Return the replacements in every sequence; print those from the run's training."""
    requested, value = options.replace_tokens_at, options.replace_tokens_with
    if requested is None:
        positions, value = list(model.replaced_at), model.replaced_with
    else:
        positions = [] if requested == (KEPT,) else list(map(int, requested))
    if not positions:
        return None
    made = replacement(
        positions, value or "", seed=options.seed, tokenizer=model.tokenizer, size=model.vocabulary
    )
    if requested is None:
        how = f"as in training (--replace-tokens-at {KEPT} keeps the text)"
        _say(f"every sequence has {made.description}, {how}")
    return made


def _say(line: str) -> None:
    if os.environ.get("RANK", "0") == "0":
        print(f"megasink: {line}", file=sys.stderr)


def text_samples(
    reader: "Reader",
    inputs: Sequence[str],
    *,
    seq_length: int,
    max_samples: int | None,
    json_key: str = "text",
) -> list[Sample]:
    """Return the first tokens of each document, or consecutive samples of a single document."""
    samples = []
    for name, source in zip(dataset_names(inputs), inputs, strict=True):
        cut: list[Sample] = []
        documents = iter(corpus := Corpus([source], json_key=json_key))
        only = next(documents)
        second = None if max_samples == 1 else next(documents, None)
        if second is None:
            cut = _cut(reader, only, name, seq_length, max_samples)
        for document in () if second is None else itertools.chain((only, second), documents):
            tokens = reader.read(document.text, document.source, seq_length)
            if len(tokens) >= SHORTEST:
                cut.append(Sample(tuple(tokens), name, document.source))
            if len(cut) == max_samples:
                break
        if not cut:
            raise UserError(f"{source} has no document of {SHORTEST} or more tokens: add text")
        samples += cut
        if n := corpus.skipped.invalid_utf8:
            _say(f"skipped, not UTF-8 text: {n} in {source} (first {corpus.skipped.examples[0]})")
    return samples


def texts_in_memory(
    reader: "Reader", texts: Iterable[str], length: int, most: int | None
) -> list[Sample]:
    """Return the first tokens of strings, each a text."""
    samples = []
    for number, text in enumerate(texts):
        source = f"text {number}"
        tokens = reader.read(str(text).removeprefix(BYTE_ORDER_MARK), source, length)
        if len(tokens) >= SHORTEST:
            samples.append(Sample(tuple(tokens), "texts", source))
    if not samples:
        raise UserError(f"no text has {SHORTEST} tokens or more: use longer texts")
    return samples[:most]


def _cut(
    reader: "Reader", document: Document, name: str, length: int, most: int | None
) -> list[Sample]:
    """Split one document into samples of `length` tokens, dropping the remainder."""
    wanted = None if most is None else most * length
    tokens = reader.read(document.text, document.source, wanted)
    if len(tokens) < SHORTEST:
        return []
    samples = [Sample(tuple(tokens[:length]), name, document.source)]
    text, step = tokens[length:], length - len(reader.lead)
    count = len(text) // step if most is None else min(len(text) // step, most - 1)
    for i in range(count):
        piece = (*reader.lead, *text[i * step : (i + 1) * step])
        samples.append(Sample(piece, name, f"{document.source}, piece {i + 2}", inside=True))
    if count:
        where = f"the single text of {document.source} was split into {count + 1} samples"
        _say(f"{where} of {length} tokens")
    return samples


class Reader:
    """Turns texts into the tokens that a model reads, with BOS as --bos says (P4.3)."""

    def __init__(self, tokenizer: Any, bos: str = "auto", *, parse_special_tokens: bool = False):
        self._name, self._bos = tokenizer.name_or_path, tokenizer.bos_token_id
        self._text = text_tokenizer(tokenizer, parse_special_tokens=parse_special_tokens)
        # The ids before every text.
        self.lead: list[int] = [] if bos == "none" else leading_ids(tokenizer)
        if bos == "add" and self._bos is None:
            raise UserError(f"--bos add: the tokenizer {self._name} has no BOS token; use auto")
        if bos == "add" and self.lead[:1] != [self._bos]:
            self.lead = [self._bos, *self.lead]
        if self._bos is not None and self.lead.count(self._bos) > 1:
            raise UserError(
                f"the tokenizer {self._name} adds its BOS token {self._bos} twice: fix its "
                "post-processor, or use --bos none"
            )

    def read(self, text: str, source: str, most: int | None = None) -> list[int]:
        """Return the first `most` tokens of a text (None: all); errors name the source."""
        tokens = list(self.lead)
        for ids in self._text.stream(text, source):
            if tokens == [self._bos] == ids[:1]:
                raise UserError(
                    f"{source} already begins with the BOS token {self._bos}, and the tokenizer "
                    f"{self._name} adds another: remove it from the texts, or use --bos none"
                )
            tokens += ids
            if most is not None and len(tokens) >= most:
                break
        return tokens[:most]


def cut_at_random(samples: Iterable[Sample], lengths: tuple[int, int], seed: int) -> list[Sample]:
    """Return the samples cut at random lengths, from lowest to highest (P3, Section 4.1)."""
    low, high = lengths
    drawn = np.random.default_rng(seed)
    return [
        replace(sample, tokens=sample.tokens[: int(drawn.integers(low, high + 1))])
        for sample in samples
    ]


def with_replaced_tokens(
    samples: Iterable[Sample], replacement: Replacement | None
) -> list[Sample]:
    """Return the samples with tokens replaced, at places from the first one (P2.15, P2.16)."""
    if replacement is None:
        return list(samples)
    counts: Counter[str] = Counter()
    made = []
    for sample in samples:
        tokens = np.array(sample.tokens, dtype=np.int64)
        replacement.replace(tokens, counts[sample.dataset])
        counts[sample.dataset] += 1
        places = tuple(len(tokens) - position for position in replacement.at(len(tokens)))
        made.append(replace(sample, tokens=tuple(tokens.tolist()), replaced=places))
    return made


def dataset_names(inputs: Sequence[str]) -> list[str]:
    """Return a short name for each input: its file name, or its path if that is not unique."""
    short = [Path(source).name.split(".")[0] or source for source in inputs]
    paths = [source if source not in MADE else str(Path(source).absolute()) for source in inputs]
    return [
        printable(name if (*short, *MADE).count(name) == 1 else path)
        for name, path in zip(short, paths, strict=True)
    ]


def equal_lengths[T](
    items: Iterable[T], length: Callable[[T], int], batch_size: int
) -> Iterator[tuple[T, ...]]:
    """Yield batches of neighbors of one length, so that nothing is padded."""
    for _, equal in itertools.groupby(items, key=length):
        yield from itertools.batched(equal, batch_size)


def data_hash(samples: Sequence[Sample]) -> str:
    """Return the SHA-256 of the token ids of all samples in order."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(",".join(map(str, sample.tokens)).encode() + b"\n")
    return digest.hexdigest()


def random_sequences(
    count: int, length: int, ids: Collection[int], seed: int, exclude: Sequence[int] = ()
) -> list[list[int]]:
    """Draw sequences of tokens uniformly from the ids of a vocabulary (P2.5)."""
    allowed = torch.tensor(sorted({*ids} - {*exclude}))
    if not len(allowed):
        raise ValueError(
            f"all {len(ids)} tokens of the vocabulary are excluded: none can be drawn at random"
        )
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(allowed), (count, length), generator=generator)
    sequences: list[list[int]] = allowed[drawn].tolist()
    return sequences


def repeated_first_token(content: Sequence[int], copies: int, bos: int | None) -> list[int]:
    """Return a sequence whose first token, BOS or the content's first, is repeated (P4.4)."""
    if copies < 1 or len(content) < 2:
        raise ValueError(
            f"copies {copies}, text of {len(content)} tokens: use 1 or more copies, and 2 or more "
            "tokens"
        )
    first = [content[0]] * copies if bos is None else [bos] * copies + [content[0]]
    return [*first, *content[1:]]


def repeat_rate(documents: Iterable[Sequence[int]], n: int) -> float:
    """Return the share of n-grams with equal tokens (P4.14); none spans two documents."""
    if n < 2:
        raise ValueError(f"n {n}: use 2 or more")
    total = equal = 0
    for document in documents:
        total += max(0, len(document) - n + 1)
        runs = (len(list(run)) for _, run in itertools.groupby(document))
        equal += sum(max(0, run - n + 1) for run in runs)
    if not total:
        raise ValueError(f"no document has {n} or more tokens: use longer documents")
    return equal / total
