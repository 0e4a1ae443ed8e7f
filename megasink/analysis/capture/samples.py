"""The samples that the options of an analysis select."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.inputs import (
    MADE,
    Reader,
    Sample,
    text_samples,
    token_samples,
    with_replaced_tokens,
)
from megasink.analysis.capture.replacing import replacement_for
from megasink.analysis.options import SEQ_LENGTH, AnalysisOptions
from megasink.data.replaced_tokens import Replacement
from megasink.errors import UserError

SYNTHETIC = 100
"""Number of sequences of random and of repeated tokens, as in P2."""


@dataclass(frozen=True)
class Inputs:
    """What a model reads.

    Attributes:
        samples: the sequences, as the model reads them.
        seq_length: most tokens of a sequence, without the model's own first ones.
        replacement: of tokens in every sequence.
    """

    samples: list[Sample]
    seq_length: int
    replacement: Replacement | None = None

    @property
    def facts(self) -> dict[str, Any]:
        """Entries of `RunFacts`."""
        replaced = self.replacement
        return {
            "seq_length": self.seq_length,
            "replaced_positions": None if replaced is None else list(replaced.positions),
            "replaced_with": None if replaced is None else replaced.value,
        }


def inputs_of(options: AnalysisOptions, model: ProbedModel) -> Inputs:
    """Return the sequences that the options select.

    Raises:
        UserError: sequences exceed the positions, or as `samples_of` and `replacement_for`.
    """
    most, length = model.text_positions, options.seq_length
    if length is None:
        length = SEQ_LENGTH if most is None else min(SEQ_LENGTH, most)
    if most is not None and length > most:
        raise UserError(
            f"--seq-length {length} is longer than the {most} positions of "
            f"{model.facts['name']}: use at most {most}"
        )
    samples = samples_of(options, length, model.tokenizer, model.vocabulary)
    replacement = replacement_for(options, model)
    return Inputs(as_read(model, samples, replacement), length, replacement)


def as_read(
    model: ProbedModel, samples: Iterable[Sample], replacement: Replacement | None
) -> list[Sample]:
    """Return samples with tokens replaced, and with what the model has before every sequence."""
    return [
        replace(sample, tokens=(*model.first, *sample.tokens))
        for sample in with_replaced_tokens(samples, replacement)
    ]


def samples_of(
    options: AnalysisOptions, length: int, tokenizer: Any, vocabulary: int
) -> list[Sample]:
    """Return the sequences of up to `length` tokens that the options select.

    Raises:
        UserError: there is no text, or the tokenizer does not fit.
    """
    samples: list[Sample] = []
    if "natural" in options.inputs:
        samples += text_samples(
            Reader(tokenizer, options.bos, parse_special_tokens=options.parse_special_tokens),
            options.data,
            seq_length=length,
            max_samples=options.max_samples,
            json_key=options.json_key,
        )
    for kind in MADE:
        if kind in options.inputs:
            samples += token_samples(
                kind,
                SYNTHETIC if options.max_samples is None else min(options.max_samples, SYNTHETIC),
                length,
                min(vocabulary, len(tokenizer)),
                options.seed,
                tokenizer.all_special_ids,
            )
    highest = max(max(sample.tokens) for sample in samples)
    if highest >= vocabulary:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} gives token {highest}, but the model "
            f"has {vocabulary} tokens: pass the model's own tokenizer (--tokenizer)"
        )
    return samples
