"""Choose the form of the distributed optimizer's state in checkpoints by the hosts' memory.

"Fully reshardable" state loads under any layout, but every data-parallel rank gathers its whole
model-parallel shard in float32 for each save and load (core/optimizer/distrib_optimizer.py:1690).
"dp_reshardable" state is written as it is, and loads under another data parallelism alone.
"""

import os
import re
from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch

from megasink.errors import UserError
from megasink.training.checks.memory import available

# For each parameter of a rank: at the peak of a save, with gloo (docs/survival.md).
BYTES = 36
_SHARE = 0.5
_OTHER_SHARDS = re.compile(r"shape mismatch .* key optimizer\.distributed\.dp_group_idx_")

# Megatron's own sentences, which contain both values.
_OTHER_MODEL = re.compile(r"[Hh]ybrid (layer pattern|model).*GPT checkpoint|GPT checkpoint.*hybrid")


def choosing_by_size(args: Namespace) -> Callable[[Any], Any]:
    """Return a hook for ``pre_wrap_hooks`` that sets --dist-ckpt-optim-fully-reshardable."""

    def choose(models: Any) -> Any:
        if args.distrib_optim_fully_reshardable_mem_efficient:
            args.dist_ckpt_optim_fully_reshardable = True
        if args.dist_ckpt_optim_fully_reshardable is None:
            args.dist_ckpt_optim_fully_reshardable = _fits(args, models)
        return models

    return choose


def _fits(args: Namespace, models: Any) -> bool:
    """Return whether it fits on every host. Performs one all-reduce."""
    if not args.use_distributed_optimizer or args.fake_process_group:
        return True
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    needed = BYTES * ranks * sum(p.numel() for model in models for p in model.parameters())
    worst = torch.tensor([needed / max(available(), 1), needed], dtype=torch.float64, device="cuda")
    torch.distributed.all_reduce(worst, op=torch.distributed.ReduceOp.MAX)
    share, most = worst.tolist()
    if args.rank == 0 and share > _SHARE:
        print(
            f"checkpoints: gathering the optimizer's state would take {most / 1e9:.3g} GB of a "
            f"host's memory, {share:.0%} of the free memory. It is saved in shards instead, "
            "which allow only the data parallelism to change "
            "(--dist-ckpt-optim-fully-reshardable forces gathering)",
            flush=True,
        )
    return share <= _SHARE


def explained(error: BaseException) -> UserError | None:
    """Return the advice for a checkpoint of shards that do not fit, if that is the error."""
    if _OTHER_SHARDS.search(str(error)):
        return UserError(
            "the optimizer's shards in the checkpoint belong to other parameters, because megasink "
            "0.2 and earlier kept sinks in float32 in a bf16 model. Save one more checkpoint with "
            "that version and --dist-ckpt-optim-fully-reshardable, or pass --no-load-optim to "
            "continue without the optimizer state"
        )
    if _OTHER_MODEL.search(str(error)):
        return UserError(str(error))
    if "sharding type dp_reshardable" not in str(error):
        return None
    return UserError(
        "the checkpoint holds the optimizer's state in shards, which allow only the data "
        "parallelism to change: use the previous --tensor-model-parallel-size and "
        "--pipeline-model-parallel-size (and --dist-ckpt-optim-fully-reshardable, to save the "
        "next checkpoint for any layout), or pass --no-load-optim to drop the optimizer "
        "state"
    )
