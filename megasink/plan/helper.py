"""``python -m megasink.plan.helper FOLDER``: fork once for each rank requested on stdin.

Runs on the hollow GPU. A request is a line of JSON: rank, ranks, flags. The fork writes its answer,
or the refusal, to FOLDER/answer.json, and its exit code appears on stdout.
"""

import contextlib
import gc
import json
import os
import sys
import traceback
import warnings
from pathlib import Path
from typing import Any

from megasink import plugins
from megasink.cpu.prepare_process import prepare_process
from megasink.errors import ConfigError, UserError
from megasink.files.system_errors import explained
from megasink.training.die_with_parent import ends_with

ANSWER = "answer.json"


def main() -> None:
    """Serve until stdin ends."""
    answers, folder, parent = os.dup(1), Path(sys.argv[1]), os.getpid()
    os.dup2(2, 1)  # the trainer's output goes to the log
    plugins.load(sys.argv[2:])
    rank = import_everything()
    for line in sys.stdin:
        (folder / ANSWER).unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            if not ends_with(parent):
                os._exit(1)
            _serve(rank.step_as, folder / ANSWER, **json.loads(line))
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _serve(step_as: Any, answer: Path, rank: int, ranks: int | None, flags: list[str]) -> None:
    """Answer in this fork, and end it."""

    def write(record: dict[str, Any]) -> None:
        answer.write_text(json.dumps(record))

    code = 1
    try:
        step_as(rank, ranks, flags, write)
    except BaseException as error:
        if line := str(error) if isinstance(error, UserError) else explained(error):
            write({"problems": error.problems if isinstance(error, ConfigError) else [line]})
            code = 0
        else:
            traceback.print_exc()
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(code)


def import_everything() -> Any:
    """Import and start what a rank needs, so that its fork has it; return `rank_step`."""
    warnings.simplefilter("ignore")
    prepare_process(forks=True)
    from megasink.plan import package_stand_ins

    package_stand_ins.stand_in()
    from megasink.plan import rank_step

    rank_step.warm_up()
    gc.collect()
    gc.freeze()
    return rank_step


if __name__ == "__main__":
    main()
