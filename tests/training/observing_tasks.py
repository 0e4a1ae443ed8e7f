"""Tasks for the workers: the trainer with a stand-in for W&B, and one that diverges."""

import importlib.machinery
import io
import sys
from contextlib import redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.distributed import launch_task


def train_with_wandb(flags: list[str], ranks: int, port: int) -> dict[str, Any]:
    """Train; what Megatron and the metrics writer gave to W&B on this rank.

    The package is not installed: a stand-in that takes every call is in its place, and Megatron
    sets it up as it does the real one.
    """
    wandb = mock.MagicMock()
    wandb.Image.side_effect = lambda picture: ("picture", picture.shape, str(picture.dtype))
    wandb.__spec__ = importlib.machinery.ModuleSpec("wandb", None)  # looked up before the start
    sys.modules["wandb"] = wandb  # not patch.dict, which forgets what is imported in between
    try:
        launch_task.train(flags, ranks, port)
    finally:
        del sys.modules["wandb"]
    calls = [call.args for call in wandb.log.call_args_list]
    logged: dict[str, list[tuple[int, Any]]] = {}
    for values, step in calls:
        for name, value in values.items():
            kept = value if isinstance(value, tuple) else float(value)
            logged.setdefault(name, []).append((step, kept))
    return {"logged": logged, "started": wandb.init.call_count, "steps": [s for _, s in calls]}


def lines_written(flags: list[str], ranks: int, port: int, late: bool) -> list[tuple[str, int]]:
    """Train; how many lines metrics.jsonl has after each step, and when a checkpoint begins.

    Args:
        late: Whether no value reaches the host before somebody waits for it.
    """
    from megatron.training import training

    from megasink.training.metric_records import HostCopy
    from megasink.training.metrics_writer import MetricsWriter

    metrics, found = Path(flags[flags.index("--run-dir") + 1], "metrics.jsonl"), []
    step, save = MetricsWriter.step, training.save_checkpoint

    def count(what: str) -> None:
        found.append((what, len(metrics.read_text().splitlines())))

    def counted_step(self: MetricsWriter, call: dict[str, Any]) -> None:
        step(self, call)
        count(f"step {call['iteration']}")

    def counted_save(iteration: int, *args: Any, **kwargs: Any) -> Any:
        count(f"save {iteration}")
        return save(iteration, *args, **kwargs)

    with (
        mock.patch.object(MetricsWriter, "step", counted_step),
        mock.patch.object(training, "save_checkpoint", counted_save),
        mock.patch.object(HostCopy, "is_here", not late),
    ):
        launch_task.train(flags, ranks, port)
    return found


def stopped(flags: list[str], ranks: int, port: int) -> tuple[str, str]:
    """Train until the run ends by itself: the kind of error and its text; empty for none."""
    try:
        launch_task.train(flags, ranks, port)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", ""


def log_lines(seconds: list[float], **args: int) -> list[str]:
    """What is printed after steps that took so long."""
    from megasink.training import metrics_writer

    said, writer = io.StringIO(), SimpleNamespace(_seconds_per_token=None)
    given = SimpleNamespace(**args)
    batch = mock.Mock(return_value=given.global_batch_size)
    with (
        mock.patch.object(metrics_writer, "get_args", return_value=given),
        mock.patch.object(metrics_writer, "get_current_global_batch_size", batch),
        redirect_stdout(said),
    ):
        for step, taken in enumerate(seconds, start=1):
            record = {"iteration": step, "lm_loss": 2.0, "seconds": taken}
            speed = metrics_writer.MetricsWriter._speed(writer, record)
            metrics_writer.MetricsWriter._print(writer, record, speed)
    return said.getvalue().splitlines()


def write_tokens(prefix: str, documents: int, length: int, tokens: int) -> None:
    """A data set of random documents."""
    import numpy as np
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.int32)
    for seed in range(documents):
        generator = torch.Generator().manual_seed(seed)
        document = torch.randint(tokens, (length,), generator=generator, dtype=torch.int32)
        builder.add_document(document, [length])
    builder.finalize(f"{prefix}.idx")
