"""Write a run's metrics after every step and evaluation; metric_records.py defines the records.

Megatron 0.19 has no per-step callback: ``training_log`` and ``evaluate`` are wrapped. The values of
a step reach the host by a copy without waiting, and are written one step later, or at once in a
step that is logged or drawn, and before an evaluation, a checkpoint and the end.
"""

import contextlib
import functools
import inspect
import math
import time
from collections import deque
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.num_microbatches_calculator import get_current_global_batch_size
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from torch import Tensor

from megasink.checkpoints.damage import iterations
from megasink.errors import UserError
from megasink.figures.importance_heatmap import importance_picture
from megasink.figures.loss_spikes import Divergence, SpikeCounter
from megasink.megatron.head_balance import HeadBalance
from megasink.megatron.head_observer import count_sinks, sink_rates
from megasink.training import metric_records
from megasink.training.forward_step import BITS_PER_BYTE, LM_LOSS
from megasink.training.metrics_file import MetricsFile
from megasink.training.stop import DIVERGES
from megasink.upstream.training_patches import METRICS

BALANCE_LOSS = "head balance loss"
IMBALANCE = "head imbalance"
HEATMAP = "head importance"
_AGAIN = " vs samples"  # Megatron's curves against samples, which are the step times a factor


class MetricsWriter:
    """Write each step's metrics on the last rank; a resume drops repeated steps."""

    def __init__(self, statistics: HeadBalance, metrics: Path | None):
        args = get_args()
        self._statistics = statistics
        self._rows = metric_records.HeadRows.of(args.hybrid_layer_pattern)
        self._owner = args.rank == args.world_size - 1
        self._file = MetricsFile(metrics if self._owner else None)
        self._opened = False
        self._spikes, self._divergence = SpikeCounter(), Divergence()
        self._clock = time.perf_counter()
        self._seconds_per_token: float | None = None
        self._iteration, self._split = 0, "valid"
        self._known: list[dict[str, Any]] = []
        # Steps to write, oldest first: the part that the host knows, the rest.
        self._waiting: deque[tuple[dict[str, Any], metric_records.StepValues]] = deque()
        self._counts_heads: bool | None = None  # not known before the first step
        self._newest: tuple[int, Tensor] | None = None  # importance_LH, until it is drawn

    def step(self, call: dict[str, Any]) -> None:
        """Add a step's statistics to the losses in ``training_log``'s arguments, and write them."""
        args = get_args()
        self._iteration = int(call["iteration"])
        balance = self._statistics
        # --iterations-to-skip has steps without a forward pass.
        statistics = balance.last if balance.last_number == self._iteration - 1 else None
        logs = metric_records.is_observed(args, self._iteration)
        if self._owner:
            losses = call["loss_dict"]
            self._open()
            while self._waiting and self._waiting[0][1].are_here:
                self._write(*self._waiting.popleft())
            values = metric_records.StepValues(losses.get(LM_LOSS), statistics, self._rows)
            self._waiting.append((self._record(call), values))
            if self._counts_heads is None and statistics is not None:
                self._counts_heads = values.read()[1] is not None  # the model's, in every step
            if statistics is not None and self._counts_heads:
                # Megatron then prints and writes these like the language model loss.
                losses[BALANCE_LOSS] = statistics.balance_loss.reshape(1)
                losses[IMBALANCE] = statistics.imbalance.reshape(1)
            if logs or self._draws(self._iteration):
                self.flush()
        if logs and args.stop_on_divergence is not None:
            stop_if_diverged(self._divergence, args.stop_on_divergence, self._iteration, args.save)

    def flush(self) -> None:
        """Write the remaining steps; wait for their values."""
        while self._waiting:
            self._write(*self._waiting.popleft())

    def _write(self, record: dict[str, Any], values: metric_records.StepValues) -> None:
        """Add a step's values to its record, and write it."""
        iteration = record["iteration"]
        logs = metric_records.is_observed(get_args(), iteration)
        record["lm_loss"], read = values.read()
        if record["lm_loss"] is not None and not record["skipped"]:
            self._follow(iteration, record["lm_loss"])
        if read is not None:
            record |= self._rows.names() | metric_records.head_record(read, details=logs)
            self._newest = (iteration, read.importance_LH)
            if self._draws(iteration):
                self._draw(get_tensorboard_writer(), get_wandb_writer())
        if logs:
            record["loss_spikes"] = self._spikes.count
            speed, memory = self._speed(record), torch.cuda.memory_stats()
            scalars = {"tokens per second": speed}
            scalars["memory in GiB"] = memory["allocated_bytes.all.peak"] / 2**30
            self._write_scalars(iteration, scalars | metric_records.head_scalars(record))
            self._print(record, speed)
        self._file.write(record)

    def start_evaluation(self, split: str, iteration: int) -> None:
        """Prepare to evaluate "valid" or "test". Its step may have run before this start."""
        self.flush()
        self._split, self._iteration = split, iteration
        if get_args().log_sink_rate:
            count_sinks(self._statistics)

    def evaluation(self, losses: dict[str, Any] | None) -> None:
        """Write an evaluation's loss, bits per byte and attention sinks."""
        split = self._split
        record: dict[str, Any] = {"iteration": self._iteration}
        sinks: dict[str, Any] = {}
        if self._statistics.sinks is not None:
            rates = (rate_LH[self._rows.rows] for rate_LH in sink_rates(self._statistics))
            sinks = metric_records.sink_record(split, *rates)
        if not self._owner or not losses:
            return
        record[f"{split}_lm_loss"] = metric_records.number(losses.get(LM_LOSS))
        if BITS_PER_BYTE in losses:
            record[f"{split}_bits_per_byte"] = metric_records.number(losses[BITS_PER_BYTE])
        self._open()
        record |= self._rows.names() | sinks if sinks else {}
        if record not in self._known:  # resuming a finished run evaluates it again
            self._file.write(record)
        if sinks:
            scalars = metric_records.sink_scalars(sinks, split)
            self._write_scalars(self._iteration, scalars)
            text = " | ".join(f"{name} {value:.2f}%" for name, value in scalars.items())
            print(f"megasink: {text}", flush=True)

    def close(self, *, failed: bool = False) -> None:
        """Write what is left, close metrics.jsonl and flush TensorBoard."""
        try:
            with contextlib.suppress(*(RuntimeError,) * failed):
                self.flush()
        finally:
            self._waiting.clear()
            self._file.close()
            if writer := get_tensorboard_writer():
                if get_args().head_heatmap_interval:
                    self._draw(writer)  # W&B has ended its run here
                writer.flush()

    def _record(self, call: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a step's record that the host knows."""
        args = get_args()
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return {
            "iteration": self._iteration,
            "lm_loss": None,
            "learning_rate": call["learning_rate"],
            "grad_norm": metric_records.number(call["grad_norm"]),
            "skipped": int(call["skipped_iter"]),
            "consumed_samples": args.consumed_train_samples,
            "tokens": args.consumed_train_samples * args.seq_length,
            "seconds": seconds,
        }

    def _open(self) -> None:
        """Open metrics.jsonl, replay its losses, and drop steps that are repeated."""
        if self._opened:
            return
        self._opened = True
        iteration = get_args().iteration
        if writer := get_tensorboard_writer():
            _leave_out_repetitions(writer)
            if iteration:  # have TensorBoard drop later steps, as `SummaryWriter(purge_step=...)`
                start = Event(session_log=SessionLog(status=SessionLog.START))
                writer.file_writer.add_event(start, iteration + 1)
        for before in self._file.open(iteration):
            if before.get("lm_loss") is not None and not before.get("skipped"):
                self._follow(before["iteration"], before["lm_loss"])
            elif before["iteration"] == self._iteration:
                self._known.append(before)

    def _follow(self, iteration: int, lm_loss: float) -> None:
        self._spikes(lm_loss)
        self._divergence.add(iteration, lm_loss)

    def _draws(self, iteration: int) -> bool:
        """Return whether a heatmap of the step is due, and a writer exists."""
        args, interval = get_args(), get_args().head_heatmap_interval
        if not interval or (iteration % interval and iteration not in (1, args.train_iters)):
            return False
        return bool(get_tensorboard_writer() or get_wandb_writer())

    def _draw(self, writer: Any, wandb: Any = None) -> None:
        """Draw the heatmap of the newest step, unless it is drawn."""
        if self._newest is None:
            return
        (iteration, importance_LH), self._newest = self._newest, None
        title = f"head importance (mean gate), step {iteration}"
        table_LH = importance_LH.numpy().astype(np.float64)
        picture = importance_picture(table_LH, title, self._rows.blocks)
        if writer:
            writer.add_image(HEATMAP, picture, iteration, dataformats="HWC")
        if wandb:
            wandb.log({HEATMAP: wandb.Image(picture)}, iteration)

    def _write_scalars(self, iteration: int, scalars: dict[str, float]) -> None:
        if writer := get_tensorboard_writer():
            for name, value in scalars.items():
                writer.add_scalar(name, value, iteration)
        if scalars and (wandb := get_wandb_writer()):
            wandb.log(scalars, iteration)

    def _speed(self, record: dict[str, Any]) -> float:
        """Return tokens per second, as a moving average over log lines."""
        here, before = record["seconds"] / _tokens_of_step(), self._seconds_per_token
        self._seconds_per_token = here if before is None else 0.7 * before + 0.3 * here
        return float(1 / self._seconds_per_token)

    def _print(self, record: dict[str, Any], speed: float) -> None:
        args = get_args()
        left = (args.train_iters - record["iteration"]) * _tokens_of_step()
        parts = [f"megasink: step {record['iteration']}/{args.train_iters}"]
        if record["lm_loss"] is not None:
            parts.append(f"lm loss {record['lm_loss']:.4f}")
        if "imbalance" in record:
            parts.append(f"imbalance {record['imbalance']:.4f}")
            cells = ["-" if cv is None else f"{cv:.3f}" for cv in record["imbalance_per_layer"]]
            if "layers" in record:
                cells = [f"{n}: {cv}" for n, cv in zip(record["layers"], cells, strict=True)]
            parts.append(f"by layer {' '.join(cells)}")
        parts.append(f"{speed:,.0f} tokens/s")
        parts.append(f"eta {timedelta(seconds=int(left / speed))}")
        print(" | ".join(parts), flush=True)


def _tokens_of_step() -> int:
    """Return the tokens of the current step, which --step-batch-size-schedule changes."""
    return int(get_current_global_batch_size() * get_args().seq_length)


def _leave_out_repetitions(writer: Any) -> None:
    """Have TensorBoard drop the second copy of each of Megatron's scalars."""
    add = writer.add_scalar

    def add_scalar(tag: str, *args: Any, **kwargs: Any) -> None:
        if not tag.endswith(_AGAIN):
            add(tag, *args, **kwargs)

    writer.add_scalar = add_scalar


@contextlib.contextmanager
def writing_metrics(metrics: MetricsWriter) -> Iterator[None]:
    """Call the writer on every step and evaluation of Megatron's training loop."""
    originals = METRICS.originals()
    step_call = inspect.signature(training.training_log)
    evaluation_call = inspect.signature(training.evaluate_and_print_results)

    def training_log(*args: Any, **kwargs: Any) -> Any:
        metrics.step(step_call.bind(*args, **kwargs).arguments)
        return originals["training_log"](*args, **kwargs)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = originals["evaluate"](*args, **kwargs)
        metrics.evaluation(result[0])
        return result

    @functools.wraps(training.evaluate_and_print_results)
    def evaluate_and_print_results(prefix: str, *args: Any, **kwargs: Any) -> Any:
        call = evaluation_call.bind(prefix, *args, **kwargs).arguments
        split = "test" if prefix.endswith("on test set") else "valid"
        metrics.start_evaluation(split, int(call["iteration"]))
        return originals["evaluate_and_print_results"](prefix, *args, **kwargs)

    def save_checkpoint_and_time(*args: Any, **kwargs: Any) -> Any:
        metrics.flush()
        return originals["save_checkpoint_and_time"](*args, **kwargs)

    try:
        with METRICS.replacing(
            training_log=training_log,
            evaluate=evaluate,
            evaluate_and_print_results=evaluate_and_print_results,
            save_checkpoint_and_time=save_checkpoint_and_time,
        ):
            yield
    except Exception:
        metrics.close(failed=True)
        raise
    finally:
        metrics.close()


def stop_if_diverged(
    divergence: Divergence, nats: float, iteration: int, folder: str | None
) -> None:
    """End the run on all ranks if the rank that has the loss detects divergence."""
    # Performs one all-reduce. `divergence` is empty on other ranks.
    here = [-math.inf] * 4
    if divergence.exceeds(nats):
        # A maximum over ranks may drop a NaN.
        smoothed = divergence.smoothed if math.isfinite(divergence.smoothed) else math.inf
        here = [1.0, smoothed, divergence.lowest, float(divergence.lowest_step)]
    numbers = torch.tensor(here, dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(numbers, op=torch.distributed.ReduceOp.MAX)
    diverged, smoothed, lowest, lowest_step = numbers.tolist()
    if diverged < 0:
        return
    above = smoothed - lowest
    how = f"{smoothed:.3f} nats, {above:.3f} above" if math.isfinite(above) else "NaN or Inf, after"
    raise UserError(
        f"step {iteration}: {DIVERGES} (--stop-on-divergence {nats:g}): smoothed "
        f"over 50 steps it is {how} its lowest value {lowest:.3f} at step {lowest_step:.0f}. "
        f"{_advice(folder, int(lowest_step))}"
    )


def _advice(folder: str | None, step: int) -> str:
    before = [i for i in iterations(Path(folder)) if i <= step] if folder else []
    if not before:
        return "No checkpoint is older than that step: restart with a lower --lr"
    return (
        f"The newest checkpoint before that step is {before[-1]}: start a new run from it with "
        f"--load {folder} --ckpt-step {before[-1]} --override-opt-param-scheduler and a lower --lr"
    )
