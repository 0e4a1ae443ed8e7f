"""Check and measure megasink on this machine's GPUs, and write one report: ``make gpu``.

    python benchmarks/gpu.py --output gpu-report

Every part runs in a process of its own with a time limit; one that fails does not stop the others.
The report (report.md, report.json, logs and pictures) is complete after each part. Called again,
the command runs only what has not passed on the same commit, device and versions. At most ten
minutes on an H100; a slower device needs --time-factor.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from gpu_report import facts, write_report

ROOT = Path(__file__).parents[1]


@dataclass(frozen=True)
class Part:
    """One process of the report.

    Attributes:
        name: Name of its log and its folder.
        title: Heading in the report.
        command: What Python runs; "{folder}" stands for the part's own folder.
        limit: Seconds until it is stopped.
        gpus: GPUs that it needs.
        tables: Whether its output is Markdown, which goes into the report whole.
    """

    name: str
    title: str
    command: tuple[str, ...]
    limit: int
    gpus: int = 1
    tables: bool = False


@dataclass(frozen=True)
class Result:
    """How a part ended.

    Attributes:
        state: "passed", "failed", "timed out", "interrupted", or "skipped".
        seconds: Wall time.
        detail: The reason, or the last line of its output.
    """

    state: str
    seconds: float = 0.0
    detail: str = ""


def _tests(name: str) -> tuple[str, ...]:
    return ("-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/gpu/{name}")


def _benchmark(name: str, *flags: str) -> tuple[str, ...]:
    return (f"benchmarks/{name}.py", *flags)


PARTS = (
    Part("environment", "Versions, kernels, patches", ("-m", "megasink", "doctor"), 30),
    Part("kernels", "Tests: kernels against float64", _tests("test_attention_gpu.py"), 130),
    Part("gates", "Tests: Triton gate kernels", _tests("test_gate_kernels_gpu.py"), 60),
    Part("layers", "Tests: layers, graphs, steps", _tests("test_layers_gpu.py"), 90),
    Part("ranks", "Tests: NCCL ranks", _tests("test_ranks_gpu.py"), 60, gpus=2),
    Part(
        "errors",
        "Gradient errors against float64",
        _benchmark("attention_error", "--device", "cuda"),
        30,
        tables=True,
    ),
    Part(
        "attention",
        "Attention against the plain kernel",
        _benchmark(
            "attention",
            *("--device", "cuda", "--heads", "16", "--head-dim", "128"),
            *("--lengths", "1024", "4096", "8192", "16384", "--output", "{folder}"),
        ),
        110,
        tables=True,
    ),
    Part(
        "step",
        "Training step of the 0.6B shape",
        _benchmark("step_time", "--device", "cuda"),
        90,
        tables=True,
    ),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left of the report; return 0 if every part passed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), metavar="FOLDER")
    parser.add_argument(
        "--time-factor", type=float, default=1.0, metavar="X", help="multiplies every time limit"
    )
    args = parser.parse_args(argv)
    machine = facts()
    if not machine["devices"]:
        print(f"no GPU to measure: {machine['no_device']}", file=sys.stderr)
        return 1
    parts = [replace(part, limit=int(part.limit * args.time_factor)) for part in PARTS]
    return run_parts(parts, args.output, machine)


def run_parts(parts: Sequence[Part], folder: Path, machine: dict[str, Any]) -> int:
    """Run the parts that have not passed on this machine, and write the report after each.

    Args:
        machine: What `facts` returns; the report keeps results of an equal one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    results = _passed_before(folder, machine)
    kept = [part.name for part in parts if part.name in results]
    if kept:
        print(f"passed before on this commit and machine: {', '.join(kept)}", flush=True)
    left = [part for part in parts if part.name not in results]
    try:
        for index, part in enumerate(left):
            minutes = sum(later.limit for later in left[index:]) / 60
            print(
                f"[{index + 1}/{len(left)}] {part.title} (at most {part.limit} s; "
                f"all that is left: {minutes:.0f} min)",
                flush=True,
            )
            results[part.name] = _run(part, folder, len(machine["devices"]))
            _save(parts, results, folder, machine)
            result = results[part.name]
            print(f"    {result.state} after {result.seconds:.0f} s: {result.detail}", flush=True)
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", file=sys.stderr)
        return 130
    _save(parts, results, folder, machine)
    print(f"wrote {folder / 'report.md'} and report.json")
    bad = [name for name, result in results.items() if result.state not in ("passed", "skipped")]
    if bad:
        print(f"did not pass: {', '.join(bad)}; logs are in {folder}", file=sys.stderr)
    return 1 if bad else 0


def _run(part: Part, folder: Path, gpus: int) -> Result:
    """Run one part, its output in NAME.log."""
    if gpus < part.gpus:
        return Result("skipped", detail=f"needs {part.gpus} GPUs, there is {gpus}")
    own = folder / part.name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    command = [sys.executable, *(word.format(folder=own.resolve()) for word in part.command)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "COLUMNS": "100"}
    log = folder / f"{part.name}.log"
    start = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # so that its ranks end with it
        )
        try:
            code: int | None = process.wait(part.limit)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    seconds = time.monotonic() - start
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip("= ") if lines else "it printed nothing"
    if code is None:
        return Result("timed out", seconds, f"stopped after {part.limit} s; its last line: {last}")
    return Result("passed" if code == 0 else "failed", seconds, last)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a part's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _passed_before(folder: Path, machine: dict[str, Any]) -> dict[str, Result]:
    """Return the passed parts of an earlier call on the same commit, devices and versions."""
    try:
        report = json.loads((folder / "report.json").read_text())
        if report["machine"] != machine:
            return {}
        before = {part["name"]: Result(**part["result"]) for part in report["parts"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return {name: result for name, result in before.items() if result.state == "passed"}


def _save(
    parts: Sequence[Part], results: dict[str, Result], folder: Path, machine: dict[str, Any]
) -> None:
    done = [(part, results[part.name]) for part in parts if part.name in results]
    rows = [asdict(part) | {"result": asdict(result)} for part, result in done]
    write_report({"machine": machine, "parts": rows}, folder)


if __name__ == "__main__":
    sys.exit(main())
