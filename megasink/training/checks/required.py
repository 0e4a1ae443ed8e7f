"""Checks for missing flags, removed flags, and invalid numbers."""

import math
from argparse import Namespace
from collections.abc import Iterator

from megasink.flags import flag_of
from megasink.megatron_flags import KNOWN, having

# What serves as well; the first two are old names.
_OR = {"num_layers": "encoder_num_layers", "seq_length": "encoder_seq_length"}
_OR |= {"train_iters": "train_samples"}
# Flags that Megatron has removed, and their replacements.
_GONE = {
    "batch_size": "--micro-batch-size",
    "warmup": "--lr-warmup-fraction",
    "model_parallel_size": "--tensor-model-parallel-size",
    "checkpoint_activations": "--recompute-activations",
}


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
    for name, instead in _GONE.items():
        if getattr(args, name):
            yield f"{flag_of(name)} is no longer valid: use {instead}"
    if args.recipe:  # what starts a run has replaced it by its flags
        yield "--recipe: give it to megasink train or plan, or in the flags of a grid"
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
        elif "share" in known and not 0 <= value < 1:
            yield f"{flag_of(name)} {value}: use 0 or more, and less than 1"
