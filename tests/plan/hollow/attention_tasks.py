"""Tasks for the server: calls of attention, forward and backward.

Shapes: B batch, H query heads, G key/value groups, T tokens, D head dim.
"""

import itertools
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from megasink.attention import VARIANTS, attention, biased_attention
from megasink.cli import doctor_self_test
from tests.plan.hollow.events import Recording
from tests.plan.hollow.given import watch_rows

BIASED = ("k-bias", "kv-bias")
WINDOWS = (None, 1, 16, 100, 300)
SHAPES = ((2, 8, 2, 256, 128), (1, 4, 4, 257, 64), (1, 2, 1, 2, 64), (2, 2, 2, 1, 72))


def leaf(layout: str, batch: int, heads: int, tokens: int, head_dim: int, dtype: Any) -> Tensor:
    """[B, H, T, D], lying as Megatron's [s, b, h, d] or as [b, h, s, d]."""
    by_token = layout == "sbhd"
    shape = (tokens, batch, heads) if by_token else (batch, heads, tokens)
    made = torch.empty(*shape, head_dim, device="cuda", dtype=dtype, requires_grad=True)
    return made.permute(1, 2, 0, 3) if by_token else made


def call(variant: str, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Any:
    """Attention of a variant of `VARIANTS` or `BIASED`."""
    heads, head_dim = query.shape[1], query.shape[3]
    if variant in BIASED:
        bias_HD = torch.zeros(heads, head_dim, device="cuda", requires_grad=True)
        value_HD = bias_HD if variant == "kv-bias" else None
        return biased_attention(
            query, key, value, key_bias_HD=bias_HD, value_bias_HD=value_HD, **options
        )
    sink = torch.zeros(heads, device="cuda", requires_grad=True) if variant == "sink" else None
    return attention(query, key, value, variant=variant, sink_H=sink, **options)


def all_calls(backend: str, dtype: str, every: int) -> dict[str, Any]:
    """Every so many of variant x window x layout x shape (with and without groups) x gate."""
    problems: Counter[str] = Counter()
    kind = getattr(torch, dtype)
    combinations = list(
        itertools.product((*VARIANTS, *BIASED), WINDOWS, ("sbhd", "bhsd"), SHAPES, (True, False))
    )[::every]
    for variant, window, layout, shape, with_gate in combinations:
        batch, heads, groups, tokens, head_dim = shape
        tensors = [leaf(layout, batch, n, tokens, head_dim, kind) for n in (heads, groups, groups)]
        options = {"window": window, "backend": backend, "with_gate": with_gate}
        try:
            with Recording() as recording:
                results = [t for t in call(variant, *tensors, **options) if t is not None]
                torch.autograd.backward(results, [torch.ones_like(t) for t in results])
        except Exception as error:
            problems[f"{variant} {options} {layout} {shape}: {type(error).__name__}: {error}"] += 1
            continue
        for event in recording.events:
            if event.waits or event.crosses:
                line = event.line_in("megasink")
                problems[f"{event.name} in {line.file}: {line.text}" if line else event.name] += 1
    return {"calls": len(combinations), "problems": dict(problems)}


def given_rows(backend: str, extra: int) -> list[str]:
    """The tensors that a kernel is given whose rows are not whole vectors of 16 bytes.

    Query, key and value are views of the output of a projection with `extra` rows.
    """
    misplaced = watch_rows()
    heads, head_dim = 4, 64
    width = 3 * heads * head_dim + extra
    mixed = torch.empty(96, 2, width, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    views = mixed[..., : 3 * heads * head_dim].unflatten(-1, (3, heads, head_dim))
    query, key, value = views.permute(2, 1, 3, 0, 4)
    for variant in (*VARIANTS, *BIASED):
        out, _, gate = call(variant, query, key, value, backend=backend)
        (out.sum() + gate.sum()).backward()
    return sorted(misplaced)


def self_tests() -> tuple[list[str], list[str]]:
    """Return the names of attention checks of ``megasink doctor`` that pass, and all details."""
    checks = doctor_self_test.attention_checks("cuda", 64, None)
    done = list(checks)
    return [check.name for check in done if check.passed], [check.detail for check in done]


def launched_again() -> list[dict[str, Any]]:
    """Two rounds of the same calls: Triton's own lookups, and the arguments of its launches."""
    from triton.backends.nvidia.driver import CudaLauncher
    from triton.runtime.jit import JITFunction

    rounds: list[dict[str, Any]] = [{"lookups": 0, "launches": []} for _ in range(2)]
    launch, run = CudaLauncher.__call__, JITFunction.run

    for found in rounds:

        def noted_launch(self: Any, *given: Any, found: Any = found) -> None:
            arguments = [*given[:6], *given[9:]]  # without the profiler's
            found["launches"].append([_described(a) for a in arguments])
            launch(self, *given)

        def noted_run(self: Any, *arguments: Any, found: Any = found, **options: Any) -> Any:
            found["lookups"] += 1
            return run(self, *arguments, **options)

        CudaLauncher.__call__, JITFunction.run = noted_launch, noted_run
        for variant, shape in itertools.product(VARIANTS, SHAPES[::2]):
            batch, heads, groups, tokens, head_dim = shape
            of = (heads, groups, groups)
            tensors = [leaf("sbhd", batch, n, tokens, head_dim, torch.bfloat16) for n in of]
            results = [t for t in call(variant, *tensors, with_gate=True) if t is not None]
            torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    return rounds


def _described(argument: Any) -> Any:
    if isinstance(argument, Tensor):
        return [str(argument.dtype), list(argument.shape), list(argument.stride())]
    return repr(argument)
