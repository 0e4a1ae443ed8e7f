"""The figures of a results file: numbers by cell, curves, importance of the heads.

Every picture carries the hash of what it was drawn from, so that a test finds an old one.
"""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterator

import numpy as np

from examples.replicate.grid.bands import Band
from examples.replicate.grid.cell_figures import draw_bands, draw_numbers
from examples.replicate.record import Curve, Result
from megasink.figures.importance_heatmap import importance_pictures
from megasink.figures.style import PALETTE, rendered, short, styled
from megasink.files.checked_fields import to_json

PANELS = 6
"""At most, in a figure; the table has the other numbers."""
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
    if any(result.curves.values()) and len(result.cells) <= len(PALETTE):
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
    """Draw a panel for each of the first metrics: a row per cell, a point per seed, the mean."""
    numbers = {
        metric: {
            cell: [value for value in of[metric] if value is not None]
            for cell, of in result.cells.items()
        }
        for metric in result.metrics[:PANELS]
    }
    return rendered(draw_numbers(numbers, {cell: short(cell, 40) for cell in result.cells}))


@styled()
def _curves(result: Result) -> bytes:
    """Draw a panel per curve: mean and deviation by cell."""
    curves = {
        name: {cell: _band(curve) for cell, curve in by_cell.items()}
        for name, by_cell in result.curves.items()
        if by_cell
    }
    figure = draw_bands(curves, list(result.cells), x=result.x)
    if result.x != "step":  # one quantity under several conditions
        limits = np.array([axis.get_ylim() for axis in figure.axes[: len(curves)]])
        for axis in figure.axes[: len(curves)]:
            axis.set_ylim(limits[:, 0].min(), limits[:, 1].max())
    return rendered(figure)


def _band(curve: Curve) -> Band:
    steps, mean, deviation = (
        np.array([np.nan if x is None else x for x in column], dtype=np.float64)
        for column in (curve.steps, curve.mean, curve.deviation)
    )
    return Band(steps, mean, deviation, [])
