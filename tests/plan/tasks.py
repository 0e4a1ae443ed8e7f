"""Tasks for a gloo worker: a model built on the CPU, and a step of it."""

import os
from typing import Any
from unittest import mock

from megatron.core.pipeline_parallel import schedules
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training import training

from megasink.megatron.model import MegasinkGPTBuilder
from megasink.megatron.model_of_arguments import model_config
from megasink.plan.saved import SavedTensors
from megasink.training import arguments
from tests.distributed import launch_task


def number_of_parameters(flags: list[str]) -> int:
    """Of the whole model on one rank, padding of the vocabulary included."""
    with mock.patch.dict(os.environ, {"RANK": "0", "WORLD_SIZE": "1"}):
        args, _ = arguments.parse(flags)
    config = model_config(args)
    config.finalize()
    model = MegasinkGPTBuilder(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
    )
    return sum(parameter.numel() for parameter in model.parameters())


def saved_by_a_step(flags: list[str], ranks: int, port: int) -> list[dict[str, Any]]:
    """What the modules save for backward in the second of three steps, which compute.

    A step ends where the next begins: what is logged of it is held until then.
    """
    inner, forward = training.train_step, schedules.forward_step
    steps: list[SavedTensors | None] = []
    found: list[dict[str, Any]] = []

    def train_step(*arguments: Any, **options: Any) -> Any:
        steps.append(SavedTensors(arguments[2], "cpu") if len(steps) == 1 else None)
        if len(steps) == 3 and steps[1] is not None:
            found.extend(steps[1].table(1))
        if (saved := steps[-1]) is None:
            return inner(*arguments, **options)

        def forward_step(*args: Any, **kwargs: Any) -> Any:
            with saved.watching():
                return forward(*args, **kwargs)

        with saved, mock.patch.object(schedules, "forward_step", forward_step):
            return inner(*arguments, **options)

    with mock.patch.object(training, "train_step", train_step):
        launch_task.train(flags=[*flags, "--train-iters", "3"], ranks=ranks, port=port)
    return found
