"""Checks of monitoring during training."""

import importlib.util
from argparse import Namespace
from collections.abc import Iterator

from megasink.attention.constants import SINK_TOKENS
from megasink.training.dataset_blends import parts


def problems(args: Namespace) -> Iterator[str]:
    yield from _wandb(args)
    _, validates, _ = parts(args)
    if args.log_sink_rate:
        if not validates:
            yield "--log-sink-rate needs validation data: add some, such as --split 99,1,0"
        yield from _sink_rate(args)


def _wandb(args: Namespace) -> Iterator[str]:
    """Report problems that the last rank would hit when it opens W&B."""
    if not args.wandb_project:
        for name in ("entity", "exp-name"):
            if getattr(args, f"wandb_{name.replace('-', '_')}"):
                yield f"--wandb-{name} without --wandb-project logs nothing: add --wandb-project"
        return
    if not args.wandb_exp_name:
        yield f"--wandb-project {args.wandb_project} needs --wandb-exp-name"
    if importlib.util.find_spec("wandb") is None:
        yield (
            f"--wandb-project {args.wandb_project}: wandb is not installed: pip install wandb, or "
            "drop the flag (TensorBoard is always written)"
        )


def _sink_rate(args: Namespace) -> Iterator[str]:
    """Report models without a Sink^0.3_1, or with one that differs from P2's."""
    length, prefix, flag = args.seq_length, args.prefix_lm_tokens, "--log-sink-rate with"
    if length and length < SINK_TOKENS:
        yield (
            f"{flag} --seq-length {length}: the rate is measured over {SINK_TOKENS} tokens: use "
            f"{SINK_TOKENS} or more"
        )
    if prefix > SINK_TOKENS:
        yield (
            f"{flag} --prefix-lm-tokens {prefix}: the first {SINK_TOKENS} tokens see later ones: "
            f"use at most {SINK_TOKENS}"
        )
