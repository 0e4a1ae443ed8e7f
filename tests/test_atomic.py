"""Files and folders that are there whole or not at all."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from megasink.files.atomic import atomic_file, atomic_files, atomic_folder, atomic_text


def test_a_file_takes_the_place_of_another_one_at_the_end(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("before")
    with atomic_file(path) as file:
        file.write(b"after")
        file.flush()
        assert path.read_text() == "before"
    assert path.read_text() == "after"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_what_ends_the_body_leaves_what_was_there(tmp_path, error):
    path = tmp_path / "config.json"
    path.write_text("before")

    def leave(partial: Path) -> None:
        partial.write_text("half")
        raise error

    with pytest.raises(error), atomic_file(path) as file:
        leave(Path(file.name))
    assert path.read_text() == "before"
    with pytest.raises(error), atomic_folder(tmp_path / "folder") as folder:
        leave(folder / "half")
    assert list(tmp_path.iterdir()) == [path]


def test_a_full_disk_is_an_error_and_not_half_a_file(tmp_path):
    code = f"""
import resource, signal, sys
sys.path.insert(0, {sys.path[0]!r})
from pathlib import Path
from megasink.files.atomic import atomic_text
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
atomic_text(Path(sys.argv[1]), "x" * 2000)
"""
    path = tmp_path / "results.json"
    done = subprocess.run(
        [sys.executable, "-c", code, str(path)], capture_output=True, text=True, timeout=1200
    )
    assert "File too large" in done.stderr
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_where_no_file_descriptor_is_free(tmp_path):
    code = f"""
import os, resource, sys
sys.path.insert(0, {sys.path[0]!r})
from pathlib import Path
from megasink.files.atomic import atomic_folder
with atomic_folder(Path(sys.argv[1])) as folder:
    (folder / "a" / "b" / "c").mkdir(parents=True)
    (folder / "a" / "b" / "c" / "file").touch()
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 40))
    kept = [os.dup(0) for _ in range(99)]
"""
    line = [sys.executable, "-c", code, str(tmp_path / "folder")]
    done = subprocess.run(
        line, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=1200
    )
    assert "Too many open files" in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_killed_process_leaves_a_name_that_is_written_anew(tmp_path):
    path = tmp_path / "results.json"
    child = os.fork()
    if not child:
        with atomic_file(path) as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    assert [p.name for p in tmp_path.iterdir()] == ["results.json.partial"]
    atomic_text(path, "whole")
    assert path.read_text() == "whole"
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_through_a_link(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("keep")
    (tmp_path / "x.partial").symlink_to(precious)
    atomic_text(tmp_path / "x", "new")
    assert precious.read_text() == "keep"


def test_a_folder_appears_whole_and_replaces_only_an_empty_one(tmp_path):
    path = tmp_path / "deep" / "folder"
    for _ in range(2):
        with atomic_folder(path) as folder:
            (folder / "a").write_text("a")
            assert not list(path.glob("*"))
        assert [p.name for p in path.iterdir()] == ["a"]
        (path / "a").unlink()
    (path / "b").write_text("b")
    with pytest.raises(OSError, match="not empty"), atomic_folder(path):
        pass
    assert [p.name for p in path.iterdir()] == ["b"]
    assert [p.name for p in path.parent.iterdir()] == ["folder"]


def test_files_appear_together_and_a_failure_leaves_what_was_there(tmp_path):
    folder = tmp_path / "new" / "out"

    def write(partial: Path) -> None:
        (partial / "a.txt").write_text("half")
        raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full") as told, atomic_files(folder) as partial:
        write(partial)
    assert told.value.filename == str(folder)
    assert list(tmp_path.iterdir()) == []
    folder.mkdir(parents=True)
    (folder / ".files.partial-1").mkdir()  # of a killed process
    with atomic_files(folder) as partial:
        (partial / "a.txt").write_text("whole")
        assert [path.name for path in folder.glob("*.txt")] == []
    assert [path.name for path in folder.iterdir()] == ["a.txt"]
