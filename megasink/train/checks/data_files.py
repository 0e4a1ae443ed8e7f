"""Checks of dataset contents, before anything is built."""

from argparse import Namespace
from collections.abc import Iterator

import numpy as np

from megasink.data.index import data_problem, sequence_lengths
from megasink.data.output import LOSS_MASK
from megasink.data.sidecar import mismatch, read_sidecar
from megasink.errors import UserError
from megasink.train.checks.data import listed_prefixes, missing_files, named_prefixes
from megasink.train.checks.vocabulary import known_ids, transformers_tokenizer

_DEFAULT_SPLIT = "969,30,1"  # Megatron's (arguments.py:651), set after these checks


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. Reads sizes, and at most 50 MB of each dataset."""
    if args.mock_data:
        return
    if args.data_args_path and not args.split:
        yield "--data-args-path without --split: give three weights, such as --split 99,1,0"
    listed: list[tuple[str, str]] = []
    try:
        listed += listed_prefixes(args)
    except UserError as error:
        yield str(error)
    for flag, prefix in listed:
        if absent := missing_files(prefix):
            yield f"{flag} names {prefix}: {' and '.join(absent)} not found"
    ids = known_ids(args)
    try:
        tokenizer = transformers_tokenizer(args)
    except UserError:
        tokenizer = None  # `vocabulary` reports why
    for flag, prefix in dict.fromkeys([*named_prefixes(args), *listed]):
        if missing_files(prefix):
            continue
        for problem in (
            data_problem(prefix, ids),
            tokenizer and mismatch(prefix, tokenizer),
            _mask_problem(prefix),
        ):
            if problem:
                yield f"{flag} {prefix}: {problem}"
        if flag == "--data-path":
            yield from _empty_parts(prefix, args.split)


def _mask_problem(prefix: str) -> str | None:
    """Return why the loss mask of chat data is not that of its tokens."""
    mask = prefix + LOSS_MASK
    if read_sidecar(prefix).get("kind") != "chat" or missing_files(mask):
        return None  # `chat` reports missing files
    if problem := data_problem(mask, None):
        return problem
    lengths, masked = sequence_lengths(prefix), sequence_lengths(mask)
    if lengths is None or masked is None or np.array_equal(lengths, masked):
        return None
    return f"{mask}.idx has other conversations than {prefix}.idx: make the data set again"


def _empty_parts(prefix: str, given: str | None) -> Iterator[str]:
    """Report parts of a split without a document: Megatron counts their epochs in an endless loop.

    gpt_dataset.py:694 adds the tokens of one epoch, here 0, until there are enough.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    lengths = sequence_lengths(prefix)
    if lengths is None:
        return  # `data_problem` reports the error
    documents = len(lengths)
    split = given or _DEFAULT_SPLIT
    try:
        parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except (AssertionError, ValueError, ZeroDivisionError):
        yield f"--split {split}: give three weights: train, validation, test"
        return
    empty = [
        name
        for name, part in zip(("training", "validation", "test"), parts, strict=True)
        if part is not None
        and not (lengths[round(part[0] * documents) : round(part[1] * documents)] > 0).any()
    ]
    if empty:
        whose = "" if given else " (Megatron's default)"
        yield (
            f"--split {split}{whose} leaves none of the {documents} documents of {prefix} for "
            f"{' and '.join(empty)}: give each part that you want at least one, and 0 to the "
            f"others, such as --split {_split_that_fits(documents)}"
        )


def _split_that_fits(documents: int) -> str:
    """Suggest the smallest validation share that holds a document and leaves one for training."""
    for percent in (1, 5, 10, 20, 30, 50):
        if 0 < round((100 - percent) / 100 * documents) < documents:
            return f"{100 - percent},{percent},0"
    return "1,0,0"
