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
from megasink.cpu.process import prepare_process
from megasink.errors import ConfigError, UserError
from megasink.files.system_errors import explained
from megasink.megatron.arguments import parse_apart
from megasink.training.parent import ends_with

ANSWER = "answer.json"


def main() -> None:
    """Serve until stdin ends."""
    answers, folder, parent = os.dup(1), Path(sys.argv[1]), os.getpid()
    os.dup2(2, 1)  # the trainer's output goes to the log
    plugins.load(sys.argv[2:])
    import_everything()
    for line in sys.stdin:
        (folder / ANSWER).unlink(missing_ok=True)
        child = os.fork()
        if child == 0:
            if not ends_with(parent):
                os._exit(1)
            _serve(folder / ANSWER, **json.loads(line))
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


def _serve(answer: Path, rank: int, ranks: int | None, flags: list[str]) -> None:
    """Answer in this fork, and end it."""
    from megasink.plan.rank import step_as

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


def import_everything() -> None:
    """Import and start what a rank needs, so that its fork has it: Megatron and CUDA."""
    warnings.simplefilter("ignore")
    prepare_process()
    from megasink.plan import packages

    packages.stand_in()
    import megatron.core.tokenizers.text.libraries
    import megatron.training.ft_integration  # noqa: F401
    import torch
    from triton.runtime.cache import triton_key

    from megasink.cpu.table import TABLE
    from megasink.megatron import model_of_arguments as model  # noqa: F401
    from megasink.plan import rank  # noqa: F401

    # These would take most of the time of each fork.
    parse_apart([])
    for patch in TABLE:
        patch.where()
    triton_key()
    # torch refuses to start in a fork, which would lose a driver. This one has nothing to lose.
    torch.cuda._queued_calls.clear()  # they query the device, which forks may choose
    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False
    gc.collect()
    gc.freeze()


if __name__ == "__main__":
    main()
