"""``python -m tests.plan.hollow.server FOLDER``: forks for each task that stands on a line of
stdin.

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
from pathlib import Path
from typing import Any

from megasink.plan.helper import import_everything

_DEATH_SIGNAL = 1  # of prctl


def serve(folder: Path, answers: int) -> None:
    import_everything()
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
    module, function = task.split(":")
    found = getattr(importlib.import_module(f"tests.plan.hollow.{module}"), function)(**arguments)
    result.write_text(json.dumps(found))


if __name__ == "__main__":
    answers = os.dup(1)
    os.dup2(2, 1)  # what tasks print is for the log
    serve(Path(sys.argv[1]), answers)
