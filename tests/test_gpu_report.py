"""``make gpu``: its parts, limits, report and resumption, on parts that need no GPU.

Not covered: what the parts themselves do on a GPU.
"""

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from megasink.attention import backend_names
from tests.waiting import is_alive, until

ROOT = Path(__file__).parents[1]
MACHINE = {
    "commit": "0123456789abcdef",
    "sources": "fedcba9876543210",
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


def test_a_part_that_failed_comes_after_those_that_did_not_run(gpu, tmp_path, capfd):
    """Its result stays in the report until it runs again."""
    parts = [part(gpu, name, "raise SystemExit(1)") for name in ("first", "second")]
    gpu.run_parts(parts[:1], tmp_path, MACHINE)
    assert gpu.run_parts(parts, tmp_path, MACHINE, 0.0) == 1
    assert states(tmp_path) == {"first": "failed"}
    capfd.readouterr()
    gpu.run_parts(parts, tmp_path, MACHINE)
    lines = capfd.readouterr().out.splitlines()
    assert [line[1:].split(" (")[0] for line in lines if line.startswith("[")] == [
        "1/2] Second",
        "2/2] First",
    ]


def test_changed_sources_are_another_machine(gpu, tmp_path, monkeypatch):
    """Also without git, and where a changed file was already changed."""
    import gpu_report

    for room in ("benchmarks", "megasink/inner"):
        (tmp_path / room).mkdir(parents=True)
    monkeypatch.setattr(gpu_report, "__file__", str(tmp_path / "benchmarks/gpu_report.py"))
    digests = set()
    for text in ("one", "two"):
        (tmp_path / "megasink/inner/some.py").write_text(text)
        digests.add(gpu_report.facts()["sources"])
    assert len(digests) == 2


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


def test_a_call_ends_in_time_and_the_next_one_goes_on(gpu, tmp_path, capfd, monkeypatch):
    """A part gets at most what is left, and no part starts at the end."""
    parts = [part(gpu, "first", "pass", limit=9000), part(gpu, "second", "pass")]
    assert gpu.run_parts(parts, tmp_path, MACHINE, 0.0) == 1
    assert states(tmp_path) == {}
    assert "time is over; the same command goes on with first, second" in capfd.readouterr().err
    limits = []

    def passes(part, *_):
        limits.append(part.limit)
        return gpu.Result("passed")

    monkeypatch.setattr(gpu, "_run", passes)
    assert gpu.run_parts(parts, tmp_path, MACHINE, 8000.0) == 0
    assert limits[0] <= 8000
    assert limits[1] == 60


def test_names_of_parts_are_different(gpu):
    names = [part.name for part in gpu.PARTS]
    assert len(set(names)) == len(names)


def test_every_kernel_of_a_gpu_is_a_part(gpu):
    kernels = {*backend_names()} - {"flash-cpu", "eager"}
    assert {f"kernel-{name}" for name in kernels} <= {part.name for part in gpu.PARTS}


# A folder of PYTHONPATH with this in it: a Python of which only these are hidden.
BARE = """
import sys
from importlib.machinery import PathFinder
ABSENT = {absent!r}
class Hiding(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in ABSENT
        return None if hidden else PathFinder.find_spec(name, path, target)
others = [finder for finder in sys.meta_path if finder is not PathFinder]
sys.meta_path[:] = [*others, Hiding]
"""
ABSENT = "megatron transformer_engine flash_attn pytest pydantic pydantic_core scipy sklearn"
ABSENT += " matplotlib PIL pyarrow tensorboard sentencepiece psutil threadpoolctl lm_eval datasets"


def test_a_bare_machine_runs_what_it_can(tmp_path):
    """What is missing is named with the parts that it costs; doctor runs without all of it."""
    (tmp_path / "sitecustomize.py").write_text(BARE.format(absent=ABSENT.split()))
    code = f"""
import sys
sys.path.insert(0, {str(ROOT / "benchmarks")!r})
import gpu
from dataclasses import replace
parts = [part if part.name == "environment" else replace(part, command=("-c", "print('ran')"))
         for part in gpu.PARTS]
parts = [replace(part, limit=600) for part in parts]
gpu._environment = lambda folder: gpu.os.environ
sys.exit(gpu.run_parts(parts, gpu.Path({str(tmp_path / "report")!r}), {MACHINE!r}, 3600.0))
"""
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = states(tmp_path / "report")
    assert {name for name, state in found.items() if state == "passed"} == {
        "environment",
        "errors",
        "attention",
        "doctor",
    }
    assert set(found.values()) == {"passed", "skipped"}
    lines = done.stdout.splitlines()
    assert (
        sum(line.startswith("pytest is not installed, which kernel-flash-cuda,") for line in lines)
        == 1
    )
    assert "megatron-core is not installed, which layers, step, job, ranks need" in lines
    assert "flash-attn-4 is not installed, which kernel-flash-attn-4 need" in lines


def test_wheels_are_unpacked_also_from_parts(gpu, tmp_path, monkeypatch):
    """A wheel of a module, one with a .pth file and one in two parts; twice, and a broken one."""
    wheels, folder = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    for name, files in {
        "plain": {"plain_module.py": "value = 1"},
        "linked": {"linked.pth": "inner", "inner/linked_module.py": "value = 2"},
        "split": {"split_module.py": "value = 3", "split-1.0.data/purelib/late_module.py": ""},
    }.items():
        path = wheels / f"{name}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as wheel:
            for file, text in files.items():
                wheel.writestr(file, text)
            wheel.writestr(f"{name}-1.0.dist-info/RECORD", "")
    whole = path.read_bytes()
    path.unlink()
    (wheels / f"{path.name}.aa").write_bytes(whole[:100])
    (wheels / f"{path.name}.ab").write_bytes(whole[100:])
    gpu.unpack(wheels, folder)
    (folder / "plain_module.py").write_text("value = 4")
    gpu.unpack(wheels, folder)  # nothing again
    code = "import plain_module as a, linked_module as b, split_module as c, late_module\n"
    code += "print(a.value, b.value, c.value)"
    environment = os.environ | {"PYTHONPATH": str(folder)}
    said = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    assert said == "4 2 3\n"
    (wheels / "broken-1.0-py3-none-any.whl").write_bytes(whole[:100])
    with pytest.raises(SystemExit, match=r"broken-1.0-py3-none-any.whl: not a whole wheel"):
        gpu.unpack(wheels, folder)
    with pytest.raises(SystemExit, match="has no wheels"):
        gpu.unpack(folder, folder)


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
