"""Checks of the head-balance loss."""

from argparse import Namespace
from collections.abc import Iterator


def problems(args: Namespace) -> Iterator[str]:
    coeff = args.head_balance_coeff
    if coeff < 0:
        yield f"--head-balance-coeff {coeff} is negative: use 0 or more"
    for name in ("warmup-iters", "decay-iters", "shared-heads", "shared-refresh"):
        value = getattr(args, f"head_balance_{name.replace('-', '_')}")
        if value < 0:
            yield f"--head-balance-{name} {value} is negative: use 0 or more"
    heads, shared = args.num_attention_heads, args.head_balance_shared_heads
    if heads and 0 < shared > heads - 2:
        yield (
            f"--head-balance-shared-heads {shared} of {heads} heads leaves fewer than two to "
            f"balance: use at most {max(0, heads - 2)}"
        )
    if args.head_balance_shared_refresh and not shared:
        yield "--head-balance-shared-refresh without --head-balance-shared-heads: give both"
