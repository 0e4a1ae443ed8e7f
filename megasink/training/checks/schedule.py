"""Compare the schedule of learning rate and weight decay with that in a checkpoint."""

import contextlib
from argparse import Namespace
from pathlib import Path

from megasink.checkpoints.megatron_lm_arguments import common_state
from megasink.errors import UserError


def other_schedule(args: Namespace, checkpoint: Path) -> list[str]:
    """Report a schedule that the optimizer's scheduler would refuse once the model is built."""
    owners = (args.override_opt_param_scheduler, args.use_checkpoint_opt_param_scheduler)
    if any((*owners, args.no_load_optim, args.finetune)):
        return []
    before = None
    with contextlib.suppress(UserError):  # loading the checkpoint reports it
        before = common_state(checkpoint).get("opt_param_scheduler")
    if not isinstance(before, dict):
        return []
    now = {name: value for name, value in _scheduled(args).items() if value is not None}
    different = [
        f"{name} {before[name]:{_form(before[name])}} -> {now[name]:{_form(now[name])}}"
        for name in now
        if name in before and before[name] != now[name]
    ]
    return [of_another_schedule(", ".join(different))] if different else []


def of_another_schedule(what: str) -> str:
    """Return the message about a checkpoint with another schedule."""
    return (
        f"the checkpoint was trained with another schedule ({what}): add "
        "--override-opt-param-scheduler to use the new one, or "
        "--use-checkpoint-opt-param-scheduler to keep the old one"
    )


def _scheduled(args: Namespace) -> dict[str, float | str | None]:
    """Return the scheduler's values; training/training.py:get_optimizer_param_scheduler."""
    unit = "samples" if args.train_samples else "iters"
    batch = 1 if args.train_samples else args.global_batch_size
    trained = getattr(args, f"train_{unit}")
    length = getattr(args, f"lr_decay_{unit}") or trained
    warmup = getattr(args, f"lr_warmup_{unit}")
    if batch is None or trained is None:
        return {}
    share, decay = args.lr_warmup_fraction, args.weight_decay
    return {
        "max_lr": args.lr,
        "min_lr": args.min_lr,
        "lr_warmup_steps": warmup * batch if share is None else share * length * batch,
        "lr_decay_steps": length * batch,
        "lr_decay_style": args.lr_decay_style,
        "start_wd": args.start_weight_decay if args.start_weight_decay is not None else decay,
        "end_wd": args.end_weight_decay if args.end_weight_decay is not None else decay,
        "wd_incr_steps": trained * batch,
    }


def _form(value: object) -> str:
    return "" if isinstance(value, str) else "g" if isinstance(value, float) else ","
