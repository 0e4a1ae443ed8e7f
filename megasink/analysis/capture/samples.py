"""The samples that the options of an analysis select."""

import argparse
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.inputs import (
    Reader,
    Sample,
    text_samples,
    token_samples,
    with_replaced_tokens,
)
from megasink.analysis.capture.options import SEQ_LENGTH, SYNTHETIC
from megasink.analysis.capture.replacing import replacement_for
from megasink.data.replaced_tokens import Replacement
from megasink.errors import UserError


def model_samples(args: argparse.Namespace, model: ProbedModel) -> list[Sample]:
    """Return the sequences that the command line selects, as the model reads them.

    Sets `args.seq_length` if it was not given, and what was replaced (see `replacement_for`).

    Raises:
        UserError: sequences exceed the positions, or as `samples_of` and `replacement_for`.
    """
    most = model.text_positions
    if args.seq_length is None:
        args.seq_length = SEQ_LENGTH if most is None else min(SEQ_LENGTH, most)
    if most is not None and args.seq_length > most:
        raise UserError(
            f"--seq-length {args.seq_length} is longer than the {most} positions of {args.model}: "
            f"use at most {most}"
        )
    samples = samples_of(args, model.tokenizer, model.vocabulary)
    return as_read(model, samples, replacement_for(args, model))


def as_read(
    model: ProbedModel, samples: Iterable[Sample], replacement: Replacement | None
) -> list[Sample]:
    """Return samples with tokens replaced, and with what the model has before every sequence."""
    return [
        replace(sample, tokens=(*model.first, *sample.tokens))
        for sample in with_replaced_tokens(samples, replacement)
    ]


def samples_of(args: argparse.Namespace, tokenizer: Any, vocabulary: int) -> list[Sample]:
    """Return the sequences that the command line selects.

    Raises:
        UserError: there is no text, or the tokenizer does not fit.
    """
    samples: list[Sample] = []
    if "natural" in args.inputs:
        samples += text_samples(
            Reader(tokenizer, args.bos, parse_special_tokens=args.parse_special_tokens),
            args.data,
            seq_length=args.seq_length,
            max_samples=args.max_samples,
            json_key=args.json_key,
        )
    for kind in ("random", "repeated"):
        if kind in args.inputs:
            samples += token_samples(
                kind,
                min(args.max_samples, SYNTHETIC),
                args.seq_length,
                min(vocabulary, len(tokenizer)),
                args.seed,
                tokenizer.all_special_ids,
            )
    highest = max(max(sample.tokens) for sample in samples)
    if highest >= vocabulary:
        raise UserError(
            f"the tokenizer {tokenizer.name_or_path} gives token {highest}, but the model "
            f"has {vocabulary} tokens: pass the model's own tokenizer (--tokenizer)"
        )
    return samples
