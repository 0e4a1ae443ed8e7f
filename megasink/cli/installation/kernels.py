"""Which attention and gate kernels this machine runs, and why not the others."""

from dataclasses import dataclass
from typing import Any

import torch

from megasink import cpu
from megasink.attention import AttentionRequest, Choice, choose_backend, choose_gate_kernels
from megasink.attention.variants import variants

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Kernels:
    """The kernels of variants that ask for the same one, in one dtype.

    Attributes:
        variants: Names of the variants.
        dtype: Such as "bfloat16".
        attention, gates: The kernels that run, with a reason for each other one.
    """

    variants: tuple[str, ...]
    dtype: str
    attention: Choice
    gates: Choice

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "variants": list(self.variants),
            "dtype": self.dtype,
            "attention": self.attention.name,
            "not_attention": self.attention.reasons,
            "gates": self.gates.name,
            "not_gates": self.gates.reasons,
        }


def device() -> tuple[str, str]:
    """Return ("cuda" or "cpu", what to tell about it)."""
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return "cuda", f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}"
    return "cpu", cpu.unusable_gpu() or "no CUDA device: using the CPU platform"


def kernels(device_type: str, head_dim: int, window: int | None) -> list[Kernels]:
    """Return the kernels of every variant and dtype, with the balance gradient.

    Args:
        device_type: "cuda" or "cpu".
        head_dim: Head dimension.
        window: Sliding window in tokens, including the token itself; None for none.
    """
    named: dict[str, list[str]] = {}
    for record in variants():
        named.setdefault("sink" if record.always_gated else "vanilla", []).append(record.name)
    found = []
    for variant, names in named.items():
        for dtype in DTYPES:
            request = AttentionRequest(
                device_type=device_type,
                dtype=dtype,
                head_dim=head_dim,
                variant=variant,
                window=window,
                compute_capability=(
                    torch.cuda.get_device_capability() if device_type == "cuda" else None
                ),
            )
            short = str(dtype).removeprefix("torch.")
            found.append(
                Kernels(tuple(names), short, choose_backend(request), choose_gate_kernels(request))
            )
    return found
