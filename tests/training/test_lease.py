"""Who may write to a run folder: one trainer, and after its death the next."""

import errno
import json
import os
import re
import subprocess
import sys
import textwrap
import threading
import time
from types import SimpleNamespace

import pytest

from megasink.errors import UserError
from megasink.training import lease
from megasink.training.lease import LEASE, OWNER, Lease, clear, wait_until_expired
from tests.distributed.pool import ROOT
from tests.waiting import until


@pytest.fixture
def process(tmp_path):
    """Run Python that holds a lease of tmp_path; what it said and its exit code."""

    def run(text, signal=0):
        head = f"""
            import os, signal, sys, time
            from pathlib import Path
            from megasink.training import lease
            folder = Path({str(tmp_path)!r})
        """
        code = textwrap.dedent(head) + textwrap.dedent(text)
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.returncode, done.stderr

    return run


def lease_of(folder):
    return folder / LEASE / OWNER


def owner(folder):
    return json.loads(lease_of(folder).read_text())


def elsewhere(folder, age=0.0):
    """A lease of another host, touched so many seconds ago."""
    path = lease_of(folder)
    path.parent.mkdir()
    path.write_text(json.dumps({"host": "node\x1b7", "pid": 4711, "since": "then", "token": "t"}))
    then = time.time() - age
    os.utime(path, (then, then))


def left(folder):
    return sorted(path.name for path in folder.iterdir())


def test_the_second_is_refused_in_one_line_that_names_the_first(tmp_path):
    first = Lease(tmp_path / "run")
    for attempt in (Lease, wait_until_expired):
        with pytest.raises(UserError) as refused:
            attempt(tmp_path / "run")
        (line,) = str(refused.value).splitlines()
        assert f"process {os.getpid()} on {owner(tmp_path / 'run')['host']}" in line
        assert "in use by another trainer" in line
    first.release()
    first.release()
    assert left(tmp_path / "run") == []
    Lease(tmp_path / "run").release()


def test_a_killed_owner_of_this_host_is_followed_at_once(tmp_path, process):
    code, _ = process("lease.Lease(folder); os.kill(os.getpid(), signal.SIGKILL)")
    assert code == -9
    assert left(tmp_path) == [LEASE]
    Lease(tmp_path, say=pytest.fail).release()


@pytest.mark.parametrize("end", ["", "sys.exit(3)", "raise ValueError"])
def test_an_owner_that_ends_leaves_no_lease(tmp_path, process, end):
    code, _ = process(f"lease.Lease(folder)\nif os.fork() == 0: sys.exit(0)\nos.wait()\n{end}")
    assert code == {"": 0, "sys.exit(3)": 3}.get(end, 1)
    assert left(tmp_path) == []


def test_a_child_of_the_owner_gives_nothing_back(tmp_path):
    held = Lease(tmp_path)
    child = os.fork()
    if child == 0:
        held.release()
        os._exit(0)
    os.waitpid(child, 0)
    assert left(tmp_path) == [LEASE]
    held.release()


def test_another_process_of_the_same_number_is_not_the_owner(tmp_path):
    held = Lease(tmp_path)
    of_before = owner(tmp_path) | {"started": owner(tmp_path)["started"] - 1, "token": "before"}
    held.release()
    lease_of(tmp_path).parent.mkdir()
    lease_of(tmp_path).write_text(json.dumps(of_before))
    Lease(tmp_path, say=pytest.fail).release()


def test_a_container_with_its_own_processes_is_another_host(tmp_path, monkeypatch):
    held = Lease(tmp_path)
    inside = owner(tmp_path) | {"namespace": "pid:[1]", "pid": 1, "token": "inside"}
    held.release()
    lease_of(tmp_path).parent.mkdir()
    lease_of(tmp_path).write_text(json.dumps(inside))
    sleeping(monkeypatch)
    said = []
    Lease(tmp_path, said.append).release()
    assert said


def sleeping(monkeypatch):
    """Seconds that the lease has slept, by a clock that goes on by that alone."""
    slept = []
    clock = SimpleNamespace(**vars(time) | {"monotonic": lambda: sum(slept), "sleep": slept.append})
    monkeypatch.setattr(lease, "time", clock)
    monkeypatch.setattr(lease, "_SAY_SECONDS", 100.0)
    monkeypatch.setattr(lease, "EXPIRY_SECONDS", 1300.0)
    return slept


def test_a_lease_of_another_host_expires_and_the_wait_is_said(tmp_path, monkeypatch):
    slept = sleeping(monkeypatch)
    elsewhere(tmp_path, age=1000)  # and as long as this process then waits for its turn
    said = []
    held = Lease(tmp_path, said.append)
    assert 200 < sum(slept) < 302
    assert 2 <= len(said) <= 4
    assert "leased to process 4711 on node\\x1b7" in said[0]
    assert 200 < int(re.search(r"starts in (\d+) s", said[0])[1]) <= 301
    assert owner(tmp_path)["pid"] == os.getpid()
    held.release()
    elsewhere(tmp_path, age=2000)
    Lease(tmp_path, say=pytest.fail).release()


@pytest.mark.parametrize("sign", ["beat", "successor"])
def test_a_sign_of_life_from_another_host_refuses(tmp_path, sign):
    elsewhere(tmp_path)

    def show(line):
        """Once the wait has begun, of which this is the first line."""
        if sign == "successor":
            (tmp_path / "new").write_text(json.dumps({"host": "third", "pid": 1, "token": "u"}))
            (tmp_path / "new").rename(lease_of(tmp_path))
        os.utime(lease_of(tmp_path))

    with pytest.raises(UserError, match="in use by another trainer"):
        Lease(tmp_path, say=show)
    assert owner(tmp_path)["token"] == ("t" if sign == "beat" else "u")


def test_one_of_many_takes_an_expired_lease_over(tmp_path):
    def attempt():
        barrier.wait()
        try:
            held.append(Lease(tmp_path))
        except UserError:
            refused.append(1)

    for _ in range(30):
        elsewhere(tmp_path, age=1000)
        held, refused, barrier = [], [], threading.Barrier(8)
        threads = [threading.Thread(target=attempt) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert (len(held), len(refused)) == (1, 7)
        assert owner(tmp_path) == held[0]._owner
        held[0].release()
        assert left(tmp_path) == []


@pytest.mark.parametrize("call", ["mkdir", "write_text", "rename"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_who_is_killed_while_creating_it_is_followed_at_once(tmp_path, process, call, when):
    code, _ = process(f"""
        real = Path.{call}
        def killed(path, *given, **named):
            of_lease = path.name.startswith("lease") or path.name == lease.OWNER
            if of_lease and {when == "before"}:
                os.kill(os.getpid(), signal.SIGKILL)
            real(path, *given, **named)
            if of_lease:
                os.kill(os.getpid(), signal.SIGKILL)
        Path.{call} = killed
        lease.Lease(folder)
    """)
    assert code == -9
    assert lease_of(tmp_path).exists() == ((call, when) == ("rename", "after"))
    held = Lease(tmp_path, say=pytest.fail)
    assert owner(tmp_path)["pid"] == os.getpid()
    held.release()
    assert not lease_of(tmp_path).parent.exists()


def test_who_is_killed_while_removing_it_is_followed_at_once(tmp_path, process):
    code, _ = process("""
        held = lease.Lease(folder)
        Path.rmdir = lambda path: os.kill(os.getpid(), signal.SIGKILL)
        held.release()
    """)
    assert (code, left(tmp_path / LEASE)) == (-9, [])
    Lease(tmp_path, say=pytest.fail).release()
    assert left(tmp_path) == []


def test_a_full_disk_leaves_no_lease(tmp_path, monkeypatch):
    def full(path, text):
        path.touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(lease.Path, "write_text", full)
    with pytest.raises(UserError, match="cannot be written: No space left on device"):
        Lease(tmp_path)
    assert left(tmp_path) == []


def test_the_owner_beats(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    held = Lease(tmp_path)
    os.utime(lease_of(tmp_path), (0, 0))
    until(lambda: lease_of(tmp_path).stat().st_mtime > 1e9)
    lease_of(tmp_path).unlink()  # by somebody who tidies up: it is made again
    until(lease_of(tmp_path).exists)
    held.release()
    assert left(tmp_path) == []


def test_an_owner_whose_lease_was_taken_over_ends(tmp_path, process):
    code, errors = process("""
        lease.BEAT_SECONDS = 0.1
        lease.Lease(folder)
        (folder / "new").write_text('{"host": "third", "pid": 9, "since": "now", "token": "u"}')
        (folder / "new").rename(folder / "lease" / "owner.json")
        time.sleep(600)
    """)
    assert code == 2
    (line,) = errors.splitlines()
    assert line.startswith("megasink: error: ")
    assert "was taken over by process 9 on third, since now" in line
    assert owner(tmp_path)["token"] == "u"


def test_what_a_killed_rank_left_is_cleared(tmp_path, process):
    process("lease.Lease(folder); os.kill(os.getpid(), signal.SIGKILL)")
    clear(tmp_path)
    clear(tmp_path)
    assert left(tmp_path) == []
    elsewhere(tmp_path, age=1000)
    clear(tmp_path)
    assert left(tmp_path) == [LEASE]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "run", "/proc/run"):
        with pytest.raises(UserError, match=r"--run-dir .* cannot be (written|used): ") as refused:
            Lease(type(tmp_path)(folder))
        assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("is a named pipe", os.mkfifo),
        ("is a folder", os.mkdir),
        ("is a device", lambda path: path.symlink_to("/dev/zero")),
        *((f"pid is {pid}", pid) for pid in ("'x'", "1e+30", "True", "[1]", "-3", "None")),
    ],
)
def test_a_damaged_lease_is_one_line(tmp_path, name, make):
    """On this very machine, where the process would be looked for."""
    path = lease_of(tmp_path)
    path.parent.mkdir()
    if callable(make):
        make(path)
    else:
        value = {"True": True, "None": None, "'x'": "x", "[1]": [1]}.get(make)
        value = value if make in ("True", "None", "'x'", "[1]") else float(make)
        path.write_text(json.dumps(lease.machine() | {"pid": value}))
    for attempt in (Lease, wait_until_expired):
        with pytest.raises(UserError, match=r": remove .*lease if no trainer writes") as told:
            attempt(tmp_path)
        assert name.removesuffix("-3") in str(told.value)
        assert "\n" not in str(told.value)
    assert lease.writer_of(tmp_path) == "an unknown trainer" or callable(make)
    clear(tmp_path)
    assert os.path.lexists(path)
