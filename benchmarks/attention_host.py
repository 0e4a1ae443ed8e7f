"""CPU time of one forward and backward of attention on the host, over PyTorch's own.

On a CPU with 16 tokens almost all of it is Python and dispatch. With --hollow it is the host
side of the CUDA path, on the hollow GPU (megasink/plan/hollow/README.md).
Implementations alternate; the ratio is that of the minima over rounds.

    python benchmarks/attention_host.py
    python benchmarks/attention_host.py --hollow
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from megasink.attention import apply_gate, attention
from megasink.plan import hollow

FLOOR = "PyTorch's attention"
CALLS = 20  # of a round


def steps(device: str) -> dict[str, Callable[[], object]]:
    """One forward and backward of each implementation."""
    cuda = device == "cuda"
    tokens, heads, groups, head_dim = (4096, 16, 16, 128) if cuda else (16, 4, 2, 64)
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16 if cuda else torch.float32}

    def leaf(*shape: int, **kind: Any) -> Tensor:
        return torch.randn(*shape, **kind).requires_grad_()

    query, key, value = (leaf(1, n, tokens, head_dim, **kind) for n in (heads, groups, groups))
    sink, logits = leaf(heads, device=device), leaf(1, heads, tokens, **kind)
    grad_out, grad_gate = torch.randn_like(query), torch.randn(1, heads, tokens, device=device)

    def floor() -> object:
        out = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return torch.autograd.grad(out, (query, key, value), grad_out)

    def ours(leaves: tuple[Tensor, ...], loss: bool = True, **options: Any) -> Callable[[], object]:
        def step() -> object:
            result = attention(query, key, value, with_gate=loss, **options)
            if not loss:
                return torch.autograd.grad(result.out_BHTD, leaves, grad_out)
            outputs = (result.out_BHTD, result.gate_BHT)
            return torch.autograd.grad(outputs, leaves, (grad_out, grad_gate))

        return step

    def headwise() -> object:
        result = attention(query, key, value, variant="vanilla", with_gate=False)
        out = apply_gate(result.out_BHTD, logits.sigmoid()[..., None], "multiply")
        return torch.autograd.grad(out, (query, key, value, logits), grad_out)

    inputs = (query, key, value)
    return {
        FLOOR: floor,
        "no loss": ours(inputs, loss=False, variant="vanilla"),
        "sink": ours((*inputs, sink), variant="sink", sink_H=sink),
        "headwise gate": headwise,
        "vanilla": ours(inputs, variant="vanilla"),
    }


def main() -> None:
    """Print the ratio of each implementation."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hollow", action="store_true", help="on the hollow GPU")
    parser.add_argument("--rounds", type=int, default=60)
    arguments = parser.parse_args()
    if arguments.hollow and not torch.cuda.is_available():
        # Its libraries have to be there before torch is.
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | hollow.environment())
    torch.set_num_threads(1)
    measured = steps("cuda" if arguments.hollow else "cpu")
    best = dict.fromkeys(measured, float("inf"))
    for _ in range(arguments.rounds):
        for name, step in measured.items():
            step()
            begin = time.process_time()
            for _ in range(CALLS):
                step()
            best[name] = min(best[name], (time.process_time() - begin) / CALLS)
    for name, seconds in best.items():
        print(f"{name:20} {1e6 * seconds:6.0f} us  {seconds / best[FLOOR]:.2f}")


if __name__ == "__main__":
    main()
