"""The datasets that a command line names: blends of prefixes, with weights or without.

Imports neither torch nor Megatron.
"""

import dataclasses
import math
import re
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from megasink.data.dataset_files import recorded_validation
from megasink.errors import UserError
from megasink.files.json_file import read_text, read_value

DEFAULT_SPLIT = "969,30,1"  # Megatron's (arguments.py:651), set after these checks
_FILE_BYTES = 64 << 20
_SPLITS = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True)
class Blend:
    """The datasets of one flag (or of a part of its file), and the problem of its words, if any."""

    flag: str
    prefixes: tuple[str, ...]
    is_split: bool
    problem: str | None = None


def blends(args: Namespace) -> Iterator[Blend]:
    """Yield the blends of a command line, in order; with a problem if a file cannot be read."""
    if args.data_path is not None:
        drawn = drawn_validation(args.data_path)
        blend = blend_of("--data-path", args.data_path, is_split=drawn is None)
        with_some = [prefix for prefix in blend.prefixes if recorded_validation(prefix)]
        if with_some and drawn is None:
            text = (
                f"--data-path: {with_some[0]} has a validation set, but other data sets do "
                "not: use --train-data-path and --valid-data-path"
            )
            blend = dataclasses.replace(blend, problem=blend.problem or text)
        yield blend
        if drawn is not None:
            yield blend_of("--data-path, validation", drawn, is_split=False)
    if args.data_args_path is not None:
        flag = f"--data-args-path {args.data_args_path}"
        try:
            yield blend_of(flag, _text(flag, args.data_args_path).split(), is_split=True)
        except UserError as error:
            yield Blend(flag, (), is_split=True, problem=str(error))
    for split in _SPLITS:
        words = getattr(args, f"{split}_data_path")
        if words is not None:
            yield blend_of(f"--{split}-data-path", words, is_split=False)
    if args.per_split_data_args_path is not None:
        yield from _listed(args.per_split_data_args_path)


def drawn_validation(words: Sequence[str]) -> list[str] | None:
    """Return the data that `megasink data --validation` drew for a --data-path; None without."""
    prefixes = blend_of("--data-path", words, is_split=True).prefixes
    drawn = {prefix: recorded_validation(prefix) for prefix in prefixes}
    if not drawn or None in drawn.values():
        return None
    return [drawn.get(word.strip()) or word for word in words]


def named_prefixes(args: Namespace) -> dict[str, Blend]:
    """Return every dataset of a command line once, with the first blend that names it."""
    first: dict[str, Blend] = {}
    for blend in blends(args):
        for prefix in blend.prefixes:
            first.setdefault(prefix, blend)
    return first


def parts(args: Namespace) -> tuple[bool, ...]:
    """Return whether training, validation and test have data; all True if flags are wrong."""
    path, unread = args.per_split_data_args_path, (True, True, True)
    if path is not None:
        listed = list(_listed(path))
        wrong = any(blend.problem for blend in listed)
        named = [blend.flag for blend in listed if blend.prefixes]
        return unread if wrong else tuple(named.count(_part(path, of)) > 0 for of in _SPLITS)
    paths = [getattr(args, f"{split}_data_path") for split in _SPLITS]
    if any(paths):
        return tuple(map(bool, paths))
    if args.data_path and drawn_validation(args.data_path) is not None:
        return True, True, False
    parsed = shares(args.split)
    return unread if parsed is None else tuple(map(bool, parsed))


def shares(split: str | None) -> list[float] | None:
    """Return the shares of training, validation and test, in Megatron's floats; None if wrong."""
    # core/datasets/blended_megatron_dataset_config.py:155,164.
    weights = list(map(_number, re.findall(r"[.0-9]+", split or DEFAULT_SPLIT)))
    if None in weights or not any(weights) or len(weights) > len(_SPLITS):
        return None
    first, second, third = [*(weight or 0.0 for weight in weights), 0.0, 0.0][: len(_SPLITS)]
    total = first + second + third  # sum() would round otherwise
    return [first / total, second / total, third / total]


def _part(path: str, split: str) -> str:
    return f"--per-split-data-args-path {path}, {split}"


def _listed(path: str) -> Iterator[Blend]:
    flag = f"--per-split-data-args-path {path}"
    try:
        parts = read_value(Path(path))
    except UserError as error:
        why = f"--per-split-data-args-path: {error}"
        yield Blend(flag, (), is_split=False, problem=why)
        return
    if not isinstance(parts, Mapping) or not set(_SPLITS) <= set(parts):
        why = f"{flag} is not a JSON object with the keys train, valid and test"
        yield Blend(flag, (), is_split=False, problem=why)
        return
    for split in _SPLITS:
        words = parts[split].split() if isinstance(parts[split], str) else parts[split]
        if isinstance(words, list):
            yield blend_of(_part(path, split), list(map(str, words)), is_split=False)
        elif words is not None:
            why = f"{flag}: {split!r} must be null, or a list of weights and prefixes"
            yield Blend(flag, (), is_split=False, problem=why)


def blend_of(flag: str, words: Sequence[str], *, is_split: bool) -> Blend:
    """Separate weights from prefixes like Megatron (core/datasets/utils.py:49), which asserts."""
    # Words alternate if the first of each pair is a number; otherwise every word is a prefix.
    words = [word.strip() for word in words]
    numbers = [_number(word) for word in words]
    pairs = len(words) % 2 == 0
    if not words:
        return Blend(flag, (), is_split, f"{flag} is empty: give a prefix")
    if pairs and all(number is not None for number in numbers[::2]):
        weights = dict(zip(words[1::2], numbers[::2], strict=True))
        wrong = [p for p, w in weights.items() if w is None or not (math.isfinite(w) and w > 0)]
        # BlendedDataset asserts it, after the model is built (core/datasets/blended_dataset.py:61).
        problem = f"{flag}: the weight of {wrong[0]} must be above 0" if wrong else None
        return Blend(flag, tuple(words[1::2]), is_split, problem)
    alone = [
        word
        for word, number in zip(words, numbers, strict=True)
        if number is not None and not Path(f"{word}.bin").exists()
    ]
    prefixes = tuple(word for word in words if word not in alone)
    problem = None
    if alone:
        problem = (
            f"{flag}: {alone[0]} looks like a weight, but {len(words)} words are not pairs of "
            "weight and prefix: put a weight before every prefix, or before none"
        )
    return Blend(flag, prefixes, is_split, problem)


def _number(word: str) -> float | None:
    try:
        return float(word)
    except ValueError:
        return None


def _text(flag: str, path: str) -> str:
    try:
        return read_text(Path(path), _FILE_BYTES)
    except UserError as error:
        raise UserError(f"{flag}: {error}") from error
