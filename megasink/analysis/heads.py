"""Lists of heads: from the command line, from JSON or CSV files, and checks against a model."""

import csv
import numbers
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from megasink.errors import UserError
from megasink.files.json_file import read_text, read_value


def parse_head(word: str) -> tuple[int, int]:
    """Return (layer, head) of a word such as 3.5."""
    layer, _, head = word.partition(".")
    if not (layer.isdecimal() and head.isdecimal()):
        raise UserError(f"{word}: write a head as LAYER.HEAD, counted from 0, such as 3.5")
    return int(layer), int(head)


def head_problems(chosen: Iterable[tuple[int, int]], heads: Sequence[int]) -> list[str]:
    """Return one sentence for each chosen head that a model does not have."""
    problems = []
    for layer, head in chosen:
        if layer >= len(heads):
            problems.append(f"head {layer}.{head}: the model has layers 0 to {len(heads) - 1}")
        elif not heads[layer]:
            problems.append(f"head {layer}.{head}: layer {layer} has no softmax attention")
        elif head >= heads[layer]:
            problems.append(f"head {layer}.{head}: layer {layer} has heads 0 to {heads[layer] - 1}")
    return problems


Heads = tuple[tuple[int, int], ...]
"""(layer, head) pairs, counted from 0."""
GivenHeads = str | Path | Iterable[Sequence[int] | str]
"""(layer, head) pairs, strings such as "3.5", or a file that `read_heads` reads."""


class HeadList(NamedTuple):
    """Heads, and the shape of the mask that they were read from: the fields of `ZeroHeads`."""

    heads: Heads  # the chosen heads
    mask_shape: tuple[int, int] | None = None  # (layers, heads); None for a list of pairs


def heads_of(given: GivenHeads) -> HeadList:
    """Return heads given as pairs, as words such as 3.5, or as one file of `read_heads`."""
    one = given[0] if isinstance(given, Sequence) and len(given) == 1 else given
    if isinstance(one, Path) or (isinstance(one, str) and Path(one).suffix in (".json", ".csv")):
        return read_heads(Path(one))
    return HeadList(normalized_heads(given))


def normalized_heads(heads: GivenHeads) -> Heads:
    """Return (layer, head) pairs, sorted, each once, from pairs and words such as 3.5."""
    if isinstance(heads, str):
        heads = heads.split()
    if not isinstance(heads, Iterable):
        raise UserError(f"heads {heads!r}: give [layer, head] pairs, or strings such as '3.5'")
    pairs = set()
    for entry in heads:
        entry = parse_head(entry) if isinstance(entry, str) else entry
        is_row = isinstance(entry, list | tuple) or bool(getattr(entry, "shape", None))  # of numpy
        pair: tuple[Any, ...] = tuple(entry) if is_row else (entry,)
        integers = [n for n in pair if isinstance(n, numbers.Integral) and not isinstance(n, bool)]
        is_pair = len(integers) == len(pair) == 2
        if not is_pair or min(pair) < 0:
            raise UserError(f"{entry!r} is not [layer, head]: use two whole numbers, 0 or more")
        pairs.add((int(pair[0]), int(pair[1])))
    return tuple(sorted(pairs))


def read_heads(path: Path) -> HeadList:
    """Read heads from JSON (`heads` or `mask`), a CSV with a line layer,head, or a CSV mask."""
    content = read_value(path) if path.suffix == ".json" else read_text(path)
    try:
        if path.suffix == ".json":
            return _from_json(content)
        rows = [row for row in csv.reader(content.splitlines()) if row]
        if [word.strip() for word in rows[0]] == ["layer", "head"] if rows else False:
            pairs = [[int(word) for word in row] for row in rows[1:]]
            return HeadList(normalized_heads(pairs))
        return _from_mask([[int(word) for word in row] for row in rows])
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error


def _from_json(content: Any) -> HeadList:
    if isinstance(content, dict) and len(content) == 1:
        if isinstance(content.get("heads"), list):
            return HeadList(normalized_heads(content["heads"]))
        if isinstance(content.get("mask"), list):
            return _from_mask(content["mask"])
    raise ValueError('write {"heads": [[layer, head], ...]} or {"mask": [[0, 1, ...], ...]}')


def _from_mask(mask: Any) -> HeadList:
    if not mask or not all(isinstance(row, list) and len(row) == len(mask[0]) for row in mask):
        raise ValueError("a mask must have one row for each layer, all of the same length")
    other = [value for row in mask for value in row if value not in (0, 1)]
    if other:
        raise ValueError(f"a mask may contain only 0 and 1, not {other[0]!r}")
    chosen = [(l, h) for l, row in enumerate(mask) for h, value in enumerate(row) if value]  # noqa: E741
    return HeadList(normalized_heads(chosen), (len(mask), len(mask[0])))
