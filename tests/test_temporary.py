"""Workers have the folder of who started them, and what a kill leaves goes with the next start."""

import multiprocessing.process
import os
import subprocess
import sys
import tempfile
from multiprocessing import resource_sharer
from pathlib import Path

import pytest

from megasink.training.pretrain import shared_folder

CODE = """
import multiprocessing, os, signal, sys
from multiprocessing import reduction, util
from megasink.training.pretrain import shared_folder

def work(pipe):
    try:
        reduction.DupFd(0)  # as a data loader's worker, which listens for who takes the file
        pipe.send(util.get_temp_dir())
    except BaseException as error:
        pipe.send(error)
    os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    with shared_folder():
        for context in map(multiprocessing.get_context, ("fork", "spawn")):
            ours, theirs = context.Pipe()
            context.Process(target=work, args=(theirs,)).start()
            print(ours.recv(), flush=True)
        if sys.argv[1:]:
            os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary():
    """Not in pytest's folder: the path of a socket is short."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def run(tmp_path, temporary, *words):
    script = tmp_path / "script.py"
    script.write_text(CODE)
    return subprocess.run(
        [sys.executable, str(script), *words],
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )


def test_one_folder_that_goes_with_its_process(tmp_path, temporary):
    done = run(tmp_path, temporary, "die")
    first = set(done.stdout.split())
    assert len(first) == 1, done.stderr  # forked and spawned workers have the same
    assert [str(path) for path in temporary.iterdir()] == list(first)
    theirs = temporary / "msocks-other"
    theirs.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", f"import fcntl, os; d = os.open({str(theirs)!r}, 0); "
         "fcntl.flock(d, fcntl.LOCK_EX); print('locked', flush=True); input()"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as other:  # fmt: skip
        assert other.stdout.readline() == "locked\n"
        done = run(tmp_path, temporary)
        assert done.returncode == 0, done.stderr
        # Its own is gone, as is that of the one that was killed, but not that of one that lives.
        assert list(temporary.iterdir()) == [theirs]
        other.communicate("\n")
    assert not Path(*first).exists()


def test_the_next_run_of_a_process_passes_descriptors_on(temporary, monkeypatch):
    """As to the writer of asynchronous checkpoints."""
    resource_sharer.stop()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setitem(multiprocessing.process.current_process()._config, "tempdir", None)
    for _ in range(2):
        with shared_folder(), Path(os.devnull).open() as file:
            os.close(resource_sharer.DupFd(file.fileno()).detach())
    assert not list(temporary.iterdir())
