"""A synthetic language in which an attention sink forms within a minute of training.

A Markov chain of letters, a few of which are triggers: behind a trigger stands the letter that
stood before it. A head that copies has nothing to do at any other letter, and rests on the first
token (the Bigram-Backcopy task of Guo et al., 2024, "Active-Dormant Attention Heads").
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megasink.atomic import atomic_text

LETTERS = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789+-"
BOS, EOD = "<s>", "</s>"


@dataclass(frozen=True)
class TriggerLanguage:
    """A chain, and the shape of its documents.

    Attributes:
        chain: seed of the transition probabilities.
        triggers: number of letters that are triggers, the first ones.
        length: letters of a document; with BOS and EOD it has two tokens more.
        concentration: of the Dirichlet distribution of each letter's successors: the smaller, the
            fewer letters follow another.
    """

    chain: int = 0
    triggers: int = 4
    length: int = 62
    concentration: float = 0.1

    def documents(self, count: int, seed: int = 10) -> Iterator[str]:
        """Yield documents; the same for the same seed."""
        letters, random = len(LETTERS), np.random.default_rng([seed, self.chain])
        rows = self.transitions().cumsum(1)
        ids = np.empty((count, self.length), dtype=np.int64)
        ids[:, 0] = random.integers(self.triggers, letters, count)
        for t in range(1, self.length):
            drawn = (rows[ids[:, t - 1]] < random.random(count)[:, None]).sum(1)
            ids[:, t] = drawn.clip(max=letters - 1)
            if t > 1:
                copies = ids[:, t - 1] < self.triggers
                ids[copies, t] = ids[copies, t - 2]
        names = np.array(list(LETTERS))
        return ("".join(names[row]) for row in ids)

    def transitions(self) -> np.ndarray[tuple[int, int], np.dtype[np.float64]]:
        """Return the probability of a letter (column) behind one that is no trigger (row)."""
        letters = len(LETTERS)
        random = np.random.default_rng(self.chain)
        return random.dirichlet(np.full(letters, self.concentration), letters)

    def copies(self, text: str) -> tuple[int, int]:
        """Count the triggers inside a text, and those behind which stands the letter before."""
        triggers = LETTERS[: self.triggers]
        found = [i for i in range(1, len(text) - 1) if text[i] in triggers]
        return len(found), sum(text[i + 1] == text[i - 1] for i in found)


def write_documents(path: Path, documents: Iterator[str]) -> None:
    """Write JSON lines for `megasink data`.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_text(path, "".join(json.dumps({"text": text}) + "\n" for text in documents))


def write_tokenizer(folder: Path) -> None:
    """Write the tokenizer of the language: a token for each letter, BOS and EOD, and no other.

    Raises:
        OSError: the folder cannot be written.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    names = [BOS, EOD, *LETTERS]
    tokenizer = Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(f"{BOS} $A", None, [(BOS, 0)])
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOD)
    fast.save_pretrained(folder)
