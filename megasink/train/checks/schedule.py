"""Checks of the length of a run and its learning-rate schedule."""

from argparse import Namespace


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    found = _units(args)
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
    if args.lr is not None and args.min_lr is not None and args.min_lr > args.lr:
        found.append(f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower it")
    if args.lr_decay_style == "WSD":
        found += _wsd(args)
    return found + _intervals(args) + _weight_decay(args)


def _units(args: Namespace) -> list[str]:
    """Report a schedule that mixes steps and samples."""
    if args.skip_train:
        return []
    if args.train_iters and args.train_samples:
        return ["--train-iters and --train-samples: choose one"]
    unit, other = ("iters", "samples") if args.train_iters else ("samples", "iters")
    found = []
    if getattr(args, f"train_{unit}"):
        found = [
            f"--lr-{kind}-{other} with --train-{unit}: use --lr-{kind}-{unit}"
            for kind in ("decay", "warmup")
            if getattr(args, f"lr_{kind}_{other}")
        ]
        if args.lr_warmup_fraction is not None and getattr(args, f"lr_warmup_{unit}"):
            found.append(f"--lr-warmup-fraction and --lr-warmup-{unit}: choose one")
    return found


def _wsd(args: Namespace) -> list[str]:
    """Check WSD; training/training.py:get_optimizer_param_scheduler scales its decay by batch."""
    unit = "samples" if args.train_samples else "iters"
    length = getattr(args, f"lr_decay_{unit}") or getattr(args, f"train_{unit}")
    decay = getattr(args, f"lr_wsd_decay_{unit}")
    if decay is None:
        return [f"--lr-decay-style WSD needs --lr-wsd-decay-{unit}: the length of its decay"]
    if length and decay > length:
        return [f"--lr-wsd-decay-{unit} {decay} is longer than the schedule, {length}: lower it"]
    return []


def _intervals(args: Namespace) -> list[str]:
    """Check the intervals, each in steps."""
    save, retain = args.save_interval, args.save_retain_interval
    memory, log = args.log_memory_interval, args.log_interval
    wrong = {
        "--save without --save-interval: give it, or use --run-dir": (
            args.save and save is None and not args.run_dir
        ),
        f"--save-retain-interval {retain} is no multiple of --save-interval {save}": (
            retain and save and retain % save
        ),
        f"--log-memory-interval {memory} is no multiple of --log-interval {log}": (
            memory is not None and log > 0 and memory % log
        ),
    }
    return [text for text, is_so in wrong.items() if is_so]


def _weight_decay(args: Namespace) -> list[str]:
    style, ends = args.weight_decay_incr_style, ("start_weight_decay", "end_weight_decay")
    flags = "--start-weight-decay and --end-weight-decay"
    given = [getattr(args, name) is not None for name in ends]
    if style == "constant" and any(given):
        return [f"{flags} need --weight-decay-incr-style linear or cosine"]
    if style != "constant" and not all(given):
        return [f"--weight-decay-incr-style {style} needs {flags}"]
    return []
