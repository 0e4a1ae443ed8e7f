"""Check the settings of every run: required flags, numbers, length, rates and checkpoints."""

import math
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import fields

from megasink.attention.variants import is_variant, names
from megasink.config import AttentionOptions
from megasink.errors import unknown_name
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import KNOWN, having
from megasink.options.run_options import OPTIONS
from megasink.plugins import advice

# Alternatives; the first two are old names.
_OR = {"num_layers": "encoder_num_layers", "seq_length": "encoder_seq_length"}
_OR |= {"train_iters": "train_samples"}


def problems(args: Namespace) -> Iterator[str]:
    facts = ("needed",) if args.skip_train else ("needed", "needed-to-train")
    wanted = [[name, *([_OR[name]] if name in _OR else [])] for name in having(*facts)]
    missing = [
        " or ".join(flag_of(name) for name in names if not name.startswith("encoder_"))
        for names in wanted
        if all(getattr(args, name) is None for name in names)
        and not args.refused_flags.intersection(names)
    ]
    if missing:
        yield f"missing: {', '.join(missing)}"
    if args.recipe:  # starting a run has replaced it by its flags
        yield "--recipe works only in megasink train, megasink plan and the flags of a grid"
    yield from ranges(args)
    yield from _schedule(args)
    if args.async_save and not (args.run_dir or args.save):
        yield "--async-save needs --run-dir or --save: add one"
    yield from _rates(args)


def ranges(args: Namespace) -> Iterator[str]:
    """Check the numbers of some arguments, or of all."""
    for name, value in vars(args).items():
        if value is None or (name == "num_experts" and value == 0):  # a dense model in Megatron
            continue
        known = KNOWN.get(name, frozenset())
        if isinstance(value, float) and not math.isfinite(value):
            yield f"{flag_of(name)} {value}: give a finite number"
        elif "count" in known and value < 1:
            yield f"{flag_of(name)} {value}: use 1 or more"
        elif "amount" in known and value < 0:
            yield f"{flag_of(name)} {value} is negative: use 0 or more"
        elif "positive" in known and value <= 0:
            yield f"{flag_of(name)} {value}: use more than 0"
        elif "share" in known and not 0 <= value < 1:
            yield f"{flag_of(name)} {value}: use 0 or more, and less than 1"


def _schedule(args: Namespace) -> Iterator[str]:
    # core/optimizer_param_scheduler.py:160 is a bare assertion.
    fraction = args.lr_warmup_fraction
    for unit in ("iters", "samples"):
        warmup, length = getattr(args, f"lr_warmup_{unit}"), _length(args, unit)
        if fraction is None and warmup and length and warmup >= length:
            yield (
                f"--lr-warmup-{unit} {warmup} must be less than the length of the schedule, "
                f"{length}: lower it, or raise --train-{unit} or --lr-decay-{unit}"
            )
    if args.lr is not None and args.min_lr is not None and args.min_lr > args.lr:
        yield f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower it"
    if args.lr_decay_style == "WSD":
        yield from _wsd(args)
    yield from _decay_fraction(args)
    given = args.save_interval is not None or "save_interval" in args.refused_flags
    if args.save and not given and not args.run_dir:
        yield "--save without --save-interval: add --save-interval, or use --run-dir"


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


def _rates(args: Namespace) -> Iterator[str]:
    """Check --embedding-lr and --output-lr."""
    names = ("embedding_lr", "output_lr")
    given = [flag_of(name) for name in names if getattr(args, name) is not None]
    if given and not args.untie_embeddings_and_output_weights:
        yield (
            f"{' and '.join(given)}: embedding and output layer are one matrix: add "
            "--untie-embeddings-and-output-weights, or use --decoupled-lr"
        )


def without_unknown(args: Namespace) -> tuple[list[str], Namespace]:
    """Return one message per unknown name, and the arguments with defaults in place of those."""
    problems: list[str] = []
    defaults: dict[str, object] = {}
    if not is_variant(args.attention_variant):
        unknown = unknown_name("--attention-variant", args.attention_variant, names())
        problems.append(f"{unknown}; {advice()}")
        defaults["attention_variant"] = AttentionOptions.attention_variant
    for field in (field for options in OPTIONS for field in fields(options)):
        value, known = getattr(args, field.name), field.metadata.get("choices")
        if known and value != field.default and value not in known:
            problems.append(unknown_name(flag_of(field.name), value, known))
            defaults[field.name] = field.default
    return problems, Namespace(**vars(args) | defaults)
