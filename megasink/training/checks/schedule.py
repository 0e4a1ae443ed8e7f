"""Checks of the length of a run and its learning-rate schedule."""

from argparse import Namespace
from collections.abc import Iterator


def set_decay(args: Namespace) -> None:
    """Set the length of the decay that --lr-wsd-decay-fraction stands for."""
    fraction, unit = args.lr_wsd_decay_fraction, "samples" if args.train_samples else "iters"
    length = _length(args, unit)
    if fraction is not None and length:
        setattr(args, f"lr_wsd_decay_{unit}", max(1, round(fraction * length)))


def problems(args: Namespace) -> Iterator[str]:
    # core/optimizer_param_scheduler.py:160 is a bare assertion.
    fraction = args.lr_warmup_fraction
    for unit in ("iters", "samples"):
        warmup, length = getattr(args, f"lr_warmup_{unit}"), _length(args, unit)
        if fraction is None and warmup and length and warmup >= length:
            yield (
                f"--lr-warmup-{unit} {warmup} is not less than the length of the schedule, "
                f"{length}: lower it, or raise --train-{unit} or --lr-decay-{unit}"
            )
    if fraction is not None and not 0 <= fraction < 1:
        yield f"--lr-warmup-fraction {fraction}: use 0 or more, and less than 1"
    if args.lr is not None and args.min_lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower it"
    if args.lr_decay_style == "WSD":
        yield from _wsd(args)
    yield from _decay_fraction(args)
    given = args.save_interval is not None or "save_interval" in args.refused_flags
    if args.save and not given and not args.run_dir:
        yield "--save without --save-interval: add it, or use --run-dir"


def _length(args: Namespace, unit: str) -> int | None:
    length: int | None = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    return length


def _wsd(args: Namespace) -> Iterator[str]:
    """Check WSD; training/training.py:get_optimizer_param_scheduler scales its decay by batch."""
    unit = "samples" if args.train_samples else "iters"
    length, decay = _length(args, unit), getattr(args, f"lr_wsd_decay_{unit}")
    if args.lr_wsd_decay_fraction is not None:
        return
    if decay is None:
        yield f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}, the length of the decay"
    elif length and decay > length:
        yield f"--lr-wsd-decay-{unit} {decay} is longer than the schedule, {length}: lower it"


def _decay_fraction(args: Namespace) -> Iterator[str]:
    flag, fraction = "--lr-wsd-decay-fraction", args.lr_wsd_decay_fraction
    if fraction is None:
        return
    if not 0 < fraction <= 1:
        yield f"{flag} {fraction}: use more than 0, and at most 1"
    for unit in ("iters", "samples"):
        if getattr(args, f"lr_wsd_decay_{unit}"):
            yield f"{flag} and --lr-wsd-decay-{unit}: choose one"
