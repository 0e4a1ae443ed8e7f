"""Checks for options that need a missing device, or fused kernels that are not installed."""

from argparse import Namespace

from megasink import platform
from megasink.upstream import fused

# Parts of the trainer that call the CUDA driver directly.
_NEED_CUDA = {
    "profile": "--profile",
    "record_memory_history": "--record-memory-history",
    "log_straggler": "--log-straggler",
}


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    found = []
    if platform.is_active():
        if args.distributed_backend != "gloo":
            found.append(
                f"--distributed-backend {args.distributed_backend} needs CUDA and no CUDA device "
                "is present: drop the flag (gloo is used) or run on a GPU machine"
            )
        if args.transformer_impl == "transformer_engine":
            found.append(
                "--transformer-impl transformer_engine needs CUDA and no CUDA device is present: "
                "use local"
            )
        for name, flag in _NEED_CUDA.items():
            if getattr(args, name):
                found.append(f"{flag} needs CUDA and no CUDA device is present: drop the flag")
        return found
    return fused.problems(args)
