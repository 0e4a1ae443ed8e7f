"""The samples that an analysis's options select, with their replaced tokens."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.inputs import (
    MADE,
    Reader,
    Sample,
    cut_at_random,
    data_hash,
    text_samples,
    texts_in_memory,
    token_samples,
    with_replaced_tokens,
)
from megasink.analysis.metrics.registry import measured
from megasink.analysis.options import KEPT, SEQ_LENGTH, AnalysisOptions
from megasink.analysis.results import RunFacts
from megasink.data.replaced_tokens import Replacement, replacement
from megasink.errors import UserError
from megasink.transformers.identity import model_identity

if TYPE_CHECKING:
    from megasink.analysis.capture.base import ProbedModel


SYNTHETIC = 100
"""Number of sequences of random and of repeated tokens, as in P2."""


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
        raise UserError(
            f"the tokenizer {model.tokenizer.name_or_path} gives token {highest}, but the model "
            f"has {model.vocabulary} tokens: pass the model's own tokenizer (--tokenizer)"
        )
    replacement = replacement_for(options, model)
    read = [
        replace(sample, tokens=(*model.first, *sample.tokens))
        for sample in with_replaced_tokens(samples, replacement)
    ]
    facts = RunFacts(
        **options.some("data", "inputs", "bos", "max_samples", "random_lengths", "seed"),
        seq_length=length,
        replaced_positions=None if replacement is None else list(replacement.positions),
        replaced_with=None if replacement is None else replacement.value,
        device=str(model.device),
        data_sha256=data_hash(read),
    )
    return Inputs(read, facts)


def _samples(
    options: AnalysisOptions, length: int, model: ProbedModel, texts: Iterable[str] | None
) -> Iterator[Sample]:
    """Yield the sequences of up to `length` tokens."""
    tokenizer, most = model.tokenizer, options.max_samples
    parse = options.parse_special_tokens
    if texts is not None:
        reader = Reader(tokenizer, options.bos, parse_special_tokens=parse)
        yield from texts_in_memory(reader, texts, length, most)
    elif "natural" in options.inputs:
        yield from text_samples(
            Reader(tokenizer, options.bos, parse_special_tokens=parse),
            options.data,
            seq_length=length,
            max_samples=most,
            json_key=options.json_key,
        )
    count = SYNTHETIC if most is None else min(most, SYNTHETIC)
    vocabulary = min(model.vocabulary, len(tokenizer))
    for kind in (kind for kind in MADE if kind in options.inputs):
        special = tokenizer.all_special_ids
        yield from token_samples(kind, count, length, vocabulary, options.seed, special)


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
    if requested is None and os.environ.get("RANK", "0") == "0":
        print(
            f"megasink: every sequence has {made.description}, as in training "
            f"(--replace-tokens-at {KEPT} keeps the text)",
            file=sys.stderr,
        )
    return made


def identity(model: "ProbedModel", data: Any, **settings: Any) -> dict[str, Any]:
    """Return the identity of a measurement: every setting that can change a bit of the results."""
    return {
        "model": model.facts["kind"],
        **model_identity(model.module, model.tokenizer, data),
        "dtype": model.facts["dtype"],
        "attention": model.facts["attention"],
        "device": model.device.type,
        **settings,
    }


def analysis_identity(
    model: "ProbedModel",
    samples: Sequence[Sample],
    options: AnalysisOptions,
    metrics: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return the identity of metrics of samples."""
    flags = options.by_flag("data", "batch_size", "positions", "columns", "loss")
    names = sorted(measured(metrics, options.metrics))
    return identity(model, data_hash(samples), **flags, metrics=names)
