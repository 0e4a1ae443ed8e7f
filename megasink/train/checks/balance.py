"""Checks of the head-balance loss."""

from argparse import Namespace
from typing import get_args

from megasink.config import Scope


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    found = []
    coeff = args.head_balance_coeff
    if coeff < 0:
        found.append(f"--head-balance-coeff {coeff} is negative: use 0 or more")
    if args.head_balance_scope not in get_args(Scope):
        found.append(
            f"--head-balance-scope {args.head_balance_scope!r} is unknown: "
            f"choose {', '.join(get_args(Scope))}"
        )
    for name in ("warmup_iters", "decay_iters", "shared_heads", "shared_refresh"):
        value = getattr(args, f"head_balance_{name}")
        if value < 0:
            found.append(f"--head-balance-{name.replace('_', '-')} {value} is negative")
    heads, shared = args.num_attention_heads, args.head_balance_shared_heads
    if heads and shared > heads - 2:
        found.append(
            f"--head-balance-shared-heads {shared} of {heads} heads leaves fewer than two to even "
            f"out: use at most {heads - 2}"
        )
    if args.head_balance_shared_refresh and not shared:
        found.append("--head-balance-shared-refresh without --head-balance-shared-heads: give both")
    if args.transformer_impl == "inference_optimized":
        found.append(
            "--transformer-impl inference_optimized has no backward pass and cannot train: "
            "use local or transformer_engine"
            + (" (or set --head-balance-coeff 0)" if coeff else "")
        )
    return found
