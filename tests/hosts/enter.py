"""``python -m tests.hosts.enter REQUEST``: become torchrun's agent on a host, without imports.

The fork server has imported everything, so a case takes the time of its steps. The example script
runs first, by bash, with a stand-in for Python that writes down what it would start.
"""

import ctypes
import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from tests.forkserver_main import become
from tests.training.hosts import SETUP

# "$@" is `-m megasink.training.multi_host_torchrun ...`, or another module.
_PYTHON = """#!/bin/bash
if [ "$2" = megasink.training.multi_host_torchrun ]; then
  printf '%s\\0' "${@:2}" > "$MEGASINK_TEST_LINE"; env -0 > "$MEGASINK_TEST_LINE.env"
else
  exec PYTHON "$@"
fi
"""
_NAMESPACES = os.CLONE_NEWPID | os.CLONE_NEWUTS | os.CLONE_NEWNS
_DEATH_SIGNAL = 1


def main() -> None:
    """Enter the namespaces of a host, and go on there as the first process."""
    request = json.loads(Path(sys.argv[1]).read_text())
    with Path("/run/netns", request["space"]).open() as space:
        os.setns(space.fileno(), os.CLONE_NEWNET)
    os.unshare(_NAMESPACES)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    ctypes.CDLL(None).prctl(_DEATH_SIGNAL, signal.SIGKILL)
    _go_on(request)


def _go_on(request: dict) -> None:
    folder = Path(request["folder"])
    python, line = folder / "python", folder / "line"
    python.write_text(_PYTHON.replace("PYTHON", sys.executable))
    python.chmod(0o755)
    environment = request["environment"] | {"PYTHON": str(python), "MEGASINK_TEST_LINE": str(line)}
    own = "mount --make-rprivate /; mount -t proc proc /proc; "
    words = ["bash", "-c", own + SETUP, "host", request["name"], request["names"], request["setup"]]
    code = subprocess.run([*words, *request["line"]], env=environment, check=False).returncode
    if code or not line.exists():
        os._exit(code or 1)
    argv = line.read_text().split("\0")[:-1]
    entries = Path(f"{line}.env").read_text().split("\0")
    variables = dict(entry.split("=", 1) for entry in entries if entry)
    sys.orig_argv = [sys.executable, "-m", *argv]
    sys.path[:0] = [path for path in variables.get("PYTHONPATH", "").split(":") if path]
    for path in sys.path[:2]:
        if Path(path, "sitecustomize.py").is_file():
            runpy.run_path(f"{path}/sitecustomize.py")
    # For a line of a log: torch walks the sources of all modules, which are many here.
    dynamic_rendezvous.get_method_name = lambda depth=2: "no_method_name"
    become(argv, variables)


if __name__ == "__main__":
    main()
