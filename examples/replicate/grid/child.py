"""What a forked child does: become one rank of training, or one command."""

import atexit
import contextlib
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn


@dataclass(frozen=True)
class Task:
    """What a child runs.

    Attributes:
        words: flags of a rank, or a command of megasink with its flags.
        is_rank: whether it is a rank.
        logs: folder of stdout.log and stderr.log, which are appended to.
        threads: of torch.
    """

    words: Sequence[str]
    is_rank: bool
    logs: Path
    threads: int


def become(task: Task) -> NoReturn:
    """Run the task in this process, just forked, and end it with the task's exit code."""
    os.setsid()  # Ctrl-C reaches the grid alone, which tells its children
    atexit._clear()  # those are of the process that forked this one
    _redirect(task.logs)
    import torch

    torch.set_num_threads(task.threads)
    code = 1
    try:
        code = _train(task) if task.is_rank else _command(task)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        end_as_python_does(code)


def _train(task: Task) -> int:
    from megasink.training.pretrain import main

    os.environ |= {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",  # any free one: no other rank needs to know it
        **dict.fromkeys(("RANK", "LOCAL_RANK", "GROUP_RANK"), "0"),
        **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), "1"),
    }
    sys.argv = ["megasink.training", *task.words]  # starts.jsonl records it
    return main(task.words)


def _command(task: Task) -> int:
    from megasink.cli import main
    from megasink.training.watchdog import guard

    guard.start()  # it ends with the grid
    sys.argv = ["megasink", *task.words]
    return main(task.words)


def _redirect(logs: Path) -> None:
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for number, name in ((1, "stdout.log"), (2, "stderr.log")):
        file = os.open(logs / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(file, number)
        os.close(file)
    os.close(null)


def end_as_python_does(code: int) -> NoReturn:
    """End a fork; multiprocessing would skip the exit handlers, which release leases."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
