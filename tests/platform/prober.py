"""Task: run scenarios with one replacement of the platform undone, each in a forked child.

A child may do what it likes to its process: crash it, start CUDA, leave half a process group.
"""

import importlib
import os
import pickle
import signal
import traceback
from typing import Any

SECONDS = 600


def registered() -> tuple[set[str], set[str]]:
    """The targets of all replacements; and those of them that factories.py calls."""
    _prepare()
    from megasink import platform
    from tests.platform import factories

    patches = platform.patches()
    called = {p.target for p in patches if factories.call_of(p) is not None}
    return {patch.target for patch in patches}, called


def probe(jobs: list[tuple[str | None, str]]) -> dict[tuple[str | None, str], tuple[bool, Any]]:
    """Run this worker's half of the jobs.

    Args:
        jobs: (replacement to undo, None for none; scenario).

    Returns:
        {job: (True, what the scenario returned) or (False, how it failed)}.
    """
    _prepare()
    share = jobs[int(os.environ["POOL_RANK"]) :: 2]
    return {job: _in_a_child(*job) for job in share}


def _prepare() -> None:
    """Activate the platform and import once here what every child needs."""
    from megasink import platform
    from megasink.compat import mend_upstream

    platform.activate()
    mend_upstream()
    for module in (
        "megatron.training.training",
        "megatron.core.tokenizers.text",
        "torch.utils.tensorboard",
        "tests.distributed.checkpoint_tasks",
        "tests.platform.scenarios",
    ):
        importlib.import_module(module)


def _in_a_child(target: str | None, scenario: str) -> tuple[bool, Any]:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        signal.alarm(SECONDS)
        try:
            answer: tuple[bool, Any] = (True, _run(target, scenario))
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
    from megasink import platform
    from tests.platform import scenarios

    if target is not None:
        (patch,) = (patch for patch in platform.patches() if patch.target == target)
        patch.undo()
    return getattr(scenarios, scenario)()
