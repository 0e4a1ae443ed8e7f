"""Tasks for the workers: the trainer with an eye on its batches, and its parameter groups."""

import argparse
import contextlib
import ctypes
import io
import os
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

from tests.distributed import launch_task


def train_and_record(flags: list[str], ranks: int, port: int) -> dict[str, Any]:
    """Train; what the first microbatch of this rank was, and what became of the sink's row."""
    from megasink.cpu.prepare_process import prepare_process

    prepare_process()  # before the first import of megatron
    from megasink.training import forward_step

    found: dict[str, Any] = {}
    get_batch, loss_func = forward_step.get_batch, forward_step.loss_func
    step = forward_step.forward_step

    def recording_batch(*args: Any) -> dict[str, Any]:
        batch = get_batch(*args)
        if "tokens" not in found:
            kept = ("tokens", "labels", "loss_mask", "position_ids")
            found.update({k: None if batch[k] is None else batch[k].clone() for k in kept})
        return batch

    def recording_loss(*args: Any) -> Any:
        loss, count, report = loss_func(*args)
        found.setdefault("targets", int(count))
        return loss, count, report

    def recording_step(iterator: Any, model: Any) -> Any:
        for name, parameter in model.named_parameters():
            if name.endswith("word_embeddings.weight"):
                row = parameter[-1].detach().clone()
                found["rows"] = len(parameter)
                found.setdefault("first_row", row)
                found["sink_row_moved"] = float((row - found["first_row"]).abs().max())
        return step(iterator, model)

    forward_step.get_batch, forward_step.loss_func = recording_batch, recording_loss
    forward_step.forward_step = recording_step
    try:
        launch_task.train(flags, ranks, port)
    finally:
        forward_step.get_batch, forward_step.loss_func = get_batch, loss_func
        forward_step.forward_step = step
    found.pop("first_row", None)
    return found


def train_and_list(flags: list[str], ranks: int, port: int) -> list[list[int]]:
    """Train; the first token of each sample that this rank reads, by microbatch."""
    from megasink.cpu.prepare_process import prepare_process

    prepare_process()
    from megasink.training import forward_step

    found: list[list[int]] = []

    def recording(*args: Any) -> dict[str, Any]:
        batch = get_batch(*args)
        found.append(batch["tokens"][:, 0].tolist())
        return batch

    get_batch = forward_step.get_batch
    with mock.patch.object(forward_step, "get_batch", recording):
        launch_task.train(flags, ranks, port)
    return found


def train_as_started(
    flags: list[str], ranks: int, port: int, variables: dict[str, str]
) -> tuple[int, int] | None:
    """Train as the launcher starts it; how often the line was parsed, and how often checked."""
    if os.environ["POOL_RANK"] != "0":
        return None
    from megasink.cpu.prepare_process import prepare_process

    prepare_process()
    from megasink.training.checks import all_checks

    parse = argparse.ArgumentParser._parse_known_args
    with (
        mock.patch.object(
            *(argparse.ArgumentParser, "_parse_known_args"), autospec=True, side_effect=parse
        ) as parsed,
        mock.patch.object(all_checks, "problems", wraps=all_checks.problems) as checked,
        mock.patch.dict(os.environ, variables),
    ):
        launch_task.train(flags, ranks, port)
    return parsed.call_count, checked.call_count


def train_and_weigh(
    flags: list[str], ranks: int, port: int, available: float = 1e12
) -> dict[str, float]:
    """Train; the resident memory that saving and loading a checkpoint add at their peak.

    The least of the run's saves, in bytes for each parameter of this rank's shard of the model.

    Args:
        available: bytes that the host is said to have left.
    """
    from megasink.cpu.prepare_process import prepare_process

    prepare_process()
    from megatron.training import training

    from megasink.training import checkpoint_writer

    found: dict[str, list[float]] = {}

    def resident(name: str) -> int:
        (_, line) = Path("/proc/self/status").read_text().split(f"{name}:")
        return 1024 * int(line.split()[0])

    def weighed(name: str, models: int, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            number = sum(p.numel() for model in args[models] for p in model.parameters())
            ctypes.CDLL(None).malloc_trim(0)  # what is free already would hide the peak
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
            before = resident("VmRSS")
            result = function(*args, **kwargs)
            found.setdefault(name, []).append((resident("VmHWM") - before) / number)
            return result

        return call

    save, load = training.save_checkpoint, training.load_checkpoint
    with (
        mock.patch.object(training, "save_checkpoint", weighed("save", 1, save)),
        mock.patch.object(training, "load_checkpoint", weighed("load", 0, load)),
        mock.patch.object(checkpoint_writer, "available", return_value=available),
    ):
        launch_task.train(flags, ranks, port)
    # What else the process allocates can only add to a peak.
    return {name: min(peaks) for name, peaks in found.items()}


def ends_of_splits(splits: list[str]) -> list[list[float]]:
    """Where the parts of data sets end by Megatron, from 0, as shares."""
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    found = []
    for split in splits:
        ends = [0.0]
        for part in convert_split_vector_to_split_matrix(parse_and_normalize_split(split)):
            assert part is None or part[0] == ends[-1]
            ends.append(ends[-1] if part is None else part[1])
        found.append(ends)
    return found


def analyzed_samples(command_lines: list[list[str]]) -> list[dict[str, Any]]:
    """The samples of a run that `megasink analyze` would measure, and what it says and records."""
    from megasink.analysis.capture.input_samples import inputs_of
    from megasink.analysis.open_model import open_checkpoint
    from megasink.analysis.ranks import Ranks
    from megasink.cli.analyze import analyze_parser, check

    found = []
    for argv in command_lines:
        args = analyze_parser("analyze").parse_args(argv)
        which, options = check(args)
        with contextlib.redirect_stderr(io.StringIO()) as errors:
            inputs = inputs_of(options, open_checkpoint(which, None, Ranks()))
        found.append(
            {
                "tokens": [list(sample.tokens) for sample in inputs.samples],
                "replaced": [sample.replaced for sample in inputs.samples],
                "positions": inputs.facts.replaced_positions,
                "with": inputs.facts.replaced_with,
                "said": errors.getvalue(),
            }
        )
    return found


def groups_of_the_trainer(
    distributed: bool,
    lr_mult: float,
    weight_decay: float,
    decay_all: bool = False,
    embedding_lr: float | None = None,
    output_lr: float | None = None,
    **options: Any,
) -> list[dict[str, Any]]:
    """The parameter groups of the optimizer that the training loop would build."""
    from megatron.core.optimizer import get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training import training

    from megasink.training.optimizer_groups import grouping_sink_parameters
    from tests.distributed import tiny_gpt

    before = training.get_megatron_optimizer_config
    config = tiny_gpt.model_config(**options)
    models = tiny_gpt.build(config, use_distributed_optimizer=distributed)
    args = Namespace(
        optimizer="adam",
        lr=1e-3,
        min_lr=1e-4,
        weight_decay=0.1,
        bf16=config.transformer.bf16,
        params_dtype=config.transformer.params_dtype,
        use_distributed_optimizer=distributed,
        sink_lr_mult=lr_mult,
        sink_weight_decay=weight_decay,
        decay_all_parameters=decay_all,
        embedding_lr=embedding_lr,
        output_lr=output_lr,
    )
    with grouping_sink_parameters():
        optimizer_config, overrides = training.get_megatron_optimizer_config(args)
    assert training.get_megatron_optimizer_config is before
    optimizer = get_megatron_optimizer(optimizer_config, models, config_overrides=overrides)
    schedule = {"init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "linear"}
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 10, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(
        optimizer, lr_warmup_steps=2, lr_decay_steps=10, **schedule, **decay
    )
    rates: list[list[float]] = [[] for _ in optimizer.param_groups]
    for _ in range(10):
        scheduler.step(1)
        for index, group in enumerate(optimizer.param_groups):
            rates[index].append(group["lr"])
    elements = sum(p.numel() for m in models for n, p in m.named_parameters() if "core_att" in n)
    return [
        {
            "elements": sum(p.numel() for p in group["params"]),
            "elements_of_sinks": elements,
            "weight_decay": group["weight_decay"],
            "highest": max(rate),
            "last": rate[-1],
            "logged": group["default_config"],
            "dtypes": sorted({str(p.dtype) for p in group["params"]}),
        }
        for group, rate in zip(optimizer.param_groups, rates, strict=True)
    ]
