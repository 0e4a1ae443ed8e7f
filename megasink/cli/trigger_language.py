"""A synthetic language of letters in which an attention sink forms within a minute of training.

`TriggerLanguage` is a Markov chain in which some letters, the triggers, are followed by the letter
before them. A copying head is idle elsewhere, and attends to the first token: the Bigram-Backcopy
task of Guo et al. (2024), "Active-Dormant Attention Heads".

Its tokenizer has 66 tokens: BOS, EOD and 64 letters. A document of L letters has L + 2.

Shapes: D documents, L letters, N letters of the alphabet.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"
BOS, EOD = "<s>", "</s>"
AROUND = 2
"""Tokens of a document besides its letters: BOS before them, EOD after them."""

Ids = NDArray[np.int64]
Floats = NDArray[np.float64]


def write_tokenizer(folder: Path) -> None:
    """Write a Hugging Face tokenizer of exactly BOS, EOD and the letters; it puts BOS before texts.

    Other characters are dropped without an UNK, because Megatron encodes its own sentence when it
    loads a tokenizer.
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


def chain_of(seed: int, letters: int, concentration: float) -> Floats:
    """Return an [N, N] matrix of transitions, every row drawn from a Dirichlet distribution."""
    random = np.random.default_rng(seed)
    return random.dirichlet(np.full(letters, concentration), letters)


def next_letters(rows_NN: Floats, last_D: Ids, random: np.random.Generator) -> Ids:
    """Draw a letter after each of `last_D`; `rows_NN` is cumulative."""
    drawn = (rows_NN[last_D] < random.random(len(last_D))[:, None]).sum(1)
    return drawn.clip(max=len(rows_NN) - 1)


@dataclass(frozen=True)
class TriggerLanguage:
    """A Markov chain of letters; each trigger is followed by the letter before it.

    The alphabet is the first `letters` of `LETTERS`, triggers first. The first letter is not a
    trigger, and is uniform among the others, so two triggers never stand side by side. `chain`
    seeds the transitions; of the first eight, 6 has the most triggers, 9 % of the letters. Rows are
    drawn from a Dirichlet distribution: a lower concentration is easier to predict.
    """

    letters: int = len(LETTERS)
    triggers: int = 4
    chain: int = 6
    concentration: float = 0.1

    def __post_init__(self) -> None:
        check_letters(self.letters)
        if not 0 <= self.triggers < self.letters:
            raise ValueError(f"triggers {self.triggers}: 0 to {self.letters - 1}")

    @cached_property
    def transitions_NN(self) -> Floats:
        """Probabilities of the letter after a non-trigger letter, float64."""
        return chain_of(self.chain, self.letters, self.concentration)

    def sample(self, documents: int, length: int, seed: int) -> Ids:
        """Return documents as [D, L] int64 ids of letters."""
        random = np.random.default_rng(seed)
        rows_NN = self.transitions_NN.cumsum(1)
        ids_DL = np.empty((documents, length), dtype=np.int64)
        ids_DL[:, 0] = random.integers(self.triggers, self.letters, documents)
        for t in range(1, length):
            ids_DL[:, t] = next_letters(rows_NN, ids_DL[:, t - 1], random)
            if t > 1:
                copies_D = ids_DL[:, t - 1] < self.triggers
                ids_DL[copies_D, t] = ids_DL[copies_D, t - 2]
        return ids_DL

    def copies(self, text: str) -> tuple[int, int]:
        """Count the triggers inside a text, and those followed by the letter before them."""
        triggers = LETTERS[: self.triggers]
        places = [i for i in range(1, len(text) - 1) if text[i] in triggers]
        return len(places), sum(text[i + 1] == text[i - 1] for i in places)


def check_letters(letters: int) -> None:
    if not 2 <= letters <= len(LETTERS):
        raise ValueError(f"{letters} letters: 2 to {len(LETTERS)}")
