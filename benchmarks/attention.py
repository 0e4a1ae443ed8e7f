"""Time and peak memory of gated attention over the plain kernel, forward and backward.

    python benchmarks/attention.py --lengths 512 1024 2048 4096 --turns 15 --output bench_out

Vanilla, sink and gated attention (headwise sigmoid gate) with a gradient on output and gate, as the
head-balance loss makes, on every backend of this machine; beside them upstream's learnable sink,
which has no gate to take a gradient of, and on CUDA FlexAttention. The floor is PyTorch's own
causal attention with no gate. On CUDA each of our kernels also runs without a gate: the last ratio
is to that. All take turns at each length, and a ratio is one of times within a turn: median and
quartiles. Memory is the growth of the peak resident set of a fresh process per
implementation on a CPU, and `torch.cuda.max_memory_allocated` on CUDA, inputs and gradients
included. B1, no grouped queries. Prints the tables; writes attention.json and attention.png. What
fails on CUDA is named and left out, and the exit code is 1. Four minutes on two quiet cores.
"""

import argparse
import json
import operator
import os
import platform as machine
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import util
from pathlib import Path
from typing import Any

import torch
from attention_figure import draw
from attention_steps import FLOOR, UPSTREAM, first_line, implementations, own_floor, step

from megasink.upstream.versions import version_of

PACKAGES = ("torch", "megatron-core", "transformer-engine", "flash-attn", "flash-attn-4", "triton")


def main() -> int:
    arguments = _arguments()
    if arguments.peak:
        print(json.dumps(cpu_peaks(arguments)))
        return 0
    print(", ".join(f"{name} {value}" for name, value in facts(arguments).items()), end="\n\n")
    names = implementations(arguments)
    peaks = {} if arguments.device == "cuda" else {n: peaks_apart(n, arguments) for n in names}
    rows: list[dict[str, Any]] = []
    failed = 0
    arguments.output.mkdir(parents=True, exist_ok=True)
    for length in arguments.lengths:
        for name in list(names) if arguments.device == "cuda" else ():
            try:
                peaks.setdefault(name, {})[length] = cuda_peak(name, length, arguments)
            except Exception as error:
                failed = 1
                names.remove(name)
                print(f"{name}, S {length}: {first_line(error)}", end="\n\n", flush=True)
        if FLOOR not in names:
            return failed
        able = [name for name in names if peaks[name].get(length) is not None]
        rows += measure(able, length, peaks, arguments)
        print_table(length, [row for row in rows if row["length"] == length])
        report = {"facts": facts(arguments), "floor": FLOOR, "rows": rows}
        (arguments.output / "attention.json").write_text(json.dumps(report, indent=1) + "\n")
    if util.find_spec("matplotlib") is None:
        print(f"wrote {arguments.output}/attention.json; no picture without matplotlib")
        return failed
    draw(report, arguments.output / "attention.png")
    print(f"wrote {arguments.output}/attention.json and attention.png")
    return failed


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096])
    parser.add_argument("--dtype", choices=("float32", "bfloat16"))
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--output", type=Path, default=Path("bench_out"), metavar="FOLDER")
    parser.add_argument("--peak", help=argparse.SUPPRESS)  # one implementation, in its own process
    arguments = parser.parse_args()
    arguments.lengths = sorted(arguments.lengths)
    arguments.device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    arguments.dtype = arguments.dtype or ("float32" if arguments.device == "cpu" else "bfloat16")
    torch.set_num_threads(arguments.threads)
    return arguments


def facts(arguments: argparse.Namespace) -> dict[str, Any]:
    """What the numbers depend on."""
    versions = {name: version for name in PACKAGES if (version := version_of(name))}
    cuda = arguments.device == "cuda"
    hardware = torch.cuda.get_device_name() if cuda else f"{os.cpu_count()}-core {_cpu_name()}"
    threads = {} if cuda else {"threads": arguments.threads}
    shape = {"shape": f"B1 H{arguments.heads} D{arguments.head_dim}", "dtype": arguments.dtype}
    return {"device": hardware, **threads, **shape, "turns": arguments.turns, **versions}


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else machine.machine()


@contextmanager
def without_platform(name: str) -> Iterator[None]:
    """Nothing but upstream's module is to see the CPU platform: it costs Python time per call."""
    if "megasink.cpu" in sys.modules and name not in UPSTREAM.values():
        from megasink.upstream.patch_register import suspended

        with suspended():
            yield
    else:
        yield


def measure(
    names: list[str], length: int, peaks: dict[str, Any], arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """Rows of one length."""
    synchronize = torch.cuda.synchronize if arguments.device == "cuda" else nullcontext
    steps = {name: step(name, length, arguments) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(arguments.turns + 2):
        for name, run in steps.items():
            with without_platform(name):
                synchronize()
                start = time.perf_counter()
                run()
                synchronize()
                if turn >= 2:  # the first turns warm up
                    seconds[name].append(time.perf_counter() - start)
    rows = []
    for name, values in seconds.items():
        ratios = [v / f for v, f in zip(values, seconds[FLOOR], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        own = seconds.get(own_floor(name))
        rows.append(
            {
                "implementation": name,
                "length": length,
                "ms": 1e3 * statistics.median(values),
                "ratio": middle,
                "ratio_quartiles": [low, high],
                "own_ratio": own and statistics.median(map(operator.truediv, values, own)),
                "peak_mib": peaks[name][length],
            }
        )
    return rows


def print_table(length: int, rows: list[dict[str, Any]]) -> None:
    print(f"| S {length} | ms | ratio to the floor (quartiles) | to its kernel | peak MiB |")
    print("|---|---|---|---|---|")
    for row in rows:
        low, high = row["ratio_quartiles"]
        ratio = f"{row['ratio']:.3f} ({low:.3f} to {high:.3f})"
        own = f"{row['own_ratio']:.3f}" if row["own_ratio"] else "-"
        cells = (row["implementation"], f"{row['ms']:.2f}", ratio, own, f"{row['peak_mib']:.0f}")
        print(f"| {' | '.join(cells)} |")
    print(flush=True)


def cpu_peaks(arguments: argparse.Namespace) -> dict[int, float]:
    """Growth of this process's peak resident set, in MiB (Linux counts in KiB), up to each length.

    Stops where the next length would not fit in half the memory that is free now.
    """

    def peak() -> float:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1024

    step(arguments.peak, 64, arguments)()
    before, found = peak(), {}
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**20
    for length in arguments.lengths:
        if found and max(found.values()) * (length / max(found)) ** 2 > free / 2:
            break
        step(arguments.peak, length, arguments)()
        found[length] = peak() - before
    return found


def peaks_apart(name: str, arguments: argparse.Namespace) -> dict[int, float]:
    """`cpu_peaks` of one implementation, in a process of its own."""
    options = ["heads", "head_dim", "dtype", "threads", "device"]
    flags = [f"--{o.replace('_', '-')}={getattr(arguments, o)}" for o in options]
    command = [sys.executable, __file__, "--peak", name, *flags, "--lengths"]
    command += map(str, arguments.lengths)
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return {int(k): v for k, v in json.loads(result.stdout.splitlines()[-1]).items()}


def cuda_peak(name: str, length: int, arguments: argparse.Namespace) -> float | None:
    """Peak of the CUDA allocator in MiB; None where it does not fit."""
    try:
        run = step(name, length, arguments)
        run()
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated() / 2**20
    except torch.cuda.OutOfMemoryError:
        return None
    finally:
        torch.cuda.empty_cache()


if __name__ == "__main__":
    sys.exit(main())
