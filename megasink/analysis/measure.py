"""Measure a model: run samples through a probe, compute metrics, and write resumable shards.

Shapes: B rows, T tokens, V vocabulary.
"""

import itertools
import json
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from megasink.analysis.capture.head_changes import HeadChange
from megasink.analysis.capture.input_samples import Sample, equal_lengths, shown
from megasink.analysis.capture.measurements import Floats, MeasuredSample, Measurements, merged
from megasink.analysis.capture.probe import (
    BACKWARD_TOKENS,
    PASS_TOKENS,
    Listener,
    Probe,
    ProbedModel,
    takes_seconds,
)
from megasink.analysis.metrics import Metric
from megasink.analysis.metrics.head_importance import BINS, gate_histogram
from megasink.analysis.metrics.registry import measured
from megasink.analysis.metrics.residual_stream import MeanCosine
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.result_schemas import NonFinite
from megasink.analysis.result_store import Store
from megasink.data.token_bytes import TokenBytes
from megasink.errors import UserError

DIRECTIONS = 16
"""Number of positions whose cosine across inputs is measured."""


class Recorder(Listener):
    """Listener that computes the metrics, by default all but those that take a backward pass."""

    def __init__(
        self,
        heads: list[int],
        names: Iterable[str] | None = None,
        options: AnalysisOptions | None = None,
    ):
        options = AnalysisOptions() if options is None else options
        self.heads, positions = heads, options.positions
        self.metrics: dict[str, Metric] = measured(names, options.metrics)
        self.needs = {need for entry in self.metrics.values() for need in entry.needs}
        layers, most = len(heads), max(heads, default=0)
        self._shapes = {
            "head": (layers, most),
            "head column": (layers, most, options.columns),
            "layer": (layers,),
            "layer position": (layers, positions),
            "state": (2 * layers + 1,),
            "state position": (2 * layers + 1, positions),
        }
        self._batch: dict[str, Floats] = {}
        self._bad: list[tuple[set[int], set[int]]] = []
        self._states: list[dict[int, Tensor]] = []
        self._gates: list[dict[int, Tensor]] = []
        self.tell: Callable[[float], None] = lambda samples: None  # gets the part done of a batch
        self._clear()

    def _clear(self) -> None:
        layers = len(self.heads)
        self._batches: dict[str, list[Floats]] = {name: [] for name in self.metrics}
        self._samples: list[MeasuredSample] = []
        self._non_finite: list[NonFinite] = []
        self._cosine = MeanCosine(2 * layers + 1, DIRECTIONS)
        self._histogram = np.zeros((layers, BINS), dtype=np.int64)

    def begin(self, samples: int) -> None:
        """Start a batch of `samples` sequences."""
        self._batch = {
            name: np.full((samples, *self._shapes[entry.axis]), np.nan)
            for name, entry in self.metrics.items()
        }
        self._bad = [(set(), set()) for _ in range(samples)]
        self._states = [{} for _ in range(samples)]
        self._gates = [{} for _ in range(samples)]
        self._met: set[tuple[int, int]] = set()

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        self._apply(sample, layer, statistics)
        self._met.add((sample, layer))
        self.tell(len(self._met) / len(self.heads))
        if "explicit_gate_HTX" in statistics:
            self._gates[sample][layer] = gate_histogram(statistics["explicit_gate_HTX"]).cpu()

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        self._apply(sample, half, {"state_TE": state_TE})
        # Kept until the sample is known to be finite in every layer.
        self._states[sample][half] = state_TE[:DIRECTIONS].clone()

    def _apply(self, sample: int, index: int, statistics: dict[str, Tensor]) -> None:
        known = statistics.keys()
        for name, entry in self.metrics.items():
            if not set(entry.needs) <= known:
                continue
            value = entry.compute(**{need: statistics[need] for need in entry.needs})
            array = value.to("cpu", torch.float64).numpy()
            room = self._batch[name][sample, index]
            if entry.axis in ("head", "layer", "state") and not np.isfinite(array).all():
                layers, heads = self._bad[sample]
                # Block l makes states 2 l + 1 and 2 l + 2; block 0 reads state 0.
                layers.add(max(index - 1, 0) // 2 if entry.axis == "state" else index)
                if entry.axis == "head" and index == min(layers):
                    heads.update(np.flatnonzero(~np.isfinite(array)).tolist())
            if room.ndim == 0:
                self._batch[name][sample, index] = array
            else:
                cut = tuple(slice(min(a, b)) for a, b in zip(array.shape, room.shape, strict=True))
                room[cut] = array[cut]

    def end(self, samples: list[MeasuredSample], about: Collection[str] | None = None) -> None:
        """Finish a batch; sums over samples take the datasets in `about` (None: all)."""
        for sample, (layers, heads) in zip(samples, self._bad, strict=True):
            if layers:
                entry = NonFinite(sample.index, sample.source, sorted(layers), sorted(heads))
                self._non_finite.append(entry)
        good = [i for i, (layers, _) in enumerate(self._bad) if not layers]
        for name, array in self._batch.items():
            self._batches[name].append(array[good])
        for i in (i for i in good if about is None or samples[i].dataset in about):
            for half, state_PE in self._states[i].items():
                self._cosine.add(half, state_PE)
            for layer, counts_B in self._gates[i].items():
                self._histogram[layer] += counts_B.numpy()
        self._samples += [samples[i] for i in good]
        self._batch, self._states, self._gates = {}, [], []

    def take(self) -> dict[str, NDArray[Any]]:
        """Return a shard (`merged`) of everything since the last call, and clear it."""
        values = {
            name: np.concatenate([np.empty((0, *self._shapes[entry.axis])), *self._batches[name]])
            for name, entry in self.metrics.items()
        }
        lists = {"samples": list(map(asdict, self._samples))}
        lists["non_finite"] = list(map(asdict, self._non_finite))
        shard: dict[str, NDArray[Any]] = {f"value/{name}": array for name, array in values.items()}
        shard |= {
            "unit_sum_SPE": self._cosine.unit_sum_SPE.numpy(),
            "count_SP": self._cosine.count_SP.numpy(),
            "gate_histogram_LB": self._histogram,
            "lists": np.asarray(json.dumps(lists)),
        }
        self._clear()
        return shard


MOST = 64
"""Maximum number of shards. Each holds the sums of `MeanCosine`, however few samples it has."""

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
    """Run the samples (`run` has more arguments), and return the metrics of each, or these."""
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
    console: Console | None = None,
    everywhere: bool = False,
) -> Measurements | None:
    """Run every sample and return the measurements, on rank 0 alone unless `everywhere`."""
    store, shards = store or Store(), plan(samples, options.batch_size)
    about = shown(sample.dataset for sample in samples)
    most = BACKWARD_TOKENS if probe.differentiates else PASS_TOKENS

    def make(number: int, done: Callable[..., None]) -> dict[str, NDArray[Any]]:
        forward = 1 / 3 if probe.differentiates else 1.0  # its share of the time
        recorder.tell = lambda samples: done(0, forward * samples)
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
        verb="analyzing",
        unit="samples",
        console=console,
        slow=takes_seconds(probe.model, min(most, sum(len(s.tokens) for s in samples))),
        everywhere=everywhere,
    )
    if not goes_on:
        return None
    measurements = merged(map(store.read, parts), recorder.heads)
    if not measurements.samples:
        if store.ranks.size == 1:
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
                f"the model's weights have infinite or NaN values, first in {name}, so another "
                "dtype does not help"
            )
    types = {weight.dtype for weight in model.parameters()}
    if types <= {torch.float32, torch.float64}:
        return "the model's weights are finite and already in float32 or float64"
    return "run the model in a wider dtype (--dtype float32)"


def plan(samples: Sequence[Sample], batch_size: int) -> list[Shard]:
    """Cut samples into batches of one length, shortest first, and batches into shards."""

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
    """Run one pass, and return the loss of each target of each sample; None if unused."""
    # No name holds the logits, the largest tensor, or a graph when this returns.
    output = probe.forward(ids_BT, logits=options.loss)
    if not options.loss:
        return [None] * len(samples)
    nats = [
        torch.nn.functional.cross_entropy(
            logits_TV[sample.first_target - 1 : -1].float(),
            ids_T[sample.first_target :],
            reduction="none",
        ).double()
        for logits_TV, ids_T, sample in zip(output.logits, ids_BT, samples, strict=True)
    ]
    if probe.differentiates:
        probe.backward(torch.stack([nats_T.mean() for nats_T in nats]).sum())
    return [nats_T.detach().cpu() for nats_T in nats]


def _measured(
    sample: Sample, index: int, nats_T: Tensor | None, token_bytes: TokenBytes | None
) -> MeasuredSample:
    """Return the record of a sample, with its loss if measured."""
    measured = MeasuredSample(index, sample.source, sample.dataset, len(sample.tokens))
    if nats_T is None:
        return measured
    start, ids = sample.first_target, np.asarray(sample.tokens)
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
