"""``python -m tests.hollow.server FOLDER``: forks for each task that stands on a line of stdin.

FOLDER/result gets what the task returned; its exit code is the answer on stdout. What it prints
goes to stderr. The server ends with its stdin.
"""

import contextlib
import ctypes
import importlib
import json
import os
import signal
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

_DEATH_SIGNAL = 1  # of prctl


def serve(folder: Path, answers: int) -> None:
    _import_everything()
    for line in sys.stdin:
        (folder / "result").unlink(missing_ok=True)
        os.ftruncate(2, 0)
        os.lseek(2, 0, os.SEEK_SET)
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
            code = 1
            try:
                _run(folder / "result", **json.loads(line))
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                with contextlib.suppress(OSError):
                    sys.stderr.flush()
                os._exit(code)
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _run(result: Path, task: str, arguments: dict[str, Any]) -> None:
    import torch

    torch.cuda._is_in_bad_fork = lambda: False
    module, function = task.split(":")
    found = getattr(importlib.import_module(f"tests.hollow.{module}"), function)(**arguments)
    result.write_text(json.dumps(found))


def _import_everything() -> None:
    import gc

    warnings.simplefilter("ignore")
    from megasink.process import prepare_process

    prepare_process([])
    import megatron.core.tokenizers.text.libraries
    import megatron.training.ft_integration  # noqa: F401
    import torch
    from megatron.training.argument_utils import ArgumentGroupFactory

    from megasink.checkpoint import model  # noqa: F401
    from megasink.hollow import events, world  # noqa: F401
    from megasink.parser import parse_apart
    from megasink.train import (  # noqa: F401
        arguments,
        checkpoint_writer,
        dataset,
        evaluation,
        foreign,
        forward,
        keep_checkpoints,
        live_analysis,
        observer,
        optimizer,
        pretrain,
    )
    from megasink.upstream.table import TABLE

    # What would take most of the time of each fork.
    texts = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}
    ArgumentGroupFactory._get_field_docstrings = lambda self, options: (
        known.get(options) or known.setdefault(options, texts(self, options))
    )
    parse_apart([])
    for patch in TABLE:
        patch.where()
    # torch refuses to begin in a fork, where a driver would be lost. This one has nothing to lose.
    torch.cuda._queued_calls.clear()  # which ask what the device is; tasks choose it
    torch.cuda.init()
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # what tasks print is for the log
    serve(Path(sys.argv[1]), answers)
