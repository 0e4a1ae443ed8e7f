"""Task: run scenarios with one replacement of the platform undone, each in a forked child.

A child may do what it likes to its process: crash it, start CUDA, leave half a process group.
"""

import functools
import importlib
import os
import pickle
import signal
import traceback
from collections.abc import Callable
from typing import Any

SECONDS = 600


def registered() -> tuple[set[str], set[str]]:
    """The targets of all replacements; and those of them that factories.py calls."""
    _prepare()
    from megasink.upstream.patch_register import active
    from tests.cpu import factories

    replaced = [r for r in active() if r.patch.test == "tests/cpu/test_patches.py"]
    replaced += [r for r in active("platform") if r.patch.name == "tensor factories"]
    called = {r.target for r in replaced if factories.call_of(r) is not None}
    return {r.target for r in replaced}, called


def probe(jobs: list[tuple[str | None, str]]) -> dict[tuple[str | None, str], tuple[bool, Any]]:
    """Run this worker's half of the jobs.

    Args:
        jobs: (replacement to undo, None for none; scenario).

    Returns:
        {job: (True, what the scenario returned) or (False, how it failed)}.
    """
    _prepare()
    share = jobs[int(os.environ["POOL_RANK"]) :: 2]
    return {job: _in_a_child(functools.partial(_run, *job)) for job in share}


def alone(name: str) -> Any:
    """Run another task in a fork of this process, which imports torch and nothing else for it."""
    import torch  # noqa: F401

    module, function = name.split(":")
    succeeded, answer = _in_a_child(lambda: getattr(importlib.import_module(module), function)())
    if not succeeded:
        raise RuntimeError(answer)
    return answer


def _prepare() -> None:
    """Activate the platform and import once here what every child needs."""
    from megasink import cpu

    cpu.activate()
    from megasink.upstream.apply_fixes import fix_upstream  # imports Megatron

    fix_upstream()
    for module in (
        "megatron.training.training",
        "megatron.core.tokenizers.text",
        "torch.utils.tensorboard",
        "tests.distributed.checkpoint_tasks",
        "tests.cpu.scenarios",
    ):
        importlib.import_module(module)


def _in_a_child(call: Callable[[], Any]) -> tuple[bool, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        try:
            answer: tuple[bool, Any] = (True, call())
        except BaseException:
            answer = (False, traceback.format_exc())
        with os.fdopen(writing, "wb") as pipe:
            pickle.dump(answer, pipe)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        data = pipe.read()
    _, status = os.waitpid(pid, 0)
    return pickle.loads(data) if data else (False, f"the process ended with status {status}")


def _run(target: str | None, scenario: str) -> Any:
    from megasink.upstream.patch_register import active
    from tests.cpu import scenarios

    if target is not None:
        (replacement,) = (r for r in active() if r.target == target)
        replacement.undo()
    return getattr(scenarios, scenario)()
