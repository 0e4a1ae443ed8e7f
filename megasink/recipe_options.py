"""Options that recipes need: recipes themselves, the length of a decay, and nanochat's model.

Part of `megasink.config`, whose `OPTIONS` holds these classes.
"""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class NanochatOptions:
    """Norms, logits and initial weights of nanochat, whose models P0 trains (docs/recipes.md)."""

    norm_without_gain: bool = False
    """RMSNorms of the residual stream and of the sandwich norm have no weight. --qk-l2-norm is the
    same for queries and keys."""

    embedding_norm: bool = False
    """Normalize the embeddings before the first layer: RMSNorm without a weight."""

    logit_softcap: float | None = None
    """Cap of the logits c: they become c * tanh(logits / c), in float32, in training and
    inference."""

    zero_init_outputs: bool = False
    """Initialize the output projections of attention and FFN, and the output layer, with zeros."""


@dataclass(kw_only=True)
class RecipeOptions:
    """Recipes (docs/recipes.md), and the length of a decay as a share of the run."""

    recipe: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "+", "metavar": "NAME"}}
    )
    """Take the flags of these recipes (`megasink recipes` lists them) or TOML files first; those of
    the command line count more, and of several files the last."""

    config: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "+", "metavar": "FILE"}}
    )
    """The same as --recipe, for files of your own and for runs: RUN/config.toml holds the flags of
    a run."""

    expanded_recipe: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"nargs": "+", "metavar": "NAME"}}
    )
    """Written by --recipe and --config in their place: the names of the files whose flags this
    command line holds, with the start of their SHA-256. It is recorded and has no effect."""

    lr_wsd_decay_fraction: float | None = None
    """Share of the run over which --lr-decay-style WSD decays, at its end, as
    --lr-warmup-fraction is for the warmup; instead of --lr-wsd-decay-iters."""
