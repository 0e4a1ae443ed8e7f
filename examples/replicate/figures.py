"""The figures of a results file: numbers by cell, curves, importance of the heads.

Every picture carries the hash of what it was drawn from, so that a test finds an old one.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from examples.replicate.record import Result
from megasink.report.heatmap import importance_pictures
from megasink.report.style import (
    GRAY,
    even_panels,
    label,
    model_colors,
    rendered,
    short,
    styled,
)
from megasink.typed_json import to_json

SOURCE = b"Source"
"""Keyword of the PNG text chunk with the hash."""


def names(result: Result) -> list[str]:
    """Return the files of a result's figures."""
    return [f"results-{result.name}{end}.png" for end, _ in _figures(result)]


def draw(result: Result) -> dict[str, bytes]:
    """Return the figures of a result: file -> PNG."""
    return {
        f"results-{result.name}{end}.png": _with_source(picture(result), source_of(result))
        for end, picture in _figures(result)
    }


def _figures(result: Result) -> Iterator[tuple[str, Callable[[Result], bytes]]]:
    """Yield the end of each figure's name, and what draws it."""
    yield "", _numbers
    if any(result.curves.values()):
        yield "-curves", _curves
    if result.maps:
        yield "-heads", _heads


def source_of(result: Result) -> str:
    """Return the hash of everything that is drawn."""
    told = to_json(result)
    drawn = {key: told[key] for key in ("title", "seeds", "metrics", "cells", "curves", "maps")}
    return hashlib.sha256(json.dumps(drawn, sort_keys=True).encode()).hexdigest()


def read_source(png: bytes) -> str | None:
    """Return the hash that a figure carries; None if it has none."""
    for kind, data in _chunks(png):
        if kind == b"tEXt" and data.startswith(SOURCE + b"\0"):
            return data.partition(b"\0")[2].decode()
    return None


def _with_source(png: bytes, source: str) -> bytes:
    """Return a PNG with one more text chunk, before its end."""
    data = b"tEXt" + SOURCE + b"\0" + source.encode()
    chunk = struct.pack(">I", len(data) - 4) + data + struct.pack(">I", zlib.crc32(data))
    end = png.rindex(b"IEND") - 4
    return png[:end] + chunk + png[end:]


def _chunks(png: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Yield the kind and the data of every chunk."""
    at = 8
    while at < len(png):
        (length,) = struct.unpack(">I", png[at : at + 4])
        yield png[at + 4 : at + 8], png[at + 8 : at + 8 + length]
        at += 12 + length


def _heads(result: Result) -> bytes:
    """Draw the importance of every head, of each cell's first seed."""
    maps = [(cell, np.array(rows, dtype=np.float64)) for cell, rows in result.maps.items()]
    return importance_pictures(maps)


@styled()
def _numbers(result: Result) -> bytes:
    """Draw a panel per metric: a row per cell, a point per seed, mean and deviation."""
    cells = list(result.cells)
    colors = model_colors(len(cells))
    most = 3 if len(result.metrics) > 2 else 2
    height = max(1.8, 0.9 + 0.24 * len(cells))
    figure, axes = even_panels(len(result.metrics), most, height, sharey=True)
    for axis, metric in zip(axes, result.metrics, strict=True):
        for row, cell in enumerate(cells):
            values = np.array([x for x in result.cells[cell][metric] if x is not None])
            apart = row + 0.12 * np.linspace(-1, 1, max(2, len(values)))[: len(values)]
            axis.plot(values, apart, "o", color=colors[row], alpha=0.45, markersize=3)
            if len(values):
                spread = values.std(ddof=1) if len(values) > 1 else 0.0
                axis.errorbar(
                    values.mean(), row, xerr=spread, fmt="D", color=colors[row], capsize=2.5
                )
        axis.set_yticks(range(len(cells)), [short(cell, 34) for cell in cells])
        axis.set_ylim(len(cells) - 0.5, -0.5)
        label(axis, metric)
    return rendered(figure)


@styled()
def _curves(result: Result) -> bytes:
    """Draw a panel per curve: mean and deviation by cell."""
    curves = {name: by_cell for name, by_cell in result.curves.items() if by_cell}
    cells = list(result.cells)
    colors = dict(zip(cells, model_colors(len(cells)), strict=True))
    figure, axes = even_panels(len(curves), 3 if len(curves) > 2 else 2, 3.0)
    lines: dict[str, Any] = {}
    for axis, (name, by_cell) in zip(axes, curves.items(), strict=True):
        for cell, curve in by_cell.items():
            steps = np.array(curve.steps)
            mean, spread = (
                np.array([np.nan if x is None else x for x in column])
                for column in (curve.mean, curve.deviation)
            )
            (lines[cell],) = axis.plot(steps, mean, color=colors[cell], linewidth=1.3)
            axis.fill_between(
                steps, mean - spread, mean + spread, color=colors[cell], alpha=0.15, linewidth=0
            )
        label(axis, name, "", "step")
        axis.tick_params(colors=GRAY)
    names = [short(cell, 34) for cell in lines]
    figure.legend(list(lines.values()), names, loc="outside lower center", ncols=4)
    return rendered(figure)
