"""Scores of one layer's heads, computed while the model runs, by the registry's own functions.

Shapes: N samples, L layers, H heads.
"""

import hashlib
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from megasink.analysis.ablate.results import RANDOM
from megasink.analysis.metrics.head_scores import random_scores
from megasink.analysis.metrics.registry import Metric, metrics, score_names
from megasink.errors import UserError, unknown_name


class LayerScore:
    """A score of inactive heads, of one layer and sample at a time.

    Attributes:
        bounds: lowest and highest value that the score can have.
        of_statistics: the metrics of statistics that it is derived from, by name, and `needs` the
            statistics that they take; empty for the random baseline.
    """

    def __init__(self, name: str):
        if name not in score_names():
            raise UserError(unknown_name("score", name, score_names()))
        self.name = name
        self.entry = metrics([name])[name]
        assert self.entry.inactive is not None
        self.inactive: str = self.entry.inactive
        self.bounds = self.entry.bounds
        self.is_random = name == RANDOM
        self.needs: set[str] = set()
        self.of_statistics: dict[str, Metric] = {}
        if self.is_random:
            return
        self.of_statistics = statistics_of(self.entry)
        if is_of_all_texts(name):
            raise UserError(
                f"score {name!r} takes a backward pass, so it cannot choose heads in each sequence "
                f"while the model runs: `megasink ablate --by {name}` zeroes the same in all"
            )
        self.needs = {need for entry in self.of_statistics.values() for need in entry.needs}
        if not _is_of_one_layer(self.entry.name):
            raise UserError(
                f"score {name!r} of a layer depends on other layers or samples, which have not run "
                "yet when its heads are zeroed"
            )

    def of(self, statistics: dict[str, Tensor]) -> Tensor:
        """Return [H], float64, from the statistics of one sample in one layer."""
        known = {
            name: entry.compute(**{need: statistics[need] for need in entry.needs}).double()
            for name, entry in self.of_statistics.items()
        }
        return _derived(self.entry, known)


def random_of(tokens: Iterable[int], layer: int, heads: int, seed: int) -> Tensor:
    """Return [H]: uniform scores in [0, 1) of one sample in one layer, float64 (P3.9).

    They depend on the seed, the layer and the tokens of the sample, so that neither the batch nor
    padding changes them; equal samples have equal scores.
    """
    digest = hashlib.sha256(repr((seed, layer, tuple(tokens))).encode()).digest()
    return random_scores((heads,), int.from_bytes(digest[:8], "big") >> 1)


def statistics_of(entry: Metric) -> dict[str, Metric]:
    """Return the metrics of statistics from which a metric by sample is derived (or itself)."""
    if not entry.is_derived:
        return {entry.name: entry}
    return {n: e for base in _bases_of(entry) for n, e in statistics_of(base).items()}


def is_of_all_texts(score: str) -> bool:
    """Return whether a score takes a backward pass: it then ranks heads by its mean."""
    entry = metrics([score])[score]
    names = [need.removesuffix("_NLH") for need in entry.needs]
    known = [name for name in names if name in metrics()]
    return entry.takes_backward or any(map(is_of_all_texts, known))


def _bases_of(entry: Metric) -> list[Metric]:
    """Return the metrics by sample and head that a derived metric takes; see `statistics_of`."""
    names = [need.removesuffix("_NLH") for need in entry.needs]
    if any(need == name or name not in metrics() for need, name in zip(entry.needs, names)):  # noqa: B905
        raise UserError(
            f"score {entry.name!r} takes {', '.join(entry.needs)}, which are not all known while "
            "the model runs"
        )
    return list(metrics(names).values())


def _derived(entry: Metric, known: dict[str, Tensor]) -> Tensor:
    """Return a score from the metrics of statistics, both of any shape [..., H]."""
    if not entry.is_derived:
        return known[entry.name]
    shape = known[next(iter(known))].shape
    of = [_derived(base, known) for base in _bases_of(entry)]
    if len(shape) == 1:
        of = [score_H[None, None] for score_H in of]
    return entry.compute(*of).reshape(shape)


@cache
def _is_of_one_layer(name: str) -> bool:
    """Return whether a score of one layer and sample is independent of the others."""
    entry = metrics([name])[name]
    if not entry.is_derived:
        return True
    generator = torch.Generator().manual_seed(0)
    names = statistics_of(entry)
    scores = {n: torch.rand(2, 3, 4, generator=generator, dtype=torch.float64) for n in names}
    together = _derived(entry, scores)
    alone = [
        [_derived(entry, {n: score[i, j] for n, score in scores.items()}) for j in range(3)]
        for i in range(2)
    ]
    return torch.allclose(together, torch.stack([torch.stack(row) for row in alone]))


def takes_outputs_only(needs: set[str]) -> bool:
    """Return whether statistics can be computed from head outputs alone."""
    return needs <= {"gated_out_HTD", "output_weight_HDE"}
