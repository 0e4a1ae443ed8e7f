"""The programs that measure a run, and the numbers that are read from what they write."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from examples.replicate import cone, first_layer
from megasink import cli
from megasink.analysis.analysis_folder import read_analysis
from megasink.analysis.metrics import metrics_shown
from megasink.analysis.result_schemas import ALL, RANDOM, AblationResults, scalars_of
from megasink.cli.ablate import SCORES
from megasink.files.checked_fields import from_json
from megasink.files.json_file import read_object

CONE = ("cone_alpha", "cone_r2", "cone_tau", "norm_first_over_later", "square_sum_last")


@dataclass(frozen=True)
class Program:
    """A program that measures.

    Attributes:
        main: takes the words of the command.
        writes: the file that it writes last.
        numbers: words -> the names of what `read` gives.
        read: folder -> number by name; None where the model has none.
    """

    main: Callable[[Sequence[str]], int]
    writes: str
    numbers: Callable[[Sequence[str]], list[str]]
    read: Callable[[Path], dict[str, float | None]]


def _scores(words: Sequence[str]) -> list[str]:
    """Return the scores that a command of `megasink ablate` compares."""
    if "--score" not in words:
        return [RANDOM, *SCORES]
    behind = list(words)[list(words).index("--score") + 1 :]
    end = next((i for i, word in enumerate(behind) if word.startswith("--")), len(behind))
    return [RANDOM, *behind[:end]]


EITHER = "ahon_either/rank"
"""The better rank of AHON and AHON (LN): P3 counts the models in which it is 1 (P3.16)."""


def _ablation_numbers(words: Sequence[str]) -> list[str]:
    scores = _scores(words)
    kinds = ("auc", "rank", "removable")
    either = [EITHER] * ({"ahon", "ahon_ln"} <= set(scores))
    return [*(f"{score}/{kind}" for score in scores for kind in kinds), *either]


def _read_ablation(folder: Path) -> dict[str, float | None]:
    """Return AUC (P3.16), rank and removable heads (P3.15) of each score, over all texts.

    A curve that never leaves the level has at least what was measured removable, which is given
    here, and 0 by the published rule.
    """
    path = folder / "ablation.json"
    results: AblationResults = from_json(AblationResults, read_object(path), str(path))
    on = [curve.on for curve in results.curves]
    chosen = ALL if ALL in on else on[0]
    numbers: dict[str, float | None] = {}
    for curve in results.curves:
        if curve.on == chosen:
            removable = curve.measured_to if curve.never_left else curve.removable
            for kind, value in (("auc", curve.auc), ("rank", curve.rank), ("removable", removable)):
                numbers[f"{curve.score}/{kind}"] = value
    ranks = {curve.score: curve.rank for curve in results.curves if curve.on == chosen}
    if {"ahon", "ahon_ln"} <= ranks.keys():
        numbers[EITHER] = min(ranks["ahon"], ranks["ahon_ln"])
    return numbers


def _read_analysis(folder: Path) -> dict[str, float | None]:
    """Return the scalars of an analysis, and the fit of the cone model to layer 0."""
    analysis = read_analysis(folder)
    numbers = {
        name: None if isinstance(value, str) else value
        for name, value in scalars_of(analysis.results).items()
    }
    square_sum_P = analysis.values("square_sum")[0]
    norm_P = analysis.values("attention_branch_norm")[0]
    there = np.isfinite(square_sum_P) & np.isfinite(norm_P)
    fitted = cone.fit(square_sum_P[there], norm_P[there])
    found = (fitted.alpha, fitted.r2, fitted.tau, fitted.first_over_later)
    return numbers | dict(zip(CONE, (*found, float(square_sum_P[there][-1])), strict=True))


PROGRAMS = {
    "ablate": Program(
        main=lambda words: cli.main(list(words)),
        writes="ablation.json",
        numbers=_ablation_numbers,
        read=_read_ablation,
    ),
    "analyze": Program(
        main=lambda words: cli.main(list(words)),
        writes="results.json",
        numbers=lambda words: [*metrics_shown("scalar"), *CONE],
        read=_read_analysis,
    ),
    "first-layer": Program(
        main=lambda words: first_layer.main(words[1:]),
        writes=first_layer.FILE,
        numbers=lambda words: list(first_layer.NUMBERS),
        read=first_layer.read,
    ),
}
