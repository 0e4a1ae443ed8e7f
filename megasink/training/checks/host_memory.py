"""Check that the ranks of a machine without a GPU fit into its memory, which they share."""

import copy
import os
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import psutil

from megasink import cpu

# Python with torch and Megatron, of each rank; libraries' pages that ranks share are not counted.
_PROCESS = 0.3e9
_LOGIT = 12
CHECKPOINT_BYTES = 36
"""Bytes per parameter of a rank at the peak of a gathered save, with gloo (docs/survival.md)."""
_GROUPS = Path("/sys/fs/cgroup")


def problems(args: Namespace) -> Iterator[str]:
    """Yield a problem if the ranks need more memory than is left; hybrid models pass."""
    # One rank checks for its host: the free memory shrinks as the others start.
    if not cpu.is_active() or int(os.environ.get("LOCAL_RANK", "0")):
        return
    if args.hybrid_layer_pattern is not None or args.fake_process_group:
        return
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    state, activations = bytes_of_rank(args)
    needed, left = ranks * (state + activations + _PROCESS), available()
    if needed > left:
        yield (
            f"this machine has {left / 1e9:.1f} GB of free memory, but training takes at least "
            f"{needed / 1e9:.1f} GB in {ranks} rank{'s' if ranks > 1 else ''} (weights, "
            f"gradients and optimizer {ranks * state / 1e9:.1f}, activations "
            f"{ranks * activations / 1e9:.1f}): lower --micro-batch-size or --seq-length, train "
            "a smaller model, or use GPUs (megasink plan)"
        )


def bytes_of_rank(args: Namespace) -> tuple[float, float]:
    """Return the least bytes of a rank on average: training state, and activations."""
    # By Megatron's formulas (training/theoretical_memory_usage.py), which assume bf16 and Adam.
    from megatron.training.theoretical_memory_usage import (
        compute_activation_memory_without_sp,
        compute_weight_and_optimizer_memory,
    )

    # All stages together: its most loaded one also has the embedding. It changes its arguments.
    stages = args.pipeline_model_parallel_size
    even = copy.copy(args)
    even.pipeline_model_parallel_size, even.virtual_pipeline_model_parallel_size = 1, None
    even.world_size, even.use_distributed_optimizer = args.world_size // stages, False
    even.seq_length = args.seq_length // args.context_parallel_size
    parameters = compute_weight_and_optimizer_memory(even) / 18 / stages
    half = args.bf16 or args.fp16
    weights, gradients = (
        (2, 4 if args.accumulate_allreduce_grads_in_fp32 else 2) if half else (4, 4)
    )
    optimizer = (4 if half else 0) + (8 if args.optimizer == "adam" else 0)
    if args.use_distributed_optimizer:
        optimizer /= args.data_parallel_size * args.context_parallel_size
    if args.skip_train:
        gradients = optimizer = 0
    tokens = even.seq_length * args.micro_batch_size
    logits = tokens * args.padded_vocab_size / args.tensor_model_parallel_size
    activations = compute_activation_memory_without_sp(even, 1) * (1 if half else 2)
    if args.recompute_granularity == "full":
        activations = 0
    # It counts logits once, in bf16; there are also their softmax and two gradients, in float32.
    activations += _LOGIT * logits
    if args.skip_train:
        activations = 0
    return parameters * (weights + gradients + optimizer), activations / stages


def available() -> float:
    """Return the bytes of memory that processes may still use here, within their cgroups."""
    left = [psutil.virtual_memory().available]
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        number, controllers, path = line.split(":", 2)
        if number == "0":
            folder, limit, used, cache = _GROUPS, "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            folder, limit, used = (
                _GROUPS / "memory",
                "memory.limit_in_bytes",
                "memory.usage_in_bytes",
            )
            cache = "total_inactive_file"
        else:
            continue
        group = folder / path.lstrip("/")
        for one in (group, *(p for p in group.parents if p.is_relative_to(folder))):
            if (most := _read(one / limit).strip()).isdigit():
                statistics = dict(row.split() for row in _read(one / "memory.stat").splitlines())
                free = int(most) - int(_read(one / used) or 0) + int(statistics.get(cache, 0))
                left.append(free)
    return min(left)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
