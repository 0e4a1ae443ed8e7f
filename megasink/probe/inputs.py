"""Texts to sequences of tokens, for probing; and random and repeated tokens (P2.5)."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megasink.data.corpus import Corpus
from megasink.diagnostics.tokens import random_sequences, repeated_sequences
from megasink.errors import UserError

KINDS = ("natural", "random", "repeated")
BOS = ("auto", "add", "none")
SHORTEST = 2


@dataclass(frozen=True)
class Sample:
    """One sequence to run.

    Attributes:
        tokens: ids, BOS included.
        dataset: which of the inputs it belongs to.
        source: of the text.
        scored: of the targets, how many count for the loss, from the end; None for all.
    """

    tokens: tuple[int, ...]
    dataset: str
    source: str
    scored: int | None = None


def text_samples(
    tokenizer: Any,
    inputs: Sequence[str],
    *,
    seq_length: int,
    max_samples: int | None,
    bos: str = "auto",
    json_key: str = "text",
) -> list[Sample]:
    """The first tokens of each document; every input is a dataset, named as the file is.

    Args:
        tokenizer: of transformers.
        inputs: as `Corpus` takes them.
        seq_length: tokens of a sequence, BOS included; longer documents are cut.
        max_samples: of each input; None for all.
        bos: "auto" leaves it to the tokenizer, "add" and "none" see to it (P4.3).

    Raises:
        UserError: no document of two tokens, a tokenizer without BOS to add, or one that adds it
            twice.
    """
    samples = []
    for name, source in zip(dataset_names(inputs), inputs, strict=True):
        count = 0
        for document in Corpus([source], json_key=json_key):
            tokens = encode(tokenizer, document.text, bos, document.source)[:seq_length]
            if len(tokens) < SHORTEST:
                continue
            samples.append(Sample(tuple(tokens), name, document.source))
            count += 1
            if count == max_samples:
                break
        if not count:
            raise UserError(f"{source} has no document of {SHORTEST} tokens: nothing to analyze")
    return samples


def encode(tokenizer: Any, text: str, bos: str, source: str = "a text") -> list[int]:
    """The tokens of a text, with or without BOS.

    Args:
        source: of the text, for errors.

    Raises:
        UserError: no BOS to add, or two of them.
    """
    special = tokenizer.bos_token_id
    if bos == "none":
        tokens: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return tokens
    tokens = tokenizer.encode(text)
    if special is not None and len(tokens) > 1 and tokens[0] == tokens[1] == special:
        name = tokenizer.name_or_path
        if tokenizer.encode(text, add_special_tokens=False)[:1] == [special]:
            raise UserError(
                f"{source} begins with the BOS token {special} itself, and the tokenizer {name} "
                "puts another one before it: take it out of the texts, or analyze with --bos none"
            )
        raise UserError(
            f"the tokenizer {name} puts its BOS token {special} before a text twice: mend its "
            "post-processor, or analyze with --bos none"
        )
    if bos == "add":
        if special is None:
            raise UserError(
                f"--bos add: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto"
            )
        if tokens[:1] != [special]:
            tokens = [special, *tokens]
    return tokens


def token_samples(
    kind: str, count: int, length: int, vocabulary: int, seed: int, special: Sequence[int] = ()
) -> list[Sample]:
    """Random tokens, or one random token repeated; without BOS (P2.5)."""
    make = random_sequences if kind == "random" else repeated_sequences
    made = make(count, length, vocabulary, seed, special)
    return [Sample(tuple(tokens), kind, f"{kind}:{i}") for i, tokens in enumerate(made)]


def dataset_names(inputs: Sequence[str]) -> list[str]:
    """A short name for each input: the file's, the whole path where two would be the same."""
    short = [Path(source).name.split(".")[0] or source for source in inputs]
    return [
        name if short.count(name) == 1 else source
        for name, source in zip(short, inputs, strict=True)
    ]


def data_hash(samples: Sequence[Sample]) -> str:
    """SHA-256 over the token ids of all samples in order: what a result was measured on."""
    digest = hashlib.sha256()
    for sample in samples:
        digest.update(",".join(map(str, sample.tokens)).encode() + b"\n")
    return digest.hexdigest()
