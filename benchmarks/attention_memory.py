"""Peak memory and time of attention with exact gate gradients, on a CPU.

    python benchmarks/attention_memory.py [--dtype bfloat16]

Forward and backward, B1 H8 D64, gradients on output and gate. Memory is the growth of the peak
resident set in a fresh process per row, at S 4096. Times are medians of interleaved pairs with
PyTorch's own causal attention. About two minutes on two quiet cores.
"""

import argparse
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F

from megasink.attention import attention, reference_attention

HEADS, HEAD_DIM, MEMORY_TOKENS, PAIRS = 8, 64, 4096, 9
KINDS = {
    "plain kernel, no gate": "plain",
    "megasink sink": "sink",
    "megasink sink, loss on the gate": "sink+gate",
    "megasink vanilla, loss on the gate": "vanilla+gate",
    "megasink eager backend, sink, loss on the gate": "eager",
    "S x S reference, sink, loss on the gate": "reference",
}


def step(kind: str, tokens: int, dtype: torch.dtype) -> Callable[[], None]:
    """One forward and backward, on tensors that lie as Megatron's do."""
    leaves = [
        torch.randn(tokens, 1, HEADS, HEAD_DIM).to(dtype).permute(1, 2, 0, 3).requires_grad_()
        for _ in range(3)
    ]
    grad_out = torch.randn(tokens, 1, HEADS, HEAD_DIM).to(dtype).permute(1, 2, 0, 3)
    grad_gate = torch.randn(1, HEADS, tokens)
    sink = torch.zeros(HEADS, requires_grad=True)

    def plain() -> None:
        out = F.scaled_dot_product_attention(*leaves, is_causal=True)
        torch.autograd.grad(out, leaves, grad_out)

    def ours() -> None:
        call = reference_attention if kind == "reference" else attention
        options = {"backend": "eager"} if kind == "eager" else {}
        vanilla = kind.startswith("vanilla")
        if not vanilla:
            options |= {"variant": "sink", "sink_H": sink}
        result = call(*leaves, **options)
        outputs, grads = [result.out_BHTD], [grad_out]
        if kind != "sink":
            outputs.append(result.gate_BHT)
            grads.append(grad_gate.to(result.gate_BHT.dtype))
        torch.autograd.grad(outputs, leaves if vanilla else [*leaves, sink], grads)

    return plain if kind == "plain" else ours


def peak_mib(kind: str, dtype: torch.dtype) -> float:
    """Growth of this process's peak resident set, in MiB (Linux counts in KiB)."""
    step(kind, 64, dtype)()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    step(kind, MEMORY_TOKENS, dtype)()
    return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    dtype = getattr(torch, arguments.dtype)
    if arguments.peak:
        print(peak_mib(arguments.peak, dtype))
        return

    threads = torch.get_num_threads()
    print(f"torch {torch.__version__}, {threads} threads, {arguments.dtype}, B1 H8 D64\n")
    print(f"| forward and backward | peak MiB at S {MEMORY_TOKENS} |")
    print("|---|---|")
    for label, kind in KINDS.items():
        command = [sys.executable, __file__, "--dtype", arguments.dtype, "--peak", kind]
        peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        print(f"| {label} | {peak:.0f} |", flush=True)

    timed = {label: kind for label, kind in KINDS.items() if kind not in ("eager", "reference")}
    print(f"\n| S | {' | '.join(timed)} |")
    print("|---|" + "---|" * len(timed))
    for tokens in (1024, 2048, 4096):
        steps = [step(kind, tokens, dtype) for kind in timed.values()]
        seconds: list[list[float]] = [[] for _ in steps]
        for run in steps:
            run()
        for _ in range(PAIRS):
            for run, record in zip(steps, seconds, strict=True):
                start = time.perf_counter()
                run()
                record.append(time.perf_counter() - start)
        cells = [f"{statistics.median(seconds[0]) * 1e3:.0f} ms"]
        for record in seconds[1:]:
            ratio = statistics.median(a / b for a, b in zip(record, seconds[0], strict=True))
            cells.append(f"{ratio:.3f}x")
        print(f"| {tokens} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
