"""Synthetic languages of letters, in which attention sinks and retrieval form within minutes.

The language of trigger letters is `megasink.cli.demo_runs`. `RetrievalLanguage` has the
same kind of chain as filler, with pairs of a key and its value, and keys that return later and must
be followed by their value (P1.37, P1.38 in small); the tokenizer is the same.

Shapes: D documents, L letters, N letters of the alphabet, P pairs of a document.
"""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from megasink.cli.data import main as data
from megasink.cli.demo_runs import (
    BOS,
    EOD,
    Floats,
    Ids,
    TriggerLanguage,
    chain_of,
    check_letters,
    next_letters,
    texts_of,
    write_tokenizer,
)
from megasink.files.atomic import atomic_text

SAMPLE = 64
"""Documents that are held out of the training text, for analyses."""
_CUT = 64  # tokens


@dataclass(frozen=True)
class RetrievalLanguage:
    """Key-value recall in a text: a key that returns is followed by the value it had.

    The alphabet has three parts that share no letter: filler (a Markov chain), keys and values. A
    document plants `pairs` of a key and its value in its filler, every key once; a key that stands
    there again is a query, and behind it stands its value again. Only the value behind a query is
    determined by what is far before it.

    Args:
        filler, keys, values: letters of each part.
        chain: seed of the filler's transitions.
    """

    filler: int = 32
    keys: int = 16
    values: int = 16
    chain: int = 0

    def __post_init__(self) -> None:
        check_letters(self.filler + self.keys + self.values)

    @cached_property
    def _rows_NN(self) -> Floats:
        return chain_of(self.chain, self.filler, 0.1).cumsum(1)

    @property
    def value_ids(self) -> range:
        """The ids of letters that are values."""
        return range(self.filler + self.keys, self.filler + self.keys + self.values)

    def sample(
        self, documents: int, length: int, seed: int, *, pairs: int = 4, queries: int = 4
    ) -> Ids:
        """Return [D, L] int64 documents for training.

        Pairs and queries stand at random places; a query asks for a random key before it.

        Raises:
            ValueError: they do not fit.
        """
        self._check(length, pairs, 2 * (pairs + queries))
        random = np.random.default_rng(seed)
        ids_DL = self._filler(documents, length, random)
        for row_L in ids_DL:
            places = self._places(length, pairs + queries, random)
            keys_P = random.permutation(self.keys)[:pairs] + self.filler
            values_P = random.choice(self.value_ids, pairs)
            # A query needs a pair before it, so the first place is always a pair.
            is_pair = np.zeros(len(places), dtype=bool)
            is_pair[0] = pairs > 0
            is_pair[1 + random.permutation(len(places) - 1)[: pairs - 1]] = True
            planted = 0
            for place, plants in zip(places, is_pair, strict=True):
                at = planted if plants else random.integers(planted)
                row_L[place : place + 2] = keys_P[at], values_P[at]
                planted += plants
        return ids_DL

    def probes(
        self, documents: int, length: int, distance: int, seed: int, *, pairs: int = 4
    ) -> tuple[Ids, Ids]:
        """Return documents that end in a query, and its answers.

        Args:
            length: letters, of which the last is the queried key.
            distance: letters from the planted key to the query; 2 is a value right before it.
            pairs: planted in all; the others stand at random places and do not overlap.

        Returns:
            [D, L] and [D] int64.

        Raises:
            ValueError: the distance or the pairs do not fit.
        """
        self._check(length, pairs, 2 * pairs + 1)
        if not 2 <= distance < length:
            raise ValueError(f"distance {distance}: 2 to {length - 1} letters, less than {length}")
        random = np.random.default_rng(seed)
        ids_DL = self._filler(documents, length, random)
        answers_D = np.empty(documents, dtype=np.int64)
        needle = length - 1 - distance
        free = [(0, needle), (needle + 2, length - 1)]  # what the other pairs may take
        slots = np.concatenate([np.arange(a, b - 1, 2) for a, b in free])
        if len(slots) < pairs - 1:
            raise ValueError(f"{pairs} pairs do not fit in {length} letters at distance {distance}")
        for i, row_L in enumerate(ids_DL):
            keys_P = random.permutation(self.keys)[:pairs] + self.filler
            values_P = random.choice(self.value_ids, pairs)
            places = [needle, *random.permutation(slots)[: pairs - 1]]
            for place, key, value in zip(places, keys_P, values_P, strict=True):
                row_L[place : place + 2] = key, value
            row_L[-1], answers_D[i] = keys_P[0], values_P[0]
        return ids_DL, answers_D

    def _filler(self, documents: int, length: int, random: np.random.Generator) -> Ids:
        ids_DL = np.empty((documents, length), dtype=np.int64)
        ids_DL[:, 0] = random.integers(0, self.filler, documents)
        for t in range(1, length):
            ids_DL[:, t] = next_letters(self._rows_NN, ids_DL[:, t - 1], random)
        return ids_DL

    def _places(self, length: int, count: int, random: np.random.Generator) -> Ids:
        """Return `count` starts of two letters each that do not overlap, ascending."""
        gaps = np.sort(random.choice(length - count, count, replace=False))
        return gaps + np.arange(count)

    def _check(self, length: int, pairs: int, needed: int) -> None:
        if not 1 <= pairs <= self.keys:
            raise ValueError(f"pairs {pairs}: 1 to {self.keys}, one for every key")
        if length < needed:
            raise ValueError(f"length {length}: {needed} letters or more")


def write_triggers(
    folder: Path,
    name: str,
    *,
    documents: int = 20_000,
    length: int = 62,
    seed: int = 10,
    **language: Any,
) -> None:
    """Write tokenizer, text and tokens of a `TriggerLanguage`; see `write_corpus`.

    Args:
        documents, length, seed: of `TriggerLanguage.sample`. A document has `length` + 2 tokens, so
            that one fills a sample of 64 by default.
        language: arguments of `TriggerLanguage`.
    """
    write_corpus(folder, name, TriggerLanguage(**language).sample(documents, length, seed))


def write_retrieval(
    folder: Path,
    name: str,
    *,
    documents: int = 20_000,
    length: int = 62,
    seed: int = 10,
    pairs: int = 4,
    queries: int = 4,
    **language: Any,
) -> None:
    """Write tokenizer, text and tokens of a `RetrievalLanguage`; see `write_corpus`.

    Args:
        documents, length, seed, pairs, queries: of `RetrievalLanguage.sample`.
        language: arguments of `RetrievalLanguage`.
    """
    made = RetrievalLanguage(**language)
    write_corpus(folder, name, made.sample(documents, length, seed, pairs=pairs, queries=queries))


def write_corpus(folder: Path, name: str, ids_DL: Ids) -> None:
    """Write `tokenizer/`, `NAME.jsonl`, `NAME.bin` and `.idx`, and of held-out text two samples.

    `NAME-sample.jsonl` has the last 64 documents, which the others lack. `NAME-cut.jsonl` has the
    same as training reads them: one behind the other, cut every 64 tokens, with BOS and EOD spelled
    out.

    Raises:
        ValueError: 64 documents or fewer.
        UserError: the folder cannot be written.
    """
    if len(ids_DL) <= SAMPLE:
        raise ValueError(f"{len(ids_DL)} documents: more than the {SAMPLE} that are held out")
    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder / "tokenizer")
    lines = [json.dumps({"text": text}) + "\n" for text in texts_of(ids_DL)]
    atomic_text(folder / f"{name}-sample.jsonl", "".join(lines[-SAMPLE:]))
    atomic_text(folder / f"{name}.jsonl", "".join(lines[:-SAMPLE]))
    held_out = [token for text in texts_of(ids_DL[-SAMPLE:]) for token in (BOS, *text, EOD)]
    cut = ["".join(held_out[i : i + _CUT]) for i in range(0, len(held_out) - _CUT + 1, _CUT)]
    rows = [json.dumps({"text": text}) + "\n" for text in cut[:SAMPLE]]
    atomic_text(folder / f"{name}-cut.jsonl", "".join(rows))
    words = [
        folder / f"{name}.jsonl",
        "--tokenizer",
        folder / "tokenizer",
        "--output",
        folder / name,
    ]
    data([*map(str, words), "--overwrite", "--workers", "1"])
