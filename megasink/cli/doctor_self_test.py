"""Compare megasink's results on this machine with their definitions, in half a minute."""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from megasink.attention import attention, choose_backend, reference_attention
from megasink.attention.kernels import AttentionRequest
from megasink.console.printable import one_line
from megasink.cpu.all_patches import TABLE
from megasink.errors import UserError
from megasink.options.extras import have_megatron

# Variants of the attention op, and whether each has sink logits.
_VARIANTS = (("vanilla", False), ("sink", True), ("off-by-one", False))
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_STEP_SECONDS = 300
_FLAGS = """
    --ranks 1 --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --position-embedding-type rope --attention-variant sink
    --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --micro-batch-size 2
    --train-iters 5 --lr 1e-2 --eval-iters 0 --num-workers 0
"""


class Check(NamedTuple):
    """One line of the self-test."""

    name: str
    passed: bool
    detail: str
    seconds: float


def checks(device_type: str, head_dim: int, window: int | None) -> Iterator[Check]:
    """Run the self-test, a check at a time; any error is a failed check."""
    yield from attention_checks(device_type, head_dim, window)
    if have_megatron():
        yield _check("upstream lines that patches depend on", upstream_lines)
        yield _check("training in Megatron", partial(training_step, device_type))


def attention_checks(device_type: str, head_dim: int, window: int | None) -> Iterator[Check]:
    """Compare attention with its definition, for each variant and type."""
    for variant, has_sinks in _VARIANTS:
        for dtype in _DTYPES:
            name = f"attention {variant} in {str(dtype).removeprefix('torch.')}"
            yield _check(
                name,
                partial(attention_error, device_type, variant, has_sinks, dtype, head_dim, window),
            )


def _check(name: str, run: Callable[[], str]) -> Check:
    begin = time.perf_counter()
    try:
        passed, detail = True, run()
    except Exception as error:
        first = str(error) if isinstance(error, UserError | AssertionError) else repr(error)
        passed, detail = False, one_line(first)
    return Check(name, passed, detail, time.perf_counter() - begin)


def attention_error(
    device_type: str,
    variant: str,
    has_sinks: bool,
    dtype: torch.dtype,
    head_dim: int,
    window: int | None,
) -> str:
    """Compare the chosen kernel's output, LSE, gate and gradients with the float64 definition."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    tensors = [drawn(2, heads, 80, head_dim) for heads in (4, 2, 2)]
    if has_sinks:
        tensors.append(drawn(4, dtype=torch.float32))
    weights = [drawn(2, 4, 80, head_dim), drawn(2, 4, 80), drawn(2, 4, 80)]

    def run(of: Callable[..., object], device: str, given: list[Tensor]) -> list[Tensor]:
        leaves = [tensor.to(device, copy=True).requires_grad_() for tensor in given]
        options = {"sink_H": leaves[3]} if has_sinks else {}
        results = list(of(*leaves[:3], variant=variant, window=window, **options))  # type: ignore[call-overload]
        arriving = [weight.to(device).double() for weight in weights]
        loss = sum((r.double() * w).sum() for r, w in zip(results, arriving, strict=True))
        gradients = torch.autograd.grad(loss, leaves)
        return [tensor.detach().cpu().double() for tensor in (*results, *gradients)]

    names = ("output", "LSE", "gate", "dq", "dk", "dv", "dsink")
    # 16-bit kernels round the weights and the output once or twice; 32-bit kernels only sum.
    tolerance = torch.finfo(dtype).eps * (16 if dtype is torch.float32 else 4)
    # The host computes the definition and the errors: the device under test may be wrong.
    definition = run(reference_attention, "cpu", [tensor.double() for tensor in tensors])
    errors = {
        name: float((got - wanted).norm() / wanted.norm())
        for name, got, wanted in zip(
            names, run(attention, device_type, tensors), definition, strict=False
        )
    }
    worst = max(errors, key=lambda name: errors[name] if errors[name] == errors[name] else 1e9)
    request = AttentionRequest(device_type, dtype, head_dim, variant, window)
    detail = f"{choose_backend(request).name}: {worst} is off by {errors[worst]:.1e} of its norm"
    assert errors[worst] <= tolerance, f"{detail}; rounding explains only {tolerance:.1e}"
    return detail


def upstream_lines() -> str:
    """Look up the upstream lines that megasink's patches depend on."""
    problems = []
    for patch in TABLE:
        try:
            patch.where()
        except UserError as error:
            problems.append(str(error))
    assert not problems, "; ".join(problems)
    return f"{len(TABLE)} patches (megasink/upstream/README.md)"


def training_step(device_type: str) -> str:
    """Train a tiny model for a few steps with ``megasink train``, on one rank."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder, "run")
        command = [sys.executable, "-W", "ignore", "-m", "megasink", "train", *_FLAGS.split()]
        command += ["--run-dir", str(run), "--device", device_type]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=_STEP_SECONDS)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"no step finished within {_STEP_SECONDS} s") from None
        lines = done.stderr.strip().splitlines()
        assert done.returncode == 0, lines[-1] if lines else f"exit code {done.returncode}"
        losses = [json.loads(line)["lm_loss"] for line in (run / "metrics.jsonl").open()]
    assert losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}"
    return f"loss {losses[0]:.4f}, then {losses[-1]:.4f}"
