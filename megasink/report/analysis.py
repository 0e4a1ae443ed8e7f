"""A finished analysis on disk: reading results.json, and its tables as CSV."""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from megasink.errors import UserError
from megasink.json_file import read_object
from megasink.report.csv_file import write_csv

FORMAT = 2
_PARTS = ("model", "run", "datasets", "sink_rate", "circuit", "curves", "mean_score")

Floats = NDArray[np.float64]


@dataclass
class Analysis:
    """What `megasink analyze` wrote into a folder.

    Attributes:
        name: of the model.
        found: results.json; docs/instruments.md describes every key.
        scores: P3's scores [samples, layers, heads] of every sample.
        maps: of `megasink.probe.maps.geometry`; empty where `--maps` was not asked for.
        points: geometry.npz, points of tokens by PCA and t-SNE; empty where there is none.
    """

    name: str
    found: dict[str, Any]
    scores: dict[str, Floats]
    maps: dict[str, NDArray[Any]] = field(default_factory=dict)
    points: dict[str, NDArray[Any]] = field(default_factory=dict)

    def array(self, *keys: str) -> Floats:
        """A table of results.json, null as NaN."""
        value: Any = self.found
        for key in keys:
            value = value[key]
        return np.asarray(value, dtype=np.float64)


def read_analysis(folder: Path) -> Analysis:
    """Read the folder of an analysis.

    Raises:
        UserError: there is none, or one of another format.
    """
    path = folder / "results.json"
    try:
        found = read_object(path)
    except UserError as error:
        raise UserError(f"{folder} holds no analysis: {error}") from error
    if found.get("format") != FORMAT:
        raise UserError(
            f"{path} has the format {found.get('format')}, this version reads {FORMAT}: analyze "
            "the model again"
        )
    if missing := [key for key in _PARTS if not isinstance(found.get(key), dict)]:
        raise UserError(f"{path} has no {' and no '.join(missing)}: analyze the model again")
    if not (folder / "samples.npz").is_file():
        raise UserError(f"{folder} has no samples.npz: analyze the model again")
    scores = {
        key.removeprefix("score/"): values
        for key, values in _arrays(folder / "samples.npz").items()
        if key.startswith("score/")
    }
    maps, points = _arrays(folder / "maps.npz"), _arrays(folder / "geometry.npz")
    return Analysis(found["model"]["name"], found, scores, maps, points)


def _arrays(path: Path) -> dict[str, NDArray[Any]]:
    """The arrays of a file that need not be there."""
    if not path.is_file():
        return {}
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: arrays[name] for name in arrays.files}
    except (OSError, ValueError, EOFError, BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is damaged ({error}): analyze the model again") from error


def write_tables(analysis: Analysis, folder: Path) -> list[Path]:
    """Write heads.csv, layers.csv, states.csv, scores.csv and datasets.csv.

    Returns:
        the files.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "heads": _heads,
        "layers": _layers,
        "states": _states,
        "scores": _scores,
        "datasets": _datasets,
    }
    written = []
    for name, rows_of in tables.items():
        rows = list(rows_of(analysis))
        path = folder / f"{name}.csv"
        write_csv(path, list(rows[0]) if rows else [], rows)
        written.append(path)
    return written


def _heads(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """One row per layer and head; with several datasets the importance on each (P0.22)."""
    importance = analysis.array("importance")
    datasets = analysis.found["datasets"]
    by_dataset = {name: analysis.array("datasets", name, "importance") for name in datasets}
    if len(datasets) == 1:
        by_dataset.clear()
    scores = {k: analysis.array("mean_score", k) for k in analysis.found["mean_score"]}
    for layer, heads in enumerate(analysis.found["model"]["heads"]):
        for head in range(heads):
            yield {
                "layer": layer,
                "head": head,
                "importance": importance[layer, head],
                **{f"importance_on_{n}": table[layer, head] for n, table in by_dataset.items()},
                **{name: table[layer, head] for name, table in scores.items()},
            }


def _layers(analysis: Analysis) -> Iterator[dict[str, Any]]:
    keys = (
        "imbalance_by_layer",
        "first_token_attention_by_layer",
        "sink_rate_by_layer",
        "slot_attention_by_layer",
        "attention_abs_max",
        "mlp_abs_max",
    )
    columns = {key.removesuffix("_by_layer"): analysis.found[key] for key in keys}
    columns |= analysis.found.get("gate", {})
    for layer in range(analysis.found["model"]["layers"]):
        yield {"layer": layer, **{name: column[layer] for name, column in columns.items()}}


def _states(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """One row per state of the residual stream: 0 the embedding, 0.5 after attention of block 0."""
    norm = analysis.array("curves", "state_norm")
    for half, (ratio, highest) in enumerate(
        zip(analysis.found["massive_ratio"], analysis.found["state_abs_max"], strict=True)
    ):
        yield {
            "state": half / 2,
            "massive_ratio": ratio,
            "abs_max": highest,
            **{f"norm_at_{p}": norm[half, p] for p in range(min(8, norm.shape[1]))},
        }


def _scores(analysis: Analysis) -> Iterator[dict[str, Any]]:
    """One row per score: its thresholds by share of heads."""
    for name, taus in analysis.found["inactive_heads"]["thresholds"].items():
        yield {"score": name, **{f"threshold_at_{share}": tau for share, tau in taus.items()}}


def _datasets(analysis: Analysis) -> Iterator[dict[str, Any]]:
    for name, found in analysis.found["datasets"].items():
        yield {
            "dataset": name,
            "samples": found["samples"],
            "imbalance": found["imbalance"],
            "first_token_attention": found["first_token_attention"],
            **{f"sink_rate_{e}": rates[0] for e, rates in found["sink_rate"].items()},
            **{k: found.get(k) for k in ("nats_per_token", "perplexity", "bits_per_byte")},
        }
