"""Checks of dataset contents, before anything is built."""

from argparse import Namespace
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate, pairwise
from typing import Any

from numpy.typing import NDArray

from megasink.console.printable import say
from megasink.data.dataset_files import contents, is_stored, mismatch
from megasink.data.indexed_dataset import ENTRIES, data_problem, has_tokens, sequence_lengths
from megasink.errors import UserError
from megasink.training import dataset_blends
from megasink.training.checks.data_paths import missing_files
from megasink.training.checks.vocabulary import known_ids, tokenizer_identity

_TOTAL = 1 << 24  # entries and tokens of all datasets that are checked
_LEAST = 1 << 12
_THREADS = 16  # a file system answers several at once; they wait more than they compute


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. Reads sizes, and at most 50 MB of each dataset, on rank 0."""
    if args.mock_data or args.rank:
        return
    named = dataset_blends.named_prefixes(args)
    if stored := sum(map(is_stored, named)):
        say(f"data: {stored} of {len(named)} data sets are in object stores and are not checked")
    if drawn := dataset_blends.drawn_validation(args.data_path or []):
        say(f"data: validation uses {' '.join(drawn)}, not a share of --split")
    present = {p: blend for p, blend in named.items() if not (is_stored(p) or missing_files(p))}
    entries, ids = min(ENTRIES, max(_LEAST, _TOTAL // max(len(present), 1))), known_ids(args)
    try:
        sha256 = tokenizer_identity(args)
    except UserError:
        sha256 = None  # `vocabulary` reports why

    def check(item: tuple[str, dataset_blends.Blend]) -> list[str]:
        prefix, blend = item
        problems = (
            data_problem(prefix, ids, entries),
            sha256 and mismatch(prefix, sha256, args.tokenizer_model),
        )
        texts = [f"{prefix}: {problem}" for problem in problems if problem] or _changed(prefix)
        lengths = sequence_lengths(prefix)
        if lengths is None:
            return texts  # `data_problem` reports the error
        if blend.is_split:
            texts += (f"{prefix}: {text}" for text in _empty_parts(lengths, args.split))
        elif not has_tokens(lengths):
            texts.append(f"{prefix}: all {len(lengths):,} documents are empty")
        return texts

    with ThreadPoolExecutor(_THREADS) as threads:
        answers = threads.map(check, present.items())
        for blend, texts in zip(present.values(), answers, strict=True):
            yield from (f"{blend.flag} {text}" for text in texts)


def _changed(prefix: str) -> list[str]:
    """Return the problem of a file whose checksum differs from the one in PREFIX.json."""
    for suffix in (".bin", ".idx"):
        try:
            contents(prefix, suffix)
        except UserError as error:
            return [str(error)]
    return []


def _empty_parts(lengths: NDArray[Any], given: str | None) -> Iterator[str]:
    """Report parts without a document: Megatron counts them without end (gpt_dataset.py:694)."""
    documents = len(lengths)
    split = given or dataset_blends.DEFAULT_SPLIT
    if (parsed := dataset_blends.shares(given)) is None:
        yield f"--split {split}: give three weights, for training, validation and test"
        return
    parts = pairwise(accumulate(parsed, initial=0.0))
    empty = [
        name
        for name, (start, end) in zip(("training", "validation", "test"), parts, strict=True)
        if start < end
        and not has_tokens(lengths[round(start * documents) : round(end * documents)])
    ]
    if empty:
        whose = "" if given else " (Megatron's default)"
        yield (
            f"--split {split}{whose} leaves none of the {documents} documents for "
            f"{' and '.join(empty)}: give a larger share to each part that you need, and 0 to the "
            f"others, such as --split {_split_that_fits(documents)}"
        )


def _split_that_fits(documents: int) -> str:
    """Suggest the smallest validation share that holds a document and leaves one for training."""
    for percent in (1, 5, 10, 20, 30, 50):
        if 0 < round((100 - percent) / 100 * documents) < documents:
            return f"{100 - percent},{percent},0"
    return "1,0,0"
