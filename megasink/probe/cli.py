"""Load a Hugging Face model folder for probing."""

import argparse

from megasink.errors import ConfigError
from megasink.probe.base import ProbedModel
from megasink.probe.loaded import open_probe_on
from megasink.probe.ranks import Ranks


def open_transformers(args: argparse.Namespace, ranks: Ranks) -> ProbedModel:
    """Load the Hugging Face model folder that the command line names.

    Raises:
        ConfigError: megasink cannot read its attention.
        UserError: see `load`.
    """
    from megasink.probe.blocks import find_blocks
    from megasink.probe.load import load
    from megasink.probe.transformers_model import model_problems

    model, tokenizer = load(args, ranks.device(args.device), quiet=bool(ranks.rank))
    problems = model_problems(model)
    if problems:
        raise ConfigError(problems)
    config = model.config.get_text_config()
    return ProbedModel(
        open_probe_on(model),
        module=model,
        heads=[config.num_attention_heads if b.attention else 0 for b in find_blocks(model)],
        tokenizer=tokenizer,
        vocabulary=config.vocab_size,
        positions=getattr(config, "max_position_embeddings", None),
        facts={
            "name": args.name or args.model.resolve().name,
            "kind": type(model).__name__,
            "attention": model.config._attn_implementation,
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": model.num_parameters(),
        },
    )
