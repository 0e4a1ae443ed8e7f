"""``make gpu``: its parts, limits, report and resumption, on parts that need no GPU.

Not covered: what the parts themselves do on a GPU.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import is_alive, until

ROOT = Path(__file__).parents[1]
MACHINE = {
    "commit": "0123456789abcdef",
    "changes": "",
    "devices": [{"name": "H100", "capability": [9, 0], "GiB": 80.0}],
    "no_device": None,
    "driver": "580.1",
    "cuda": "13.2",
    "versions": {"torch": "2.15.0"},
}


@pytest.fixture
def gpu(monkeypatch):
    """The module benchmarks/gpu.py."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import gpu

    return gpu


def part(gpu, name, code, **options):
    options = {"limit": 60} | options
    return gpu.Part(name, name.capitalize(), ("-c", code, "{folder}"), **options)


TABLE = "print('facts'); print(); print('| a | b |'); print('|---|---|'); print('| 1 | 2 |')"
PICTURE = "import sys; open(sys.argv[1] + '/curve.png', 'w'); " + TABLE


def states(folder: Path) -> dict[str, str]:
    report = json.loads((folder / "report.json").read_text())
    return {part["name"]: part["result"]["state"] for part in report["parts"]}


def test_every_part_runs_and_is_reported(gpu, tmp_path, capfd, monkeypatch):
    def wait(process, timeout=None):
        """The limit begins when a hanging part hangs, however long Python takes to start."""
        if timeout == 5:
            until(lambda: "begun" in (tmp_path / "hangs.log").read_text())
            timeout = 0.1
        return of_process(process, timeout)

    of_process = subprocess.Popen.wait
    monkeypatch.setattr(subprocess.Popen, "wait", wait)
    parts = [
        part(gpu, "breaks", "print('a | b'); raise SystemExit(3)"),
        part(gpu, "hangs", "import time; print('begun', flush=True); time.sleep(600)", limit=5),
        part(gpu, "pair", "raise SystemExit(1)", gpus=2),
        part(gpu, "draws", PICTURE, tables=True),
    ]
    assert gpu.run_parts(parts, tmp_path, MACHINE) == 1
    assert states(tmp_path) == {
        "breaks": "failed",
        "hangs": "timed out",
        "pair": "skipped",
        "draws": "passed",
    }
    printed = capfd.readouterr()
    assert "did not pass: breaks, hangs" in printed.err
    assert "its last line: begun" in printed.out
    text = (tmp_path / "report.md").read_text()
    for expected in (
        "1 x H100; driver 580.1",
        "| [Breaks](breaks.log) | failed |",
        "a \\| b |",
        "needs 2 GPUs, there is 1",
        "| 1 | 2 |",
        "![Draws](draws/curve.png)",
    ):
        assert expected in text
    assert "facts" not in text.split("## Draws")[1]


def test_what_passed_is_not_run_again_on_the_same_machine(gpu, tmp_path, capfd):
    count = "import sys; open(sys.argv[1] + '/../runs', 'a').write('x')"
    parts = [part(gpu, "counts", count), part(gpu, "breaks", "raise SystemExit(1)")]
    gpu.run_parts(parts, tmp_path, MACHINE)
    parts[1] = part(gpu, "breaks", "print('mended')")
    assert gpu.run_parts(parts, tmp_path, MACHINE) == 0
    assert (tmp_path / "runs").read_text() == "x"
    assert "passed before on this commit and machine: counts" in capfd.readouterr().out
    assert states(tmp_path) == {"counts": "passed", "breaks": "passed"}
    gpu.run_parts(parts, tmp_path, MACHINE | {"commit": "another"})
    assert (tmp_path / "runs").read_text() == "xx"


def test_processes_of_a_part_end_with_it(gpu, tmp_path):
    code = (
        "import os, subprocess, sys;"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']);"
        "open(sys.argv[1] + '/pid', 'w').write(str(child.pid))"
    )
    assert gpu.run_parts([part(gpu, "leaves", code)], tmp_path, MACHINE) == 0
    pid = int((tmp_path / "leaves/pid").read_text())
    until(lambda: not is_alive(pid))


def test_after_ctrl_c_the_same_command_goes_on(gpu, tmp_path):
    """In a process of its own, as a person at a terminal would stop it."""
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu
parts = [gpu.Part(name, name, ("-c", code), 60) for name, code in
         [("first", "pass"), ("second", "import time; print('begun'); time.sleep(600)")]]
sys.exit(gpu.run_parts(parts, gpu.Path({str(tmp_path)!r}), {MACHINE!r}))
"""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-c", code], env=environment, stderr=subprocess.PIPE, text=True
    )

    def begun():
        assert process.poll() is None
        log = tmp_path / "second.log"
        return log.is_file() and "begun" in log.read_text()

    until(begun)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert "goes on from here" in errors
    assert states(tmp_path) == {"first": "passed"}
    parts = [part(gpu, "first", "raise SystemExit(1)"), part(gpu, "second", "pass")]
    assert gpu.run_parts(parts, tmp_path, MACHINE) == 0


def test_without_a_gpu_it_says_so(gpu, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(gpu, "facts", lambda: MACHINE | {"devices": [], "no_device": "too old"})
    assert gpu.main(["--output", str(tmp_path / "report")]) == 1
    assert capsys.readouterr().err == "no GPU to measure: too old\n"
    assert not (tmp_path / "report").exists()


def test_the_limits_keep_the_promise(gpu):
    assert sum(part.limit for part in gpu.PARTS) <= 600
    names = [part.name for part in gpu.PARTS]
    assert len(set(names)) == len(names)


def test_every_part_has_its_files(gpu):
    for one in gpu.PARTS:
        for word in one.command:
            if word.endswith(".py"):
                assert (ROOT / word).is_file(), word


def test_every_test_for_gpus_is_in_a_part(gpu):
    words = {word for part in gpu.PARTS for word in part.command}
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert files <= words


def test_facts_of_this_machine(gpu):
    machine = gpu.facts()
    assert machine["versions"]["torch"]
    assert len(machine["commit"]) == 40
    assert json.loads(json.dumps(machine)) == machine
    assert bool(machine["devices"]) == (machine["no_device"] is None)
