"""The loop of an analysis: batches of equal length through a probe, with loss and progress.

Shapes: B rows, T tokens, V vocabulary.
"""

import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor

from megasink.errors import UserError
from megasink.probe.inputs import Sample
from megasink.probe.recorder import Captured, Recorder

_LOG_SECONDS = 30.0


class Probe(Protocol):
    """What runs a batch and reports it to a recorder."""

    def forward(
        self,
        input_ids_BT: Tensor,
        attention_mask_BT: Tensor | None = None,
        position_ids_BT: Tensor | None = None,
        *,
        logits: bool = True,
    ) -> Any:
        """Run one batch; the output has `logits`."""


def run(
    probe: Probe,
    recorder: Recorder,
    samples: Sequence[Sample],
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    loss: bool = True,
    token_bytes: NDArray[np.int32] | None = None,
    console: Console | None = None,
) -> Captured:
    """Run every sample, and return what was measured.

    Only sequences of one length share a batch, so that nothing is padded.

    Args:
        probe: open.
        loss: also the language-model loss; costs logits [B, T, V].
        token_bytes: bytes of each token, for bits per byte.

    Raises:
        UserError: no sample has finite activations.
    """
    order = sorted(range(len(samples)), key=lambda i: len(samples[i].tokens))
    batches = list(_batches(order, samples, batch_size))
    for batch in _tracked(batches, len(samples), console or Console(stderr=True)):
        ids_BT = torch.tensor([samples[i].tokens for i in batch], device=device)
        recorder.begin(len(batch))
        output = probe.forward(ids_BT, logits=loss)
        told = [
            {"dataset": samples[i].dataset, "source": samples[i].source, "index": i} for i in batch
        ]
        for row, about in enumerate(told):
            about["tokens"] = ids_BT.shape[1]
            if loss:
                about |= _loss(output.logits[row], ids_BT[row], token_bytes)
        recorder.end(told)
    captured = recorder.result()
    if not captured.samples:
        first = captured.non_finite[0]
        raise UserError(
            f"activations of every sample are infinite or NaN, first in layer {first.layers[0]}, "
            f"heads {first.heads}: run the model in a wider dtype (--dtype float32)"
        )
    return _in_order(captured)


def _batches(order: list[int], samples: Sequence[Sample], batch_size: int) -> Iterator[list[int]]:
    batch: list[int] = []
    for index in order:
        if batch and (
            len(batch) == batch_size or len(samples[batch[0]].tokens) != len(samples[index].tokens)
        ):
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


def _loss(
    logits_TV: Tensor, ids_T: Tensor, token_bytes: NDArray[np.int32] | None
) -> dict[str, float | int]:
    """Nats, targets and bytes of one sequence; for bits per byte, targets of 0 bytes left out."""
    target_T = ids_T[1:]
    nats_T = torch.nn.functional.cross_entropy(
        logits_TV[:-1].float(), target_T, reduction="none"
    ).to("cpu", torch.float64)
    found: dict[str, float | int] = {"nats": float(nats_T.sum()), "targets": len(target_T)}
    if token_bytes is not None:
        bytes_T = torch.from_numpy(token_bytes)[target_T.cpu()]
        found["bytes"] = int(bytes_T.sum())
        found["nats_of_bytes"] = float(nats_T[bytes_T > 0].sum())
    return found


def _in_order(captured: Captured) -> Captured:
    """Samples in the order of the inputs again."""
    order = sorted(range(len(captured.samples)), key=lambda i: captured.samples[i]["index"])
    captured.values = {name: array[order] for name, array in captured.values.items()}
    captured.samples = [captured.samples[i] for i in order]
    return captured


def _tracked(batches: list[list[int]], total: int, console: Console) -> Iterator[list[int]]:
    """The batches, with a bar and the time left on a terminal, and a line now and then else."""
    if console.is_terminal:
        columns = (
            TextColumn("analyzing"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=total)
            for batch in batches:
                yield batch
                progress.advance(task, len(batch))
        return
    start = last = time.monotonic()
    done = 0
    for batch in batches:
        yield batch
        done += len(batch)
        now = time.monotonic()
        if now - last > _LOG_SECONDS and done < total:
            last = now
            left = (now - start) / done * (total - done)
            console.print(f"analyzing: {done} of {total} samples, {left:.0f} s left")
