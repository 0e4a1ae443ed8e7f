"""Run `megasink analyze` on a Hugging Face model folder."""

import argparse
from collections.abc import Callable

from megasink.errors import ConfigError
from megasink.probe.analysis import analyze
from megasink.probe.ranks import Ranks


def open_transformers(
    args: argparse.Namespace, ranks: Ranks, measure: Callable[..., object] = analyze
) -> None:
    """Load a Hugging Face model folder and measure it.

    Args:
        measure: `analyze`, or a function with the same parameters.
    """
    from megasink.probe.blocks import find_blocks
    from megasink.probe.load import load
    from megasink.probe.transformers_model import TransformersProbe, model_problems

    model, tokenizer = load(args, ranks.device(args.device), quiet=bool(ranks.rank))
    problems = model_problems(model)
    if problems:
        raise ConfigError(problems)
    config = model.config.get_text_config()
    measure(
        args,
        lambda recorder: TransformersProbe(model, recorder, recorder.needs),
        module=model,
        ranks=ranks,
        heads=[config.num_attention_heads if b.attention else 0 for b in find_blocks(model)],
        tokenizer=tokenizer,
        vocabulary=config.vocab_size,
        positions=getattr(config, "max_position_embeddings", None),
        model={
            "name": args.name or args.model.resolve().name,
            "kind": type(model).__name__,
            "attention": model.config._attn_implementation,
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": model.num_parameters(),
        },
    )
