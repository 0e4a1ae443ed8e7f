"""Check and measure megasink on this machine's GPUs, and write one report: ``make gpu``.

    python benchmarks/gpu.py --output gpu-report

Every part runs in a process of its own with a time limit; one that fails does not stop the others,
and one whose packages are missing is skipped and named. The report (report.md, report.json, logs
and pictures) is complete after each part. A call takes at most --minutes. The next one continues:
it runs only what has not passed with the same sources, device and versions, test by test, with the
kernels that earlier calls compiled; what failed comes last. A slower device than an H100 needs
--time-factor.

Any Python with torch will do. --wheels FOLDER adds packages to it that are only unpacked.
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

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))  # a bare machine has no megasink installed

from gpu_packages import missing, unpack  # noqa: E402
from gpu_parts import PARTS, Part  # noqa: E402
from gpu_report import facts, write_report  # noqa: E402

# Less is not worth starting a part for.
_SHORTEST = 20.0


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


def main(argv: Sequence[str] | None = None) -> int:
    """Run what is left of the report; return 0 if every part passed or was skipped."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=Path("gpu-report"), metavar="FOLDER")
    parser.add_argument("--minutes", type=float, default=10.0, metavar="M", help="of this call")
    parser.add_argument(
        "--wheels", type=Path, metavar="FOLDER", help="unpack these wheels for the parts"
    )
    parser.add_argument(
        "--time-factor", type=float, default=1.0, metavar="X", help="multiplies every time limit"
    )
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that its part ends, too
    if args.wheels:
        unpack(args.wheels, args.output / "packages")
    sys.path.insert(0, str((args.output / "packages").resolve()))
    machine = facts()
    if not machine["devices"]:
        print(f"no GPU to measure: {machine['no_device']}", file=sys.stderr)
        return 1
    parts = [replace(part, limit=int(part.limit * args.time_factor)) for part in PARTS]
    return run_parts(parts, args.output, machine, 60.0 * args.minutes)


def run_parts(
    parts: Sequence[Part], folder: Path, machine: dict[str, Any], seconds: float = 600.0
) -> int:
    """Run the parts that have not passed on this machine, and write the report after each.

    Args:
        machine: What `facts` returns; the report keeps results of an equal one.
        seconds: No part runs longer, or starts when they are almost over.
    """
    deadline = time.monotonic() + seconds
    folder.mkdir(parents=True, exist_ok=True)
    results = _before(folder, machine)
    state = {part.name: results[part.name].state for part in parts if part.name in results}
    if kept := [name for name in state if state[name] == "passed"]:
        print(f"passed before on this commit and machine: {', '.join(kept)}", flush=True)
    left = [part for part in parts if part.name not in kept]
    left.sort(key=lambda part: state.get(part.name) == "failed")  # after those never seen to fail
    lacks = missing(module for part in left for module in part.needs)
    for name, modules in lacks.items():
        cost = [part.name for part in left if not modules.isdisjoint(part.needs)]
        print(f"{name} is not installed, which {', '.join(cost)} need", flush=True)
    run = set()
    _save(parts, results, folder, machine)
    try:
        for index, part in enumerate(left):
            part = replace(part, limit=min(part.limit, int(deadline - time.monotonic())))
            if part.limit < min(_SHORTEST, left[index].limit):
                break
            print(f"[{index + 1}/{len(left)}] {part.title} (at most {part.limit} s)", flush=True)
            results[part.name] = _run(part, folder, len(machine["devices"]), lacks)
            run.add(part.name)
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
    if later := [part.name for part in left if part.name not in run]:
        print(f"time is over; the same command goes on with {', '.join(later)}", file=sys.stderr)
    return 1 if bad or later else 0


def _run(part: Part, folder: Path, gpus: int, lacks: dict[str, set[str]]) -> Result:
    """Run one part, its output in NAME.log."""
    if absent := [name for name, modules in lacks.items() if not modules.isdisjoint(part.needs)]:
        return Result("skipped", detail=f"needs {', '.join(absent)}")
    if gpus < part.gpus:
        return Result("skipped", detail=f"needs {part.gpus} GPUs, there is {gpus}")
    own = folder / part.name
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    command = [sys.executable, *(word.format(folder=own.resolve()) for word in part.command)]
    environment = _environment(folder.resolve())
    log, running, start = folder / f"{part.name}.log", own / "running", time.monotonic()
    log.unlink(missing_ok=True)
    while True:
        code = _ended(command, environment, log, start + part.limit - time.monotonic())
        if code is None or not running.exists():
            break
        with Path(f"{running}.lost").open("a") as lost:  # and on with the other tests
            lost.write(running.read_text())
        running.unlink()
    seconds = time.monotonic() - start
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    last = lines[-1].strip("= ") if lines else "it printed nothing"
    if code is None:
        return Result("timed out", seconds, f"stopped after {part.limit} s; its last line: {last}")
    return Result("passed" if code == 0 else "failed", seconds, last)


def _ended(command: list[str], environment: dict[str, str], log: Path, limit: float) -> int | None:
    """Run a command with its output added to the log; return its exit code, None if stopped."""
    with log.open("ab") as output:
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
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _environment(folder: Path) -> dict[str, str]:
    """Return the variables of a part: its packages, and caches of compiled kernels that stay."""
    cache = folder / "cache"
    return os.environ | {
        "PYTHONPATH": os.pathsep.join((str(folder / "packages"), str(ROOT))),
        "PYTHONUNBUFFERED": "1",
        "COLUMNS": "100",
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",  # for tests of deterministic gradients
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED": "1",
        "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": str(cache / "flash_attn"),
    }


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Kill what is left of a part's process group."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def _before(folder: Path, machine: dict[str, Any]) -> dict[str, Result]:
    """Return the results of earlier calls with the same sources, devices and versions."""
    try:
        report = json.loads((folder / "report.json").read_text())
        if report["machine"] != machine:
            for tests in folder.glob("*.passed"):
                tests.unlink()
            return {}
        return {part["name"]: Result(**part["result"]) for part in report["parts"]}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _save(
    parts: Sequence[Part], results: dict[str, Result], folder: Path, machine: dict[str, Any]
) -> None:
    done = [(part, results[part.name]) for part in parts if part.name in results]
    rows = [asdict(part) | {"result": asdict(result)} for part, result in done]
    write_report({"machine": machine, "parts": rows}, folder)


if __name__ == "__main__":
    sys.exit(main())
