"""What a command line gets wrong about the learning-rate schedule."""

from argparse import Namespace


def problems(args: Namespace) -> list[str]:
    """A sentence for each."""
    found = []
    # core/optimizer_param_scheduler.py:160 is a bare assertion.
    for unit in ("iters", "samples"):
        warmup = getattr(args, f"lr_warmup_{unit}")
        length = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
        if args.lr_warmup_fraction is None and warmup and length and warmup >= length:
            found.append(
                f"--lr-warmup-{unit} {warmup} does not end before the schedule does, after "
                f"{length}: lower it, or raise --train-{unit} or --lr-decay-{unit}"
            )
    fraction = args.lr_warmup_fraction
    if fraction is not None and not 0 <= fraction < 1:
        found.append(f"--lr-warmup-fraction {fraction} is not from 0 up to 1, 1 excluded")
    return found
