"""Per-step statistics into Megatron's log line, TensorBoard and metrics.jsonl.

Megatron 0.19 has no per-step callback. It calls ``training_log`` on every rank after every step
and ``evaluate`` for every evaluation (megatron/training/training.py:3985,4408): they are wrapped,
and not changed.
"""

import contextlib
import inspect
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

import torch
from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

from megasink.balance.attach import HeadBalanceScale
from megasink.balance.tracker import HeadStatistics, HeadTracker
from megasink.train.forward import BITS_PER_BYTE, LM_LOSS

BALANCE_LOSS = "head balance loss"
IMBALANCE = "head imbalance"


class Observer:
    """Writes what a step did. The last rank owns the writers, as in Megatron.

    Args:
        metrics: path of metrics.jsonl; None to write none. On resume, lines of steps that are run
            again are dropped from it.
    """

    def __init__(self, metrics: Path | None):
        args = get_args()
        self._owner = args.rank == args.world_size - 1
        self._path = metrics if self._owner else None
        self._file: TextIO | None = None
        self._clock = time.perf_counter()
        self._mean_seconds: float | None = None
        self._iteration = 0

    def step(self, call: dict[str, Any]) -> None:
        """Before Megatron logs a step: reduce the statistics and add them to its losses."""
        args = get_args()
        coeff = args.head_balance_coeff * HeadBalanceScale.warmup()
        statistics = HeadTracker.finish_step(coeff, args.head_balance_scope)
        self._iteration = int(call["iteration"])
        if not self._owner:
            return
        losses = call["loss_dict"]
        if statistics is not None and bool(statistics.importance_LH.isnan().all()):
            statistics = None
        lm_loss = float(losses[LM_LOSS]) if LM_LOSS in losses else None
        if statistics is not None:
            # From here Megatron prints and writes them as it does the language model's loss.
            losses[BALANCE_LOSS] = statistics.balance_loss.reshape(1)
            losses[IMBALANCE] = statistics.imbalance.reshape(1)
        record = {
            "iteration": self._iteration,
            "lm_loss": lm_loss,
            "learning_rate": call["learning_rate"],
            "grad_norm": _number(call["grad_norm"]),
            "skipped": int(call["skipped_iter"]),
            "consumed_samples": args.consumed_train_samples,
            "tokens": args.consumed_train_samples * args.seq_length,
            "seconds": self._seconds(),
        }
        logs = self._iteration % args.log_interval == 0 or self._iteration == args.train_iters
        if statistics is not None:
            record |= self._heads(statistics, logs)
        self._write(record)
        if logs:
            self._print(record)

    def evaluation(self, split: str, losses: dict[str, Any] | None) -> None:
        """After an evaluation on a split: its loss and bits per byte."""
        if not self._owner or not losses:
            return
        record = {"iteration": self._iteration, f"{split}_lm_loss": _number(losses.get(LM_LOSS))}
        if BITS_PER_BYTE in losses:
            record[f"{split}_bits_per_byte"] = _number(losses[BITS_PER_BYTE])
        self._write(record)

    def close(self) -> None:
        """Close metrics.jsonl."""
        if self._file is not None:
            self._file.close()

    def _heads(self, statistics: HeadStatistics, logs: bool) -> dict[str, Any]:
        importance, per_layer = statistics.importance_LH.cpu(), statistics.imbalance_L.cpu()
        record: dict[str, Any] = {
            "balance_loss": _number(statistics.balance_loss),
            "imbalance": _number(statistics.imbalance),
            "imbalance_per_layer": _rounded(per_layer),
        }
        if logs:
            record["importance"] = _rounded(importance)
        if self._iteration % get_args().tensorboard_log_interval == 0:
            self._write_scalars(importance, per_layer)
        return record

    def _write_scalars(self, importance: torch.Tensor, per_layer: torch.Tensor) -> None:
        scalars = {}
        for layer, heads in enumerate(importance):
            scalars[f"head imbalance by layer/{layer}"] = float(per_layer[layer])
            scalars[f"head importance mean by layer/{layer}"] = float(heads.mean())
            scalars[f"head importance min by layer/{layer}"] = float(heads.min())
            scalars[f"head importance max by layer/{layer}"] = float(heads.max())
        if writer := get_tensorboard_writer():
            for name, value in scalars.items():
                writer.add_scalar(name, value, self._iteration)
        if wandb := get_wandb_writer():
            wandb.log(scalars, self._iteration)

    def _seconds(self) -> float:
        now = time.perf_counter()
        seconds, self._clock = now - self._clock, now
        return seconds

    def _print(self, record: dict[str, Any]) -> None:
        args = get_args()
        seconds = record["seconds"]
        mean = seconds if self._mean_seconds is None else 0.7 * self._mean_seconds + 0.3 * seconds
        self._mean_seconds = mean
        left = mean * (args.train_iters - self._iteration)
        parts = [f"megasink: step {self._iteration}/{args.train_iters}"]
        if record["lm_loss"] is not None:
            parts.append(f"lm loss {record['lm_loss']:.4f}")
        if "imbalance" in record:
            parts.append(f"imbalance {record['imbalance']:.4f}")
            by_layer = " ".join(f"{cv:.3f}" for cv in record["imbalance_per_layer"])
            parts.append(f"by layer {by_layer}")
        parts.append(f"{args.global_batch_size * args.seq_length / mean:,.0f} tokens/s")
        parts.append(f"eta {int(left // 3600)}:{int(left % 3600 // 60):02}:{int(left % 60):02}")
        print(" | ".join(parts), flush=True)

    def _write(self, record: dict[str, Any]) -> None:
        if self._path is None:
            return
        if self._file is None:
            _drop_after(self._path, get_args().iteration)
            self._file = self._path.open("a")
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()


def _drop_after(path: Path, iteration: int) -> None:
    """Keep the lines up to the iteration that training goes on from: it is run again."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text().splitlines():
        with contextlib.suppress(ValueError, KeyError):  # a line cut short by a kill
            if json.loads(line)["iteration"] <= iteration:
                kept.append(line + "\n")
    partial = path.with_suffix(".partial")
    partial.write_text("".join(kept))
    partial.replace(path)


def _number(value: Any) -> float | None:
    if value is None:
        return None
    number = float(value)
    return number if math.isfinite(number) else None


def _rounded(tensor: torch.Tensor) -> list[Any]:
    """Six digits are more than a gate's mean is known to, and half the bytes."""
    values: list[Any] = tensor.double().tolist()
    if tensor.dim() > 1:
        return [_rounded(row) for row in tensor]
    return [float(f"{value:.6g}") for value in values]


@contextlib.contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """Let the observer see every step and every evaluation of Megatron's training loop."""
    originals = {
        name: getattr(training, name)
        for name in ("training_log", "evaluate", "evaluate_and_print_results")
    }
    signature = inspect.signature(originals["training_log"])
    split = "valid"

    def training_log(*args: Any, **kwargs: Any) -> Any:
        observer.step(signature.bind(*args, **kwargs).arguments)
        return originals["training_log"](*args, **kwargs)

    def evaluate(*args: Any, **kwargs: Any) -> Any:
        result = originals["evaluate"](*args, **kwargs)
        observer.evaluation(split, result[0])
        return result

    def evaluate_and_print_results(prefix: str, *args: Any, **kwargs: Any) -> Any:
        nonlocal split
        split = "test" if prefix.endswith("on test set") else "valid"
        return originals["evaluate_and_print_results"](prefix, *args, **kwargs)

    training.training_log = training_log
    training.evaluate = evaluate
    training.evaluate_and_print_results = evaluate_and_print_results
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(training, name, original)
        observer.close()
