"""Checks of monitoring during training."""

import importlib.util
from argparse import Namespace

from megasink.definitions import SINK_TOKENS


def problems(args: Namespace) -> list[str]:
    """Return one message per problem."""
    found = []
    if args.head_heatmap_interval < 0:
        found.append(
            f"--head-heatmap-interval {args.head_heatmap_interval} is negative: use 0 for never"
        )
    nats = args.stop_on_divergence
    if nats is not None and not nats > 0:
        found.append(f"--stop-on-divergence {nats:g}: use a rise above 0, such as 1 nat")
    found += _wandb(args)
    if args.log_sink_rate:
        found += _sink_rate(args)
    return found + (_analysis(args) if args.analyze_interval else [])


def _wandb(args: Namespace) -> list[str]:
    """Report problems that the last rank would meet when it opens W&B."""
    if not args.wandb_project:
        given = [name for name in ("entity", "exp_name") if getattr(args, f"wandb_{name}")]
        return [
            f"--wandb-{name.replace('_', '-')} without --wandb-project logs nothing: add it"
            for name in given
        ]
    found = []
    if not args.wandb_exp_name:
        found.append(f"--wandb-project {args.wandb_project} needs --wandb-exp-name")
    if importlib.util.find_spec("wandb") is None:
        found.append(
            f"--wandb-project {args.wandb_project}: wandb is not installed: pip install wandb, or "
            "drop the flag (TensorBoard is written in any case)"
        )
    return found


def _analysis(args: Namespace) -> list[str]:
    """Report what an analysis during training does not support."""
    interval, evaluations = args.analyze_interval, args.eval_interval
    if interval < 0:
        return [f"--analyze-interval {interval} is negative: use 0 for never"]
    wrong = {
        "without --run-dir: name the folder that the analyses go to": args.run_dir is None,
        "without evaluations: use --eval-iters 1 or more": not args.eval_iters,
        f"{interval} and --eval-interval {evaluations}: use a multiple of it": (
            not evaluations or interval % evaluations != 0
        ),
        f"and --analyze-samples {args.analyze_samples}: use at least 1": args.analyze_samples < 1,
        "and --multiple-validation-sets: drop one of the two": args.multiple_validation_sets,
        "and --reset-position-ids: drop one of the two": args.reset_position_ids,
    }
    found = [f"--analyze-interval {what}" for what, is_so in wrong.items() if is_so]
    for kind in ("tensor-model", "pipeline-model", "context", "expert-model"):
        size = getattr(args, f"{kind.replace('-', '_')}_parallel_size")
        if size > 1:
            found.append(
                f"--analyze-interval with --{kind}-parallel-size {size}: no rank has the whole "
                "model; analyze its checkpoints with megasink trace, which reads any layout"
            )
    return found


def _sink_rate(args: Namespace) -> list[str]:
    """Report models without a Sink^0.3_1, or with a different one than P2's."""
    length, prefix = args.seq_length or SINK_TOKENS, args.prefix_lm_tokens
    wrong = {
        f"--seq-length {length}: it is counted over {SINK_TOKENS} tokens, use at least as many": (
            length < SINK_TOKENS
        ),
        "--dataloader-inter-document-masking: documents have other lengths, drop one of the two": (
            args.dataloader_inter_document_masking
        ),
        "--sink-token: the first token is not one of the text, drop one of the two": (
            args.sink_token
        ),
        f"--prefix-lm-tokens {prefix}: its first {SINK_TOKENS} tokens see later ones, use at most "
        f"{SINK_TOKENS}": prefix > SINK_TOKENS,
        f"--context-parallel-size {args.context_parallel_size}: the first tokens are on one rank "
        "alone, use 1": args.context_parallel_size > 1,
    }
    return [f"--log-sink-rate with {what}" for what, is_so in wrong.items() if is_so]
