"""Compare the schedule of learning rate and weight decay with that in a checkpoint."""

import contextlib
from argparse import Namespace
from pathlib import Path

from megasink.checkpoints.megatron_lm_arguments import common_state
from megasink.errors import UserError


def other_schedule(args: Namespace, checkpoint: Path) -> list[str]:
    """Report a schedule that the optimizer's scheduler would refuse once the model is built."""
    owner = args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler
    before = None
    if not (owner or args.no_load_optim or args.finetune):
        with contextlib.suppress(UserError):  # loading the checkpoint reports it
            before = common_state(checkpoint).get("opt_param_scheduler")
    if not isinstance(before, dict):
        return []
    now = [(name, value) for name, value in _scheduled(args).items() if value is not None]
    changed = [f"{k} {before[k]} -> {value}" for k, value in now if before.get(k, value) != value]
    return [of_another_schedule(", ".join(changed))] if changed else []


def of_another_schedule(what: str) -> str:
    """Return the message about a checkpoint with another schedule."""
    return (
        f"the checkpoint was trained with another schedule ({what}): add "
        "--override-opt-param-scheduler to use the new one, or "
        "--use-checkpoint-opt-param-scheduler to keep the old one"
    )


def _scheduled(args: Namespace) -> dict[str, float | str | None]:
    """Return the scheduler's values; training/training.py:get_optimizer_param_scheduler."""
    unit, batch = ("samples", 1) if args.train_samples else ("iters", args.global_batch_size)
    trained, decayed, warmup = (
        getattr(args, f"{n}_{unit}") for n in ("train", "lr_decay", "lr_warmup")
    )
    if batch is None or trained is None:
        return {}
    length, share = (decayed or trained) * batch, args.lr_warmup_fraction
    first, last = args.start_weight_decay, args.end_weight_decay
    return {
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr_decay_style": args.lr_decay_style,
        "lr_decay_steps": length,
        "lr_warmup_steps": warmup * batch if share is None else share * length,
        "start_wd": args.weight_decay if first is None else first,
        "end_wd": args.weight_decay if last is None else last,
        "wd_incr_steps": trained * batch,
    }
