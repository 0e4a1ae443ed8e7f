"""Checks for options that need a missing device, or fused kernels that are not installed."""

from argparse import Namespace
from collections.abc import Iterator

from megasink import cpu
from megasink.megatron_flags import refused
from megasink.upstream import fused

_ABSENT = "needs CUDA, but no CUDA device is present"


def problems(args: Namespace) -> Iterator[str]:
    if cpu.is_active():
        if args.distributed_backend != "gloo":
            yield (
                f"--distributed-backend {args.distributed_backend} {_ABSENT}: drop the flag (gloo "
                "is used) or run on a GPU machine"
            )
        if args.num_experts and args.moe_token_dispatcher_type == "flex":
            yield f"--moe-token-dispatcher-type flex {_ABSENT}: use allgather or alltoall"
        if args.transformer_impl == "transformer_engine":
            yield f"--transformer-impl transformer_engine {_ABSENT}: use local"
        for flag, _, why in refused(args, "without CUDA"):
            yield f"{flag} {why}: drop the flag"
        return
    yield from fused.problems(args)
