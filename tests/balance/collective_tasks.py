"""Tasks for the workers: every collective of a training step, seen where torch dispatches it."""

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.balance.tracker import HeadTracker
from megasink.layers.importance import HeadCounter
from tests.balance.collective_sizes import LAYERS
from tests.distributed import tiny_gpt
from tests.distributed.worker import forget


class Collectives(TorchDispatchMode):
    """Counts (operation, bytes, ranks) of every message between ranks, backward included."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[tuple[str, int, int]] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func.namespace == "c10d":
            tensors = args[0] if isinstance(args[0], list | tuple) else [args[0]]
            group = next(ProcessGroup.unbox(x) for x in args if isinstance(x, torch.ScriptObject))
            size = sum(x.nbytes for x in tensors if torch.is_tensor(x))
            self.found[func.name().removeprefix("c10d::"), size, group.size()] += 1
        return func(*args, **(kwargs or {}))


def step_counts(**options: Any) -> list[Any]:
    """What a step with the balance loss sends beside what one without it does, as triples."""
    ours = _counts(**options)
    with _without_balance():
        others = _counts(**options)
    assert not others - ours, "a step without the loss sends nothing that one with it does not"
    return sorted((*what, count) for what, count in (ours - others).items())


def _counts(**options: Any) -> Counter[tuple[str, int, int]]:
    config = tiny_gpt.model_config(num_layers=LAYERS, **options)
    transformer = config.transformer
    models = tiny_gpt.build(config)
    optimizer, _ = tiny_gpt.optimizer_of(config, models, distributed=False)
    transformer.grad_scale_func = optimizer.scale_loss
    with Collectives() as collectives:
        for step in range(2):
            collectives.found.clear()  # the second step counts: the first one sets things up
            tiny_gpt.run_step(models, optimizer, step)
            optimizer.step()
            tiny_gpt.statistics(transformer)
    return collectives.found


@contextmanager
def _without_balance() -> Iterator[None]:
    forward, start = HeadCounter.forward, HeadTracker.start_reduction
    HeadCounter.forward = lambda self, out_SBX, *_, **__: out_SBX
    HeadTracker.start_reduction = lambda *_, **__: None
    try:
        yield
    finally:
        HeadCounter.forward, HeadTracker.start_reduction = forward, start


class _Recorded:
    """The handle of a collective that says when it is awaited."""

    def __init__(self, work: Any, name: str, events: list[str]):
        self._work, self._name, self._events = work, name, events

    def wait(self) -> Any:
        self._events.append(f"{self._name} awaited")
        return self._work.wait()


def order_of_events(flags: list[str], ranks: int, port: int) -> list[str]:
    """What a rank does in the steps of a run of the trainer, in order."""
    from megatron.core.optimizer.optimizer import FP32Optimizer
    from megatron.core.pipeline_parallel import schedules

    from megasink.layers import finalize
    from tests.distributed.launch_task import train

    events: list[str] = []
    all_reduce = torch.distributed.all_reduce

    def recorded(*args: Any, **kwargs: Any) -> Any:
        work = all_reduce(*args, **kwargs)
        caller = sys._getframe(1).f_globals["__name__"]
        if not caller.startswith("megasink.balance."):
            return work
        name = caller.removeprefix("megasink.balance.")
        assert kwargs["async_op"], "nothing of the balance loss may block"
        events.append(f"{name} started")
        return _Recorded(work, name, events)

    watched = [
        (schedules, "forward_step", "forward"),
        (schedules, "backward_step", "backward"),
        (finalize, "finalize_upstream", "gradients"),
        (FP32Optimizer, "step", "optimizer"),
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
    """One rank of a large world by Megatron's fake process group; each worker takes another one.

    Returns:
        collectives of the run as quadruples, and its metrics.jsonl (of the last rank).
    """
    from megasink.train.pretrain import prepare_process, pretrain

    mine = (
        ranks[int(os.environ["POOL_RANK"])] if int(os.environ["POOL_RANK"]) < len(ranks) else None
    )
    if mine is None:
        return None
    numbers = {"RANK": mine, "LOCAL_RANK": 0, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": 8}
    os.environ.update({name: str(value) for name, value in numbers.items()})
    prepare_process([])
    try:
        with Collectives() as collectives:
            pretrain([*flags, "--fake-process-group"])
    finally:
        forget()
    return sorted((*what, count) for what, count in collectives.found.items())
