"""Compile FlashAttention 4 as the backend calls it, for an H100, on tensors without memory.

test_package_backends.py runs this file with the environment that the wheel needs without a GPU.
"""

import torch
from torch._subclasses import FakeTensorMode

from megasink.attention import AttentionCall, BackwardTensors
from megasink.attention.kernels import backend_named


def _rows(heads: int) -> torch.Tensor:
    rows = torch.empty(300, 1, heads, 128, dtype=torch.bfloat16, device="cuda")
    return rows.permute(1, 2, 0, 3)


def main() -> None:
    """A sink and its gradient, GQA, the gradient of the LSE; one sequence, then 24 documents."""
    backend = backend_named("flash-attn-4")
    for cu_seqlens in (None, tuple(n * (n + 1) // 2 for n in range(25))):
        with FakeTensorMode():
            query, grad_out, key, value = (_rows(heads) for heads in (8, 8, 2, 2))
            sink_H = torch.empty(8, device="cuda")
            call = AttentionCall(None, scale=0.1, sink_H=sink_H, cu_seqlens=cu_seqlens)
            out, lse = backend.forward(query, key, value, call)
            tensors = (grad_out, query, key, value, out, lse, torch.empty_like(lse))
            found = backend.backward(BackwardTensors(*tensors), call)
        assert out.shape == query.shape
        assert lse.shape == query.shape[:3]
        assert [t.shape for t in found[:3]] == [t.shape for t in (query, key, value)]
        assert found.sink_H.shape == sink_H.shape
    print("compiled")


if __name__ == "__main__":
    main()
