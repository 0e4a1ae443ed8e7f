"""Every option of megasink, once: the dataclasses from which the command line flags are made.

Megatron's ArgumentGroupFactory turns each field into a flag (``softmax_offset_init`` becomes
``--softmax-offset-init``) and the string below it into the help text.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

Variant = Literal["vanilla", "sink", "off-by-one"]
AttentionBias = Literal["none", "alibi", "t5", "bucket"]
Scope = Literal["global", "data-parallel", "microbatch"]


def _choice(kind: Any, default: str) -> Any:
    """A field with named values that argparse shows but does not check.

    argparse stops at the first wrong flag; all problems of a command line belong in one message.
    """
    names = "{" + ",".join(get_args(kind)) + "}"
    meta = {"argparse_meta": {"choices": None, "type": str, "metavar": names}}
    return field(default=default, metadata=meta)


@dataclass(kw_only=True)
class AttentionOptions:
    """How attention heads are gated."""

    attention_variant: Variant = _choice(Variant, "sink")  # noqa: RUF009
    """vanilla: softmax attention (P0.1). sink: one learnable logit per head in the denominator of
    the softmax (P0.2). off-by-one: that logit fixed at 0."""

    softmax_offset_init: float = 0.0
    """Initial sink logit of every head. At 0 a head of a new model starts as off-by-one attention:
    its gate is n/(n+1) over n visible tokens, so training starts from vanilla attention, and the
    gradient of the logit, proportional to 1 - gate, is not zero. GPT-OSS and Megatron draw it
    from N(0, 0.02), the same to two digits but dependent on the random state."""

    attention_kernel: str = "auto"
    """Attention kernel: auto, or the name of one that must run ('eager', 'flash-cpu', ...). One
    that would drop a term is refused."""


@dataclass(kw_only=True)
class GateOptions:
    """The explicit gate of --attention-variant gated (P1)."""


@dataclass(kw_only=True)
class PositionOptions:
    """Which tokens see each other, and how positions enter (P2.18 to P2.22)."""

    prefix_lm_tokens: int = 0
    """Prefix language model (P2.18): the first so many tokens of a sequence see each other in both
    directions, and every later token sees them; the loss counts targets after them only. 0: causal
    language model."""

    attention_bias_type: AttentionBias = _choice(AttentionBias, "none")  # noqa: RUF009
    """Positions as a bias on the scores, by head and distance; with --position-embedding-type none.
    alibi: fixed slopes (P2.22). t5: a learned scalar for each head and bucket of distances, in each
    layer. bucket: the index of the bucket itself (P2.21). --relative-attention-num-buckets and
    --relative-attention-max-distance set the buckets."""

    sinusoidal_position_embedding: bool = False
    """With --position-embedding-type learned_absolute: a fixed table of sines and cosines (P2.20)
    in place of the learned one."""


@dataclass(kw_only=True)
class BlockOptions:
    """The transformer block around attention (P1.24, P1.25, P2.41 to P2.44)."""


@dataclass(kw_only=True)
class HeadBalanceOptions:
    """The head-balance loss of P0, Eq. 7: coefficient * sum over layers of H * CV^2."""

    head_balance_coeff: float = 1e-4
    """Coefficient of the head-balance loss (lambda); 0 switches it off. P0 trains from scratch
    with 1e-4."""

    head_balance_scope: Scope = _choice(Scope, "global")  # noqa: RUF009
    """Over which tokens the importance inside the loss is averaged. global: the whole global
    batch, at the cost of one small all-reduce per step; the gradient uses the importance of the
    step before. data-parallel: the microbatches that run at the same time on all replicas.
    microbatch: each microbatch alone."""

    head_balance_warmup_iters: int = 0
    """Steps over which the coefficient rises linearly to its value."""

    head_balance_shared_heads: int = 0
    """For fine-tuning (Eq. 8): the m most important heads of each layer are shared and left alone,
    the loss evens out the others. 0: all heads count (Eq. 7)."""

    head_balance_shared_refresh: int = 0
    """Choose the shared heads anew every so many steps; 0: once, from the first step, and keep
    them (they are stored in the checkpoint)."""


@dataclass(kw_only=True)
class RunOptions:
    """Where a run lives."""

    run_dir: str | None = None
    """Folder of the run: checkpoints, TensorBoard, metrics.jsonl, logs and the resolved
    configuration. A folder that holds a run of another configuration is refused."""

    resume: bool = False
    """Go on from the newest whole checkpoint of --run-dir."""

    verify_checkpoint: bool = False
    """With --resume: compare the checksums of everything in a checkpoint before it is loaded, at
    the cost of reading it once more; without it only the sizes of the files are compared."""

    cpu: bool = False
    """Run on the CPU platform; chosen by itself, and said, where no CUDA device is present."""


OPTIONS = (
    AttentionOptions,
    GateOptions,
    PositionOptions,
    BlockOptions,
    HeadBalanceOptions,
    RunOptions,
)


def visible_tokens(window_size: tuple[int, int] | None) -> int | None:
    """Tokens that a token sees, itself included; None for all.

    Megatron's ``--window-size`` counts those to the left of the token itself; -1 is no limit.
    """
    return None if window_size is None or window_size[0] < 0 else window_size[0] + 1
