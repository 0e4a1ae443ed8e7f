"""What megasink adds around a flash kernel, counted; and the time it takes by a model.

    python benchmarks/attention_cost.py

Runs the code of the CUDA path on tensors without memory (no GPU is needed, and none is used) and
counts, over one forward and backward of attention, every launch beside the flash kernel and the
bytes it moves, for PyTorch's operations and for the Triton kernels. **Nothing is measured.** The
model, for each launch:

    time = bytes / (0.88 * bandwidth) + 2 us

0.88 is the share of the memory's bandwidth that copies reach; 2 us is the gap and the ramp of a
kernel on a stream that the host keeps filled. Caches are taken to hold nothing. The plain kernel is
taken to run at one rate for every length, which flatters it where sequences are short: 180 TFLOP/s
on an A100 (FlashAttention 2), 500 on an H100 (FlashAttention 3), of 3.5 * 2 * S * S * H * D
operations, or 3.5 * 4 * (T * S - T * T / 2) * H * D for T queries at the end of S keys; of packed
documents it is the sum over them.

Kernels of packages are replaced by functions that return empty tensors.

A PyTorch operation that is no view counts as one launch (a sum of many rows may be two). Bytes are
those of its distinct elements; a channel written alone counts as the 32 bytes of its sector, read
and written.
"""

import argparse
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from importlib import import_module
from itertools import pairwise
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from attention_packages import packages
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasink.attention import (
    AttentionCall,
    apply_gate,
    first_key_gate,
    gate_values,
)
from megasink.attention.call import Arriving, Slot, Slotted
from megasink.attention.gate_kernels import explicit_gate_launch, gate_kernels_named, slot_launch
from megasink.attention.op import run_backward, run_forward

BANDWIDTH_SHARE, LAUNCH_SECONDS, SECTOR = 0.88, 2e-6, 32
# Name -> bandwidth in bytes/s, rate of the plain kernel in FLOP/s.
DEVICES = {"A100": (2.0e12, 180e12), "H100": (3.35e12, 500e12)}
KERNEL = "flash-cuda"
# 24 documents of 14 to 328 tokens in 4,096.
PACK = tuple(round(4096 * n * (n + 1) / 600) for n in range(25))


class Call(NamedTuple):
    """A call of one kernel, with Triton's gate kernels or its own sink."""

    name: str
    kernel: str
    slot: Slot
    queries: int = 4096
    keys: int = 4096
    loss: bool = True
    learns: bool = True  # whether the slot's logit does
    documents: tuple[int, ...] | None = None

    def pairs(self) -> float:
        """Query and key pairs of the plain kernel."""
        lengths = [b - a for a, b in pairwise(self.documents)] if self.documents else None
        if lengths is None:
            return self.queries * self.keys - self.queries**2 / 2
        return sum(length**2 / 2 for length in lengths)


CALLS = (
    Call("sink", "flash-attn-4", Slot.GIVEN),
    Call("sink, no loss", "flash-attn-4", Slot.GIVEN, loss=False),
    Call("off-by-one", "flash-attn-4", Slot.GIVEN, learns=False),
    Call("sink", "transformer-engine", Slot.GIVEN),
    Call("sink, no loss", "transformer-engine", Slot.GIVEN, loss=False),
    Call("vanilla", "flash-attn-4", Slot.FIRST_KEY),
    Call("vanilla", "flash-attn-2", Slot.FIRST_KEY),
    Call("sink", "flash-attn-4+triton", Slot.GIVEN),
    Call("sink, no loss", "flash-cuda", Slot.GIVEN, loss=False),
    Call("off-by-one", "flash-cuda", Slot.GIVEN, learns=False),
    Call("vanilla, statistics", "flash-cuda", Slot.FIRST_KEY, loss=False),
    Call("sink, 2,048 queries of 4,096 keys", "flash-cuda", Slot.GIVEN, 2048, 4096),
    Call("sink, 512 queries of 4,096 keys", "flash-cuda", Slot.GIVEN, 512, 4096),
    Call("sink, 4,096 queries of 32,768 keys", "flash-cuda", Slot.GIVEN, 4096, 32768),
    Call("vanilla, 512 queries of 4,096 keys", "flash-cuda", Slot.FIRST_KEY, 512, 4096),
    Call("sink, 512 queries of 4,096 keys", "flash-attn-4", Slot.GIVEN, 512, 4096),
    Call("sink, 24 documents", "flash-cuda", Slot.GIVEN, documents=PACK),
    Call("sink, 24 documents", "flash-attn-4", Slot.GIVEN, documents=PACK),
    Call("sink, 24 documents", "transformer-engine", Slot.GIVEN, documents=PACK),
    Call("vanilla, 24 documents", "flash-cuda", Slot.FIRST_KEY, documents=PACK),
    Call("vanilla, 24 documents", "flash-attn-4", Slot.FIRST_KEY, documents=PACK),
)
NOT_READ = ("copy_", "fill_", "zero_")


@dataclass
class Count:
    """Launches and their bytes."""

    launches: int = 0
    bytes: int = 0
    names: list[str] = field(default_factory=list)

    def add(self, name: str, size: int) -> None:
        self.launches, self.bytes = self.launches + 1, self.bytes + size
        self.names.append(f"{name} {size / 2**20:.2f} MiB")

    def reset(self) -> None:
        self.launches, self.bytes, self.names = 0, 0, []

    def seconds(self, bandwidth: float) -> float:
        return self.launches * LAUNCH_SECONDS + self.bytes / (BANDWIDTH_SHARE * bandwidth)


def distinct_bytes(tensor: Tensor | None) -> int:
    """Bytes of the elements that a tensor's view reaches; broadcast dimensions count once."""
    if tensor is None:
        return 0
    size = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size


class Operations(TorchDispatchMode):
    """Counts PyTorch's operations, but for the attention kernel."""

    def __init__(self, count: Count):
        super().__init__()
        self.count = count

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name, returns = function._schema.name.removeprefix("aten::"), function._schema.returns
        views = [r.alias_info is not None and not r.alias_info.is_write for r in returns]
        allocates = name.startswith(("empty", "new_empty")) or name in ("detach", "_unsafe_view")
        if all(views) or allocates or name.startswith(("_flash", "prim::", "promote_types")):
            return result
        inputs = args[1:] if name in NOT_READ else args
        read = [t for t in tree_leaves(inputs) if isinstance(t, Tensor)]
        written = [t for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.count.add(name, sum(map(distinct_bytes, [*read, *written])))
        return result


# Of the Triton kernels, by name: what they read and write whole if it is given.
WHOLE = {
    "close_slot_kernel": "rows_out rows_lse out lse gate weight logit value query key",
    "open_slot_kernel": "gate weight grad_gate grad_lse value query kept lse_grad logit_grad "
    "logit_sum value_sum key_sum",
    "restore_kernel": "kept",
    "share_kernel": "lse gate weight logit query starts",
    "first_query_kernel": "rows grad_query logit_grad key",
    "first_rows_kernel": "key_sum value_sum",
    "apply_gate_kernel": "x score out gate",
    "apply_gate_backward_kernel": "grad_out x score grad_gate grad_x grad_score",
}


class Launches:
    """Takes a Triton kernel's place and counts."""

    def __init__(self, name: str, kernel: Any, count: Count):
        self.name, self.kernel, self.count = name, kernel, count

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*arguments: Any, **named: Any) -> None:
            given = dict(zip(self.kernel.arg_names, arguments, strict=False)) | named
            size = sum(distinct_bytes(given[name]) for name in WHOLE[self.name].split())
            if given.get("kept") is not None:  # the rows' leading channels
                rows = given["out"].numel() // given["out"].shape[-1]
                size += rows * SECTOR * (1 if self.name == "open_slot_kernel" else 2)
            sums = ("logit_grad", "logit_sum", "value_sum")
            rows = self.name == "open_slot_kernel" and not given["OWN_SINK"]
            if rows and any(given[n] is not None for n in sums):
                size += distinct_bytes(given["grad_out"]) + distinct_bytes(given["out"])
            self.count.add(self.name, size)

        return launched


@contextmanager
def counting(without_memory: AbstractContextManager[Any] | None = None) -> Iterator[Count]:
    """Within, CUDA tensors have no memory, and launches are counted."""
    from megasink.attention import gate_kernels

    names = ("triton_slot", "triton_first_key", "triton_shares", "triton_explicit")
    modules = [import_module(f"{gate_kernels.__name__}.{name}") for name in names]

    count = Count()
    with (
        without_memory or FakeTensorMode(),
        Operations(count),
        _patches(count, *modules),
    ):
        yield count


@contextmanager
def _patches(count: Count, *modules: Any) -> Iterator[None]:
    saved = [
        (module, name, getattr(module, name))
        for module in modules
        for name in WHOLE
        if hasattr(module, name)
    ]
    for module, name, kernel in saved:
        setattr(module, name, Launches(name, kernel, count))
    try:
        with (
            patch.object(slot_launch, "device_of", lambda _: nullcontext()),
            patch.object(explicit_gate_launch, "device_of", lambda _: nullcontext()),
            patch("megasink.attention.kernels.cuda.device_of", lambda _: nullcontext()),
        ):
            yield
    finally:
        for module, name, kernel in saved:
            setattr(module, name, kernel)


def _rows(tokens: int, heads: int, head_dim: int, device: str = "cuda") -> Tensor:
    rows = torch.empty(tokens, 1, heads, head_dim, dtype=torch.bfloat16, device=device)
    return rows.permute(1, 2, 0, 3)


def softmax_gate(
    slot: Slot,
    kernel: str,
    shape: tuple[int, int, int],
    *,
    keys: int | None = None,
    loss: bool = True,
    learns: bool = True,
    documents: tuple[int, ...] | None = None,
) -> Count:
    """Forward and backward of a call, with the balance loss on its gate or without.

    Without it, vanilla attention takes its gate from the LSE, for statistics.
    """
    with packages(), counting() as count:
        query, grad_out = (_rows(*shape) for _ in range(2))
        key, value = (_rows(keys or shape[0], *shape[1:]) for _ in range(2))
        logit = torch.empty(1, shape[1], 1, device="cuda") if slot == Slot.GIVEN else None
        if slot == Slot.FIRST_KEY and not loss:
            slot = Slot.NONE
        slotted = Slotted(query, key, value, logit)
        call = AttentionCall(None, 0.1, slot=slot, backend=kernel, needs_gate_gradient=loss)
        call = call._replace(cu_seqlens=documents)
        for _ in range(2):  # of which the second finds what is cached
            count.reset()
            results = run_forward(None, *slotted, *call)
            grad_gate = None
            if loss:
                # The balance loss sends every token of a head the same gradient.
                grad_gate = torch.empty(1, shape[1], 1, device="cuda")
                grad_gate = grad_gate.expand(results.gate_BHT.shape)
            elif slot == Slot.NONE:
                first_key_gate(query, key, results.lse_BHT)
            wanted = slotted if learns else slotted._replace(slot_logit=None)
            run_backward(Arriving(grad_out, None, grad_gate), wanted, results, call, lends=True)
    return count


def explicit_gate(width: int, gates: str, shape: tuple[int, int, int]) -> Count:
    """Forward and backward of a sigmoid gate on the output, with the balance loss on it."""
    with counting(nullcontext()) as count:  # autograd asks the driver about a fake CUDA device
        x, score, grad_out = (_rows(*shape[:2], n, "meta") for n in (shape[2], width, shape[2]))
        x, score = x.requires_grad_(), score.requires_grad_()
        rows = gate_kernels_named(gates).gate_rows
        if rows is None:
            gate = gate_values(score, "sigmoid")
            out = apply_gate(x, gate, "multiply")
            gate = gate[..., 0] if width == 1 else gate.mean(-1)
        else:
            out, gate = rows(x, score, "sigmoid", "multiply")
        grad_gate = torch.empty(1, shape[1], 1, device="meta").expand(gate.shape)
        torch.autograd.grad([out, gate], [x, score], [grad_out, grad_gate])
    return count


def share(count: Count, device: str, shape: tuple[int, int, int], pairs: float = 0.0) -> float:
    """Time of the launches over that of the plain kernel; without pairs, of a causal square."""
    (bandwidth, rate), (queries, heads, head_dim) = DEVICES[device], shape
    pairs = pairs or queries**2 / 2
    return count.seconds(bandwidth) / (3.5 * 4 * pairs * heads * head_dim / rate)


def calls(heads: int = 16, head_dim: int = 128) -> Iterator[str]:
    """Yield a row of the table for each of `CALLS`."""
    for call in CALLS:
        shape = (call.queries, heads, head_dim)
        options = {name: getattr(call, name) for name in ("keys", "loss", "learns", "documents")}
        count = softmax_gate(call.slot, call.kernel, shape, **options)
        cells = [call.name, call.kernel, f"{count.launches}", f"{count.bytes / 2**20:,.1f}"]
        packed = call.documents is not None and call.kernel == "transformer-engine"
        totals = [f"{1 + share(count, device, shape, call.pairs()):.3f}" for device in DEVICES]
        if packed or call.kernel.startswith("flash-attn-4"):  # Hopper and later
            totals[0] = "-"
        cells += totals
        yield f"| {' | '.join(cells)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**n for n in range(10, 16)])
    parser.add_argument("--heads", type=int, default=16)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--launches", action="store_true", help="list those of the first length")
    arguments = parser.parse_args()
    heads, head_dim = arguments.heads, arguments.head_dim
    variants = {
        "sink": lambda gates, shape: softmax_gate(Slot.GIVEN, f"{KERNEL}+{gates}", shape),
        "vanilla": lambda gates, shape: softmax_gate(Slot.FIRST_KEY, f"{KERNEL}+{gates}", shape),
        "gated, headwise": lambda *given: explicit_gate(1, *given),
        "gated, elementwise": lambda *given: explicit_gate(head_dim, *given),
    }
    print(f"B1 H{heads} D{head_dim} bf16, forward and backward; predicted, not measured\n")
    for name, run in variants.items():
        print(f"**{name}**\n")
        print("| S | launches: torch, Triton | MiB | over the kernel on A100 | on H100 |")
        print("|---|---|---|---|---|")
        for tokens in arguments.lengths:
            counts = [run(gates, (tokens, heads, head_dim)) for gates in ("torch", "triton")]
            cells = [", ".join(f"{count.launches}" for count in counts)]
            cells.append(", ".join(f"{count.bytes / 2**20:,.0f}" for count in counts))
            for device in DEVICES:
                shares = [share(count, device, (tokens, heads, head_dim)) for count in counts]
                cells.append(", ".join(f"{part:.1%}" for part in shares))
            print(f"| {tokens} | {' | '.join(cells)} |")
            if arguments.launches and tokens == arguments.lengths[0]:
                for count in counts:
                    print(*count.names, sep="\n", end="\n\n")
        print()
    print("| call | kernel | launches | MiB | total over the kernel on A100 | on H100 |")
    print("|---|---|---|---|---|---|", *calls(heads, head_dim), sep="\n")


if __name__ == "__main__":
    main()
