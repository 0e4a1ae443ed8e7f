"""Dynamic head zeroing: heads that look inactive in a sample give zero (P3.8 to P3.13).

A score is computed layer by layer while the model runs, by the registry's own functions.

Shapes: B rows, Q tokens, N samples, L layers, H query heads, D head dim, T tokens of a sample.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from megasink.analysis.capture.attention_statistics import at_least_float32, attention_statistics
from megasink.analysis.capture.head_changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.segments import Segment
from megasink.analysis.interventions.intervention_types import Intervention, kind
from megasink.analysis.metrics.head_scores import random_scores
from megasink.analysis.metrics.registry import Metric, metrics, score_names
from megasink.analysis.result_schemas import RANDOM
from megasink.errors import UserError, unknown_name


class LayerScore:
    """A score of inactive heads, of one layer and sample at a time."""

    def __init__(self, name: str):
        if name not in score_names():
            raise UserError(unknown_name("score", name, score_names()))
        self.name, self.entry = name, metrics([name])[name]
        self.bounds, self.is_random = self.entry.bounds, name == RANDOM
        # The metrics of statistics that it is derived from, and the statistics that they take.
        self.of_statistics: dict[str, Metric] = {}
        self.needs: set[str] = set()
        if self.is_random:
            return
        self.of_statistics = statistics_of(self.entry)
        if is_of_all_texts(name):
            raise UserError(
                f"score {name!r} needs a backward pass, so it cannot choose heads for each "
                f"sequence while the model runs: `megasink ablate --by {name}` zeroes the same "
                "heads in all sequences"
            )
        self.needs = {need for entry in self.of_statistics.values() for need in entry.needs}
        if not _is_of_one_layer(name):
            raise UserError(
                f"score {name!r} depends on other layers or samples, which are not known yet when "
                "the heads of a layer are zeroed: choose another score"
            )

    def of(self, statistics: dict[str, Tensor]) -> Tensor:
        """Return [H], float64, from the statistics of one sample in one layer."""
        known = {
            name: entry.compute(**{need: statistics[need] for need in entry.needs}).double()
            for name, entry in self.of_statistics.items()
        }
        return _derived(self.entry, known)


def random_of(tokens: Iterable[int], layer: int, heads: int, seed: int) -> Tensor:
    """Return [H]: uniform scores in [0, 1) of one sample in one layer, in any batch (P3.9)."""
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
            f"score {entry.name!r} needs {', '.join(entry.needs)}, but some of these are unknown "
            "while the model runs: choose another score"
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


@kind
class DynamicZeroing(Intervention):
    """Zero the heads whose score crosses a threshold, per call of the model and sample.

    A head of a sample gives 0 to the output projection if its score is strictly above (first-token
    weights) or below (all others) the threshold. The scores of a layer are those of the model as
    it runs: the layers below it are already changed. Nothing is renormalized, and the bias of W_O
    stays. The score covers the whole sequence, which is not causal (P3.12).

    With a key/value cache, the pass without a cache (the prompt) decides the masks, and later
    passes of the same rows keep them. A prompt that runs in chunks is decided by its first.
    """

    kind: ClassVar[str] = "dynamic-zeroing"
    source: ClassVar[str] = "P3.1 to P3.13"

    score: str  # a registered metric with `inactive` set
    threshold: float  # absolute; for `random` the share of heads (P3.9)
    seed: int = 0  # of `random`; the same sample gets the same heads, in any batch

    def __post_init__(self) -> None:
        object.__setattr__(self, "threshold", float(self.threshold))
        low, high = LayerScore(self.score).bounds
        if not low <= self.threshold <= high:
            raise UserError(f"threshold {self.threshold:g} ({self.score}): use {low:g} to {high:g}")

    changes_heads = True

    def running(self) -> "DynamicChange":
        """Return the change, which counts what it zeroes."""
        return DynamicChange(LayerScore(self.score), self.threshold, self.seed)


class DynamicChange(HeadChange):
    """See `DynamicZeroing`; a threshold of None measures without zeroing anything."""

    def __init__(self, score: LayerScore, threshold: float | None, seed: int):
        self._score, self.threshold, self._seed = score, threshold, seed
        # Without attention, scores of head outputs are computed from those alone.
        of_outputs = score.needs <= {"gated_out_HTD", "output_weight_HDE"}
        self.reads_attention = not score.is_random and not of_outputs
        self.reads_segments = True
        self._segments: list[Segment] = []
        self.keeps_scores = False
        self.forget()

    def forget(self) -> None:
        """Forget all decided samples."""
        self.samples = 0
        # Layer -> bool [N, H]: the heads zeroed in the samples of the last call that decided.
        self.masks: dict[int, Tensor] = {}
        self.scores: dict[int, list[Tensor]] = {}  # layer -> [H] of every sample, float64, if kept
        self._zeroed: dict[int, Tensor] = {}

    def begin(self, forward: ForwardPass) -> None:
        if not forward.cached:
            self.masks = {}
            self._segments = list(forward.segments)
            self.samples += len(self._segments)
            if self._score.is_random and forward.input_ids_BQ is None:
                raise UserError("score random depends on the tokens: pass input_ids to the model")
            return
        forward.check_continues(self._segments if self.masks else [])

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        layer, out_BQHD = outputs.layer, outputs.out_BQHD
        if not forward.cached:
            scores_NH = torch.stack(list(self._scores(forward, outputs)))
            if self.keeps_scores:
                self.scores.setdefault(layer, []).extend(scores_NH)
            if self.threshold is None:
                return None
            above = self._score.entry.inactive == "above"
            mask_NH = scores_NH > self.threshold if above else scores_NH < self.threshold
            self.masks[layer] = mask_NH.to(out_BQHD.device)
            zeroed_H = self.masks[layer].sum(0)
            self._zeroed[layer] = self._zeroed.get(layer, 0) + zeroed_H
        elif self.threshold is None:
            return None
        mask_NH = self.masks[layer]
        if forward.cached or len(self._segments) == forward.rows:
            # One sequence in each row; the contents of padding do not matter.
            return out_BQHD.masked_fill(mask_NH[:, None, :, None], 0.0)
        mask_BQH = torch.zeros(out_BQHD.shape[:3], dtype=torch.bool, device=out_BQHD.device)
        for mask_H, (row, start, stop) in zip(mask_NH, self._segments, strict=True):
            mask_BQH[row, start:stop] = mask_H
        return out_BQHD.masked_fill(mask_BQH[..., None], 0.0)

    @torch.no_grad()
    def _scores(self, forward: ForwardPass, outputs: HeadOutputs) -> Iterator[Tensor]:
        """Yield [H] of each sample."""
        score, heads = self._score, outputs.out_BQHD.shape[2]
        if score.is_random:
            assert forward.input_ids_BQ is not None
            ids = forward.input_ids_BQ.tolist()
            for row, start, stop in self._segments:
                yield random_of(ids[row][start:stop], outputs.layer, heads, self._seed)
            return
        for statistics in self._statistics(outputs):
            if missing := score.needs - statistics.keys():
                raise UserError(
                    f"{score.name} needs {', '.join(sorted(missing))}, which layer "
                    f"{outputs.layer} does not have"
                )
            yield score.of(statistics)

    def _statistics(self, outputs: HeadOutputs) -> Iterator[dict[str, Tensor]]:
        """Yield the statistics of each sample, of the outputs as earlier changes left them."""
        needs, weight_HDE = self._score.needs, None
        if "output_weight_HDE" in needs:
            weight_HDE = outputs.output_weight()
        if self.reads_attention:
            assert outputs.call is not None
            gated_BHQD = outputs.out_BQHD.transpose(1, 2)
            call = replace(outputs.call, gated_out_BHTD=gated_BHQD, output_weight_HDE=weight_HDE)
            yield from attention_statistics(call, self._segments, needs)
            return
        for row, start, stop in self._segments:
            out_HTD = at_least_float32(outputs.out_BQHD[row, start:stop].transpose(0, 1))
            statistics = {"gated_out_HTD": out_HTD}
            if weight_HDE is not None:
                statistics["output_weight_HDE"] = at_least_float32(weight_HDE)
            yield statistics

    @property
    def share_LH(self) -> NDArray[np.float64]:
        """[L, H]: share of the samples in which each head was zeroed, to the last such layer."""
        if not self._zeroed:
            raise UserError("the model has not run in this context yet: run it first")
        most = max(len(zeroed_H) for zeroed_H in self._zeroed.values())
        share_LH = np.full((max(self._zeroed) + 1, most), np.nan)
        for layer, zeroed_H in self._zeroed.items():
            share_LH[layer, : len(zeroed_H)] = zeroed_H.cpu().numpy() / self.samples
        return share_LH

    @property
    def share(self) -> float:
        """Share of the heads that was zeroed: the mean over samples and layers (P3.13)."""
        share_LH = self.share_LH
        present = ~np.isnan(share_LH).all(1)
        return float(np.nanmean(share_LH[present], 1).mean())
