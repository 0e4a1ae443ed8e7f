"""Tasks for the workers: the trainer, watched. It imports Megatron, and nothing before it may."""

import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from tests.balance.collectives import Collectives
from tests.distributed.worker import forget


class _Recorded:
    """The handle of a collective that says when it is awaited."""

    def __init__(self, work: Any, name: str, events: list[str]):
        self._work, self._name, self._events = work, name, events

    def wait(self) -> Any:
        self._events.append(f"{self._name} awaited")
        return self._work.wait()


def order_of_events(flags: list[str], ranks: int, port: int) -> list[str]:
    """What a rank does in the steps of a run of the trainer, in order."""
    from megasink.cpu.prepare_process import prepare_process

    prepare_process()
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.pipeline_parallel import schedules
    from megatron.training import training

    from tests.distributed.launch_task import train

    events: list[str] = []
    all_reduce = torch.distributed.all_reduce

    def recorded(*args: Any, **kwargs: Any) -> Any:
        work = all_reduce(*args, **kwargs)
        caller = sys._getframe(1).f_globals["__name__"]
        if not caller.startswith("megasink.balance."):
            return work
        file = caller.removeprefix("megasink.balance.")
        name = {"layer_loss": "layer", "gate_sums": "sums"}.get(file, file)
        assert kwargs["async_op"], "nothing of the balance loss may block"
        events.append(f"{name} started")
        return _Recorded(work, name, events)

    watched = [
        (schedules, "forward_step", "forward"),
        (schedules, "backward_step", "backward"),
        (training, "finalize_model_grads", "gradients"),
        (FP32Optimizer, "step_with_ready_grads", "optimizer"),
    ]
    originals = [getattr(owner, name) for owner, name, _ in watched]
    torch.distributed.all_reduce = recorded
    for (owner, name, text), original in zip(watched, originals, strict=True):
        setattr(owner, name, _between(original, text, events))
    try:
        train(flags, ranks, port)
    finally:
        torch.distributed.all_reduce = all_reduce
        for (owner, name, _), original in zip(watched, originals, strict=True):
            setattr(owner, name, original)
    return events


def _between(function: Callable[..., Any], text: str, events: list[str]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        events.append(f"{text} begins")
        try:
            return function(*args, **kwargs)
        finally:
            events.append(f"{text} ends")

    return watched


def one_of_many(flags: list[str], ranks: list[int], world: int) -> Any:
    """One rank of a large world, by Megatron's fake process group; each worker takes another."""
    from megasink.cpu.prepare_process import prepare_process
    from megasink.training.pretrain import pretrain

    mine = ranks[int(os.environ["POOL_RANK"])]
    numbers = {"RANK": mine, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": 8}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    prepare_process()
    try:
        with Collectives() as collectives:
            pretrain([*flags, "--fake-process-group"])
    finally:
        forget()
    return sorted((*what, count) for what, count in collectives.found.items())
