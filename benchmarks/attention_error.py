"""Gradient errors of `megasink.attention` and of the plain formula, against float64.

    python benchmarks/attention_error.py [--device cuda]

A loss on output, LSE and gate; B2 H4 G2 S200 D64. Prints a Markdown table of relative errors (norm
of the difference over norm): each cell is ours, then the reference formula run in that dtype. The
last column is dq of plain causal attention through PyTorch's own choice of kernel, no sink and no
gate. A row that fails has its error instead, and the exit code is 1. About three seconds on two CPU
cores.
"""

import argparse
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention_steps import first_line
from torch import Tensor

from megasink.attention import (
    AttentionOutput,
    AttentionRequest,
    attention,
    backend_names,
    choose_backend,
    reference_attention,
)
from megasink.attention.kernels.cuda import at_runtime
from megasink.errors import ConfigError

BATCH, HEADS, GROUPS, TOKENS, HEAD_DIM = 2, 4, 2, 200, 64


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    device = parser.parse_args().device
    print(f"torch {torch.__version__}, {device}, ours / plain formula\n")
    print("| dtype | backend | variant | dq | dk | dv | dsink | plain attention dq |")
    print("|---|---|---|---|---|---|---|---|")
    failed = 0
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for backend in backend_names():
            for variant in ("vanilla", "sink"):
                request = at_runtime(AttentionRequest(device, dtype, HEAD_DIM, variant), None)
                try:
                    choose_backend(request, backend)
                except ConfigError:
                    continue
                try:
                    cells = _errors(device, dtype, backend, variant)
                except Exception as error:
                    failed, cells = 1, [first_line(error)]
                row = (str(dtype)[6:], backend, variant, *cells)
                print(f"| {' | '.join(row)} |", flush=True)
    return failed


def _errors(device: str, dtype: torch.dtype, backend: str, variant: str) -> list[str]:
    """The cells of one row."""
    generator = torch.Generator().manual_seed(0)

    def normal(heads: int) -> Tensor:
        shape = (BATCH, heads, TOKENS, HEAD_DIM)
        return torch.randn(shape, generator=generator).to(dtype).to(device)

    inputs = [normal(HEADS), normal(GROUPS), normal(GROUPS)]
    sink = torch.randn(HEADS, generator=generator).to(device)
    grads = [normal(HEADS)] + [
        torch.randn(BATCH, HEADS, TOKENS, generator=generator).to(device) for _ in range(2)
    ]

    def gradients(call: Callable[..., AttentionOutput], dtype: torch.dtype, **options: str):
        leaves = [t.to(dtype).requires_grad_() for t in inputs]
        if variant == "sink":
            leaves.append(sink.to(torch.promote_types(dtype, torch.float32)).requires_grad_())
        outputs = call(*leaves[:3], variant=variant, sink_H=(*leaves, None)[3], **options)
        arriving = [grad.to(out.dtype) for grad, out in zip(grads, outputs, strict=True)]
        return [g.double() for g in torch.autograd.grad(outputs, leaves, arriving)]

    exact = gradients(reference_attention, torch.float64)
    ours = gradients(attention, dtype, backend=backend)
    plain = gradients(reference_attention, dtype)
    cells = [
        f"{_relative(a, e):.2e} / {_relative(p, e):.2e}"
        for a, p, e in zip(ours, plain, exact, strict=True)
    ]
    kernel, truth = (
        _plain_query_gradient([t.to(d) for t in inputs], grads[0].to(d))
        for d in (dtype, torch.float64)
    )
    return [*cells, *["-"] * (4 - len(cells)), f"{_relative(kernel, truth):.2e}"]


def _plain_query_gradient(inputs: list[Tensor], grad_out: Tensor) -> Tensor:
    query, key, value = (t.detach().requires_grad_() for t in inputs)
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return torch.autograd.grad(out, query, grad_out)[0].double()


def _relative(ours: Tensor, exact: Tensor) -> float:
    return ((ours - exact).norm() / exact.norm()).item()


if __name__ == "__main__":
    sys.exit(main())
