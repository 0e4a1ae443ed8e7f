"""Synthetic languages of letters, in which attention sinks and retrieval form within minutes.

`TriggerLanguage`: a Markov chain in which some letters, the triggers, are followed by what stood
before them. A head that copies has nothing to do elsewhere, and rests on the first token (dormant
heads; P0.16). `RetrievalLanguage`: the same kind of chain as filler, with pairs of a key and its
value, and keys that return later and must be followed by their value (P1.37, P1.38 in small).

Both use one tokenizer of 66 tokens: BOS, EOD and 64 letters. A document of L letters has L + 2.

Shapes: D documents, L letters, N letters of the alphabet, P pairs of a document.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.atomic import atomic_text
from megasink.commands.data import main as data

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"
BOS, EOD = "<s>", "</s>"
AROUND = 2
"""Tokens of a document beside its letters: BOS before them, EOD behind them."""
SAMPLE = 64
"""Documents that are held out of the training text, for analyses."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def write_tokenizer(folder: Path) -> None:
    """Write a Hugging Face tokenizer of exactly BOS, EOD and the letters; it puts BOS before texts.

    Other characters are dropped. There is no UNK to raise at, as Megatron encodes a sentence of its
    own when it loads a tokenizer.
    """
    from tokenizers import Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    vocabulary = {name: i for i, name in enumerate((BOS, EOD, *LETTERS))}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOD)
    fast.save_pretrained(folder)


def texts_of(ids_DL: Ids) -> Iterator[str]:
    """Yield the documents as text."""
    names = np.array(list(LETTERS))
    return ("".join(names[row]) for row in ids_DL)


def _chain(seed: int, letters: int, concentration: float) -> Floats:
    """Return an [N, N] matrix of transitions, every row drawn from a Dirichlet distribution."""
    random = np.random.default_rng(seed)
    return random.dirichlet(np.full(letters, concentration), letters)


def _next(rows_NN: Floats, last_D: Ids, random: np.random.Generator) -> Ids:
    """Draw a letter behind each of `last_D`; `rows_NN` is cumulative."""
    drawn = (rows_NN[last_D] < random.random(len(last_D))[:, None]).sum(1)
    return drawn.clip(max=len(rows_NN) - 1)  # type: ignore[no-any-return]


def _entropy(probabilities: Floats) -> Floats:
    """Return the entropy of the last axis in nats."""
    logs = np.log(probabilities, where=probabilities > 0, out=np.zeros_like(probabilities))
    return -(probabilities * logs).sum(-1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class TriggerLanguage:
    """A Markov chain of letters; behind a trigger stands what stood before it.

    The first letter is no trigger, and uniform among the others, so two triggers never stand side
    by side.

    Args:
        letters: N; the alphabet is the first N of `LETTERS`.
        triggers: the first letters of the alphabet.
        chain: seed of the transitions, so the language itself.
        concentration: of the Dirichlet distribution of a row; lower ones are easier to predict.
    """

    letters: int = len(LETTERS)
    triggers: int = 4
    chain: int = 0
    concentration: float = 0.1

    def __post_init__(self) -> None:
        _check_letters(self.letters)
        if not 0 <= self.triggers < self.letters:
            raise ValueError(f"triggers {self.triggers}: 0 to {self.letters - 1}")

    @cached_property
    def transitions_NN(self) -> Floats:
        """Probabilities of the next letter behind a letter that is no trigger, float64."""
        return _chain(self.chain, self.letters, self.concentration)

    def sample(self, documents: int, length: int, seed: int) -> Ids:
        """Return documents as [D, L] int64 ids of letters."""
        random = np.random.default_rng(seed)
        rows_NN = self.transitions_NN.cumsum(1)
        ids_DL = np.empty((documents, length), dtype=np.int64)
        ids_DL[:, 0] = random.integers(self.triggers, self.letters, documents)
        for t in range(1, length):
            ids_DL[:, t] = _next(rows_NN, ids_DL[:, t - 1], random)
            if t > 1:
                copies_D = ids_DL[:, t - 1] < self.triggers
                ids_DL[copies_D, t] = ids_DL[copies_D, t - 2]
        return ids_DL

    def entropy_by_position(self, length: int) -> Floats:
        """Return [L] the entropy in nats of every letter given all before it, float64.

        Exact: the distribution of the last two letters is carried from position to position.
        """
        rows_NN, copied = self.transitions_NN, np.arange(self.letters) < self.triggers
        row_entropy_N = np.where(copied, 0.0, _entropy(rows_NN))
        first_N = np.where(copied, 0.0, 1 / (self.letters - self.triggers))
        entropy_L = np.empty(length)
        entropy_L[0] = _entropy(first_N)
        pair_NN = first_N[:, None] * rows_NN  # [before, last]
        for t in range(1, length):
            last_N = first_N if t == 1 else pair_NN.sum(0)
            entropy_L[t] = last_N @ row_entropy_N
            if t > 1:
                drawn_NN = np.where(copied, 0.0, last_N)[:, None] * rows_NN
                # (a, trigger) is followed by a: the new pair is (trigger, a).
                pair_NN = drawn_NN + np.where(copied, pair_NN, 0.0).T
        return entropy_L

    def irreducible_loss(self, length: int) -> float:
        """Return the lowest mean loss in nats per token of documents of so many letters.

        Over all L + 2 tokens, as training counts them: EOD stands where every document ends and BOS
        behind it, so both can be known. A model that cannot count the letters of a document stays
        above it.
        """
        return float(self.entropy_by_position(length).sum() / (length + AROUND))


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
        _check_letters(self.filler + self.keys + self.values)

    @cached_property
    def _rows_NN(self) -> Floats:
        return _chain(self.chain, self.filler, 0.1).cumsum(1)

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
            ids_DL[:, t] = _next(self._rows_NN, ids_DL[:, t - 1], random)
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


def _check_letters(letters: int) -> None:
    if not 2 <= letters <= len(LETTERS):
        raise ValueError(f"{letters} letters: 2 to {len(LETTERS)}")


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
    """Write `tokenizer/`, `NAME.jsonl`, `NAME.bin` and `.idx`, and `NAME-sample.jsonl`.

    The sample has the last 64 documents, which the others lack.

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
    words = [
        folder / f"{name}.jsonl",
        "--tokenizer",
        folder / "tokenizer",
        "--output",
        folder / name,
    ]
    data([*map(str, words), "--overwrite", "--workers", "1"])
