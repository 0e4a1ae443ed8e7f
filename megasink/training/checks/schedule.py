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
    yield from _units(args)
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
    yield from _intervals(args)
    yield from _weight_decay(args)


def _length(args: Namespace, unit: str) -> int | None:
    length: int | None = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    return length


def _units(args: Namespace) -> Iterator[str]:
    """Report a schedule that mixes steps and samples."""
    if args.skip_train:
        return
    if args.train_iters and args.train_samples:
        yield "--train-iters and --train-samples: choose one"
        return
    unit, other = ("iters", "samples") if args.train_iters else ("samples", "iters")
    if not getattr(args, f"train_{unit}"):
        return
    for kind in ("decay", "warmup"):
        if getattr(args, f"lr_{kind}_{other}"):
            yield f"--lr-{kind}-{other} with --train-{unit}: use --lr-{kind}-{unit}"
    if args.lr_warmup_fraction is not None and getattr(args, f"lr_warmup_{unit}"):
        yield f"--lr-warmup-fraction and --lr-warmup-{unit}: choose one"


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


def _intervals(args: Namespace) -> Iterator[str]:
    """Check the intervals, each in steps."""
    save, retain = args.save_interval, args.save_retain_interval
    memory, log = args.log_memory_interval, args.log_interval
    if args.save and save is None and not args.run_dir:
        yield "--save without --save-interval: add it, or use --run-dir"
    if retain and save and retain % save:
        yield f"--save-retain-interval {retain} is not a multiple of --save-interval {save}"
    if memory is not None and log > 0 and memory % log:
        yield f"--log-memory-interval {memory} is not a multiple of --log-interval {log}"


def _weight_decay(args: Namespace) -> Iterator[str]:
    style = args.weight_decay_incr_style
    given = [value is not None for value in (args.start_weight_decay, args.end_weight_decay)]
    flags = "--start-weight-decay and --end-weight-decay"
    if style == "constant" and any(given):
        yield f"{flags} need --weight-decay-incr-style linear or cosine"
    if style != "constant" and not all(given):
        yield f"--weight-decay-incr-style {style} needs {flags}"
