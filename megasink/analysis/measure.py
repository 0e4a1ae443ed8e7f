"""Measure a model: run samples through a probe, compute metrics, and write resumable shards.

Every instrument measures by this, in one call.

Shapes: B rows, T tokens, V vocabulary.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from megasink.analysis.capture.base import (
    BACKWARD_TOKENS,
    PASS_TOKENS,
    Probe,
    ProbedModel,
    takes_seconds,
)
from megasink.analysis.capture.changes import HeadChange
from megasink.analysis.capture.inputs import Sample, equal_lengths, shown
from megasink.analysis.capture.measurements import MeasuredSample, Measurements, merged
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.capture.recorder import Recorder
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.store import Store
from megasink.data.token_bytes import TokenBytes
from megasink.errors import UserError

MOST = 64
"""Maximum number of shards; each holds the sums of `MeanCosine`, however few its samples."""

Shard = list[list[int]]
"""Sample indices by batch."""


def measure(
    model: ProbedModel,
    samples: Sequence[Sample],
    options: AnalysisOptions,
    metrics: Iterable[str] | None = None,
    *,
    changes: Sequence[HeadChange] = (),
    **how: Any,
) -> Measurements | None:
    """Run the samples and return the metrics of each, all metrics if none are named.

    Args:
        how: arguments of `run`.
    """
    recorder = Recorder(model.heads, metrics, options)
    with model.open_probe(recorder, changes) as probe:
        return run(probe, recorder, samples, options, device=model.device, **how)


def run(
    probe: Probe,
    recorder: Recorder,
    samples: Sequence[Sample],
    options: AnalysisOptions,
    *,
    device: torch.device | str = "cpu",
    token_bytes: TokenBytes | None = None,
    store: Store | None = None,
    ranks: Ranks | None = None,
    console: Console | None = None,
    everywhere: bool = False,
) -> Measurements | None:
    """Run every sample and return the measurements, on rank 0 alone unless `everywhere`.

    Batches hold sequences of one length, so nothing is padded. Several ranks need a `store` with a
    folder; without any, shards stay in memory.
    """
    ranks, store = ranks or Ranks(), store or Store()
    shards, about = plan(samples, options.batch_size), shown(sample.dataset for sample in samples)
    most = BACKWARD_TOKENS if probe.differentiates else PASS_TOKENS

    def make(number: int, done: Callable[[int], None]) -> dict[str, NDArray[Any]]:
        for batch in _passes(shards[number], samples, device, most):
            recorder.begin(len(batch))
            ids_BT = torch.tensor([samples[i].tokens for i in batch], device=device)
            losses = _losses(probe, [samples[i] for i in batch], ids_BT, options)
            measured = [
                _measured(samples[i], i, nats_T, token_bytes)
                for i, nats_T in zip(batch, losses, strict=True)
            ]
            recorder.end(measured, about)
            done(len(batch))
        return recorder.take()

    parts = {f"shard_{n:05d}.npz": sum(map(len, shard)) for n, shard in enumerate(shards)}
    goes_on = store.fill(
        parts,
        make,
        ranks,
        verb="analyzing",
        unit="samples",
        console=console or Console(stderr=True, quiet=bool(ranks.rank)),
        slow=takes_seconds(probe.model, min(most, sum(len(s.tokens) for s in samples))),
        everywhere=everywhere,
    )
    if not goes_on:
        return None
    measurements = merged(map(store.read, parts), recorder.heads)
    if not measurements.samples:
        if ranks.size == 1:
            store.remove()  # its contents are useless, and the fix changes the settings
        first = measurements.non_finite[0]
        heads = f", heads {first.heads}" if first.heads else ""
        raise UserError(
            f"activations of every sample are infinite or NaN, first in layer {first.layers[0]}"
            f"{heads}: {_cure(probe.model)}"
        )
    return measurements


def _cure(model: torch.nn.Module) -> str:
    """Return the advice for a model whose activations are never finite."""
    for name, weight in model.named_parameters():
        if not weight.isfinite().all():
            return (
                f"its weights hold infinite or NaN values, first in {name}; another dtype does "
                "not help"
            )
    types = {weight.dtype for weight in model.parameters()}
    if types <= {torch.float32, torch.float64}:
        return "its weights are finite, but its activations are not"
    return "run the model in a wider dtype (--dtype float32)"


def plan(samples: Sequence[Sample], batch_size: int) -> list[Shard]:
    """Cut samples into batches of one length, shortest first, and batches into shards.

    The plan depends on nothing else, so every process has the same one, also after a restart.
    """

    def length(i: int) -> int:
        return len(samples[i].tokens)

    least = max(batch_size, -(-len(samples) // MOST))
    shards: list[Shard] = []
    room = 0
    order = sorted(range(len(samples)), key=length)
    for batch in equal_lengths(order, length, batch_size):
        if room <= 0:
            shards.append([])
            room = least
        shards[-1].append(list(batch))
        room -= len(batch)
    return shards


def _passes(
    shard: Shard, samples: Sequence[Sample], device: torch.device | str, most: int
) -> Iterator[tuple[int, ...]]:
    """Yield the samples of each pass: a batch, or on a CPU a part of one, of `most` tokens."""
    for batch in shard:
        rows = len(batch)
        if torch.device(device).type == "cpu":
            rows = max(1, most // len(samples[batch[0]].tokens))
        yield from itertools.batched(batch, rows)


def _losses(
    probe: Probe, samples: Sequence[Sample], ids_BT: Tensor, options: AnalysisOptions
) -> list[Tensor | None]:
    """Run one pass, and return the loss of each target of each sample; None if unused.

    No name holds the logits, the largest tensor, or a graph when this returns.
    """
    output = probe.forward(ids_BT, logits=options.loss)
    if not options.loss:
        return [None] * len(samples)
    nats = [
        torch.nn.functional.cross_entropy(
            logits_TV[start - 1 : -1].float(), ids_T[start:], reduction="none"
        ).double()
        for logits_TV, ids_T, start in zip(
            output.logits, ids_BT, map(_first_target, samples), strict=True
        )
    ]
    if probe.differentiates:
        probe.backward(torch.stack([nats_T.mean() for nats_T in nats]).sum())
    return [nats_T.detach().cpu() for nats_T in nats]


def _first_target(sample: Sample) -> int:
    return 1 if sample.scored is None else len(sample.tokens) - sample.scored


def _measured(
    sample: Sample, index: int, nats_T: Tensor | None, token_bytes: TokenBytes | None
) -> MeasuredSample:
    """Return the record of a sample, with its loss if measured."""
    measured = MeasuredSample(index, sample.source, sample.dataset, len(sample.tokens))
    if nats_T is None:
        return measured
    start, ids = _first_target(sample), np.asarray(sample.tokens)
    measured = replace(measured, nats=float(nats_T.sum()), targets=len(nats_T))
    if token_bytes is None:
        return measured
    bytes_T = token_bytes.lengths[ids[start:]]
    targets_replaced = [len(ids) - place - start for place in sample.replaced]
    bytes_T[[target for target in targets_replaced if target >= 0]] = 0
    of_bytes, size = float(nats_T[torch.from_numpy(bytes_T > 0)].sum()), int(bytes_T.sum())
    if not sample.inside:
        size -= token_bytes.before_texts(ids[start - 1 : -1], bytes_T)
    return replace(measured, bytes=size, nats_of_bytes=of_bytes)
