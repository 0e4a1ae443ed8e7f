"""Convert texts to token sequences for probing; random and repeated tokens (P2.5)."""

import hashlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasink.console.printable import printable
from megasink.data.corpus import Corpus, Document
from megasink.data.files import BYTE_ORDER_MARK
from megasink.data.replaced_tokens import Replacement
from megasink.data.text_tokenizer import text_tokenizer
from megasink.data.tokenizer import leading_ids
from megasink.errors import UserError

SHORTEST = 2
MADE = ("random", "repeated")
"""Datasets of made-up tokens (P2.5)."""


def shown(datasets: Iterable[str]) -> list[str]:
    """Return the datasets that count in the results of the whole analysis.

    Texts, or else the first kind of made-up tokens: a mean over both would describe neither.
    """
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


def text_samples(
    reader: "Reader",
    inputs: Sequence[str],
    *,
    seq_length: int,
    max_samples: int | None,
    json_key: str = "text",
) -> list[Sample]:
    """Return the first `seq_length` tokens of each document, BOS included.

    An input with a single document is instead split into consecutive samples, and stderr shows
    their number; if the text starts with BOS, so does each sample.
    """
    samples = []
    for name, source in zip(dataset_names(inputs), inputs, strict=True):
        cut: list[Sample] = []
        documents = iter(Corpus([source], json_key=json_key))
        only = next(documents)
        second = None if max_samples == 1 else next(documents, None)
        if second is None:
            cut = _cut(reader, only, name, seq_length, max_samples)
        else:
            for document in itertools.chain((only, second), documents):
                tokens = reader.read(document.text, document.source, seq_length)
                if len(tokens) < SHORTEST:
                    continue
                cut.append(Sample(tuple(tokens), name, document.source))
                if len(cut) == max_samples:
                    break
        if not cut:
            raise UserError(f"{source} has no document of at least {SHORTEST} tokens")
        samples += cut
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
    lead = reader.lead
    samples = [Sample(tuple(tokens[:length]), name, document.source)]
    text, step = tokens[length:], length - len(lead)
    count = len(text) // step if most is None else min(len(text) // step, most - 1)
    for i in range(count):
        piece = (*lead, *text[i * step : (i + 1) * step])
        source = f"{document.source}, piece {i + 2}"
        samples.append(Sample(piece, name, source, inside=True))
    if count and os.environ.get("RANK", "0") == "0":
        print(
            f"megasink: {document.source} is a single text: split into {count + 1} samples of "
            f"{length} tokens",
            file=sys.stderr,
        )
    return samples


class Reader:
    """Turns texts into the tokens that a model reads.

    BOS is added as the tokenizer does ("auto"), always ("add") or never ("none"; P4.3). `lead` are
    the ids before every text.
    """

    def __init__(self, tokenizer: Any, bos: str = "auto", *, parse_special_tokens: bool = False):
        self._name, self._bos = tokenizer.name_or_path, tokenizer.bos_token_id
        self._text = text_tokenizer(tokenizer, parse_special_tokens=parse_special_tokens)
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


def token_samples(
    kind: str, count: int, length: int, vocabulary: int, seed: int, special: Sequence[int] = ()
) -> list[Sample]:
    """Return sequences of random tokens, or of one repeated random token, without BOS (P2.5)."""
    make = random_sequences if kind == "random" else repeated_sequences
    made = make(count, length, vocabulary, seed, special)
    return [Sample(tuple(tokens), kind, f"{kind}:{i}") for i, tokens in enumerate(made)]


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
    """Return the samples with tokens replaced; random ones by the sample's number in its dataset.

    Positions count from the first token that a sample has here (P2.15, P2.16).
    """
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
    count: int, length: int, vocabulary: int, seed: int, exclude: Sequence[int] = ()
) -> list[list[int]]:
    """Draw sequences of tokens uniformly from the vocabulary (P2.5)."""
    allowed = torch.tensor(sorted({*range(vocabulary)} - {*exclude}))
    if not len(allowed):
        raise ValueError(f"no token of {vocabulary} is left to draw from")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(len(allowed), (count, length), generator=generator)
    sequences: list[list[int]] = allowed[drawn].tolist()
    return sequences


def repeated_sequences(
    count: int, length: int, vocabulary: int, seed: int, exclude: Sequence[int] = ()
) -> list[list[int]]:
    """Return sequences of one random token, repeated `length` times (P2.5)."""
    return [[t] * length for (t,) in random_sequences(count, 1, vocabulary, seed, exclude)]


def repeated_first_token(content: Sequence[int], copies: int, bos: int | None) -> list[int]:
    """Return a sequence whose first token, BOS or the content's first, is repeated (P4.4).

    The loss covers content[1:] in both settings and for every n, so that the same tokens count: the
    last len(content) - 1 targets.
    """
    if copies < 1 or len(content) < 2:
        raise ValueError(
            f"{copies} copies, {len(content)} tokens: use at least 1 copy and 2 tokens"
        )
    first = [content[0]] * copies if bos is None else [bos] * copies + [content[0]]
    return [*first, *content[1:]]


def repeat_rate(documents: Iterable[Sequence[int]], n: int) -> float:
    """Return the share of n-grams with equal tokens (P4.14); none spans two documents."""
    if n < 2:
        raise ValueError(f"{n}-grams: 2 or more tokens")
    total = equal = 0
    for document in documents:
        total += max(0, len(document) - n + 1)
        runs = (len(list(run)) for _, run in groupby(document))
        equal += sum(max(0, run - n + 1) for run in runs)
    if not total:
        raise ValueError(f"no document has {n} tokens")
    return equal / total
