"""The oracle of the attention tests: float64, and the same formula computed plainly.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from megasink.attention import AttentionOutput, attention, reference_attention

OUTPUTS = ("out", "lse", "gate")
INPUTS = ("query", "key", "value", "sink")
# The op returns these in float32, also for 16-bit tensors. They may be off by so many roundings of
# float32: a kernel's sums, exponential and logarithm. flash-cpu needs up to 175, and an LSE rounded
# to bfloat16 is off by more than 10,000.
STATISTICS, STATISTIC_ROUNDINGS = ("lse", "gate"), 512


@dataclass(frozen=True)
class Case:
    """Inputs, and the gradients that arrive at the three outputs, in float64.

    Every value is one that the low precision under test holds exactly, so what differs afterwards
    is arithmetic alone. A gradient of None does not arrive.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sink: Tensor
    grad_out: Tensor | None
    grad_lse: Tensor | None
    grad_gate: Tensor | None

    def with_(self, **changes: Tensor | None) -> "Case":
        return replace(self, **changes)


def make_case(
    *,
    batch: int = 2,
    heads: int = 4,
    groups: int = 2,
    tokens: int = 37,
    keys: int | None = None,
    head_dim: int = 16,
    value_dim: int | None = None,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    sink: float | None = None,
    seed: int = 0,
) -> Case:
    """A random case; `sink` fixes every sink logit, and values may be narrower than keys."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        values = torch.randn(shape, generator=generator, dtype=torch.float64)
        return values.to(dtype).double().to(device)

    keys = tokens if keys is None else keys
    value_dim = head_dim if value_dim is None else value_dim
    sink_H = normal(heads, dtype=torch.float32)
    return Case(
        query=normal(batch, heads, tokens, head_dim),
        key=normal(batch, groups, keys, head_dim),
        value=normal(batch, groups, keys, value_dim),
        sink=sink_H if sink is None else torch.full_like(sink_H, sink),
        grad_out=normal(batch, heads, tokens, value_dim),
        grad_lse=normal(batch, heads, tokens, dtype=torch.float32),
        grad_gate=normal(batch, heads, tokens, dtype=torch.float32),
    )


def evaluate(
    function: Callable[..., AttentionOutput],
    case: Case,
    dtype: torch.dtype,
    variant: str,
    **options: object,
) -> dict[str, Tensor]:
    """Outputs and input gradients of `function` in `dtype`, by name, as float64."""
    tensors = [t.to(dtype).requires_grad_() for t in (case.query, case.key, case.value)]
    if variant == "sink":
        statistics = torch.promote_types(dtype, torch.float32)
        tensors.append(case.sink.to(statistics).requires_grad_())
        options["sink_H"] = tensors[-1]
    outputs = function(*tensors[:3], variant=variant, **options)
    arriving = [
        (output, grad.to(output.dtype))
        for output, grad in zip(
            outputs, (case.grad_out, case.grad_lse, case.grad_gate), strict=True
        )
        if grad is not None and output is not None and output.requires_grad
    ]
    grads = torch.autograd.grad(
        [output for output, _ in arriving], tensors, [grad for _, grad in arriving]
    )
    named = {n: t.detach().double() for n, t in zip(OUTPUTS, outputs, strict=True) if t is not None}
    for name, grad in zip(INPUTS, grads, strict=False):
        named[f"d {name}"] = grad.double()
    return named


def assert_at_most_twice_plain_error(
    ours: dict[str, Tensor],
    plain: dict[str, Tensor],
    exact: dict[str, Tensor],
    dtype: torch.dtype,
    *,
    roundings: int = 1,
) -> None:
    """Every tensor of `ours` within twice the error that `plain` has against `exact`.

    Errors are norms over the whole tensor. `roundings` units of rounding of the tensor itself are
    allowed on top. One, because the plain formula is now and then right to the last digit by luck,
    and twice nothing is nothing. Four where a token sees one or two keys: the plain softmax is then
    nearly exact (a weight of 1), while a flash backward computes the weight again from the LSE and
    takes dO . O from dO . v, a few roundings whatever the number of keys.

    The LSE and the gate of 16-bit tensors are float32 and are compared as such: the plain formula
    in 16 bits would allow an LSE rounded to bfloat16. The gradient of a sink is float32, too, but
    follows from the output, which has 16 bits.
    """
    assert ours.keys() == plain.keys() == exact.keys()
    for name, exact_tensor in exact.items():
        error = (ours[name] - exact_tensor).norm().item()
        plain_error = (plain[name] - exact_tensor).norm().item()
        epsilon = roundings * torch.finfo(dtype).eps
        if name in STATISTICS and dtype.itemsize == 2:
            epsilon, plain_error = STATISTIC_ROUNDINGS * torch.finfo(torch.float32).eps, 0.0
        floor = epsilon * exact_tensor.norm().item()
        message = f"{name}: error {error:.3g}, plain {plain_error:.3g}, floor {floor:.3g}"
        assert error <= 2 * plain_error + floor, message


def check(
    case: Case,
    dtype: torch.dtype,
    variant: str,
    *,
    backend: str = "auto",
    roundings: int | None = None,
    **mask: Any,
) -> dict[str, Tensor]:
    """Compares `attention` with the reference; returns what `attention` gave."""
    ours = evaluate(attention, case, dtype, variant, backend=backend, **mask)
    plain = evaluate(reference_attention, case, dtype, variant, **mask)
    exact = evaluate(reference_attention, case, torch.float64, variant, **mask)
    if roundings is None:
        roundings = 4 if case.key.shape[2] <= 2 or mask.get("window") == 1 else 1
    assert_at_most_twice_plain_error(ours, plain, exact, dtype, roundings=roundings)
    return ours
