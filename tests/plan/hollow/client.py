"""The tests' side of tests/plan/hollow/server.py."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Self

from megasink.plan.hollow import environment
from tests.forkserver import HANG_SECONDS, ROOT


class Server:
    """Starts with the first task, and ends with the session."""

    def __init__(self, site: Path | None = None, **variables: str) -> None:
        """With packages in the folder `site`, and these environment variables."""
        self._own = variables | {
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, (ROOT, site))))
        }
        self._process: subprocess.Popen[str] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hollow-")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            assert self._process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
            self._process.wait()
        self._folder.cleanup()

    def run(self, task: str, **arguments: Any) -> Any:
        """Run ``module:function`` of tests.plan.hollow with these arguments, in a fork.

        Returns:
            what it returned, through JSON.

        Raises:
            AssertionError: it ended in an error; with the end of what it printed.
        """
        if self._process is None:
            self._process = self._start()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {"task": task, "arguments": arguments}
        with contextlib.suppress(BrokenPipeError):  # then there is no answer either
            print(json.dumps(request), file=self._process.stdin, flush=True)
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(HANG_SECONDS):
                self._process.kill()  # and with it its fork
                self._process = None
                raise AssertionError(
                    f"{task} took longer than {HANG_SECONDS:.0f} s: {self._said()}"
                )
        answer = self._process.stdout.readline()
        assert answer, f"the server has ended: {self._said()}"
        if answer.strip() != "0":
            raise AssertionError(f"{task} ended with {answer.strip()}: {self._said()}")
        return json.loads(self._path("result").read_text())

    def _start(self) -> "subprocess.Popen[str]":
        own = self._own | {"OMP_NUM_THREADS": "1"}
        with self._path("log").open("w") as log:
            return subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    "-m",
                    "tests.plan.hollow.server",
                    self._folder.name,
                ],
                env=os.environ | environment() | own,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )

    def _path(self, name: str) -> Path:
        return Path(self._folder.name, name)

    def _said(self) -> str:
        return self._path("log").read_text(errors="replace")[-4000:]
