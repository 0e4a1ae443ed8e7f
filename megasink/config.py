"""Every option of megasink, once: the dataclasses from which the command line flags are made.

Megatron's ArgumentGroupFactory turns each field into a flag (``softmax_offset_init`` becomes
``--softmax-offset-init``) and the string below it into the help text.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megasink.variants import variants

FixedValue = Literal["none", "unit", "uniform"]
Similarity = Literal["softmax", "sigmoid", "elu-plus-one", "elu-kernel", "identity", "mlp"]
Normalization = Literal["row-sum", "none"]
GatePosition = Literal["sdpa", "value", "key", "query", "output"]
GateGranularity = Literal["headwise", "elementwise"]
GateOperation = Literal["multiply", "add"]
GateActivation = Literal["sigmoid", "silu", "ns-sigmoid", "identity"]
GateInput = Literal["hidden", "none"]
OutputNorm = Literal["none", "rmsnorm", "silu"]
AttentionBias = Literal["none", "alibi", "t5", "bucket"]
Scope = Literal["global", "data-parallel", "microbatch"]
FFNActivation = Literal["relu", "gelu", "silu", "reglu", "geglu", "swiglu"]
# Of Megatron's --cp-comm-type.
COMM_TYPES = ("all_gather", "a2a")


def _choice(kind: Any, default: str | None) -> Any:
    """A field with named values that argparse shows but does not check.

    argparse stops at the first wrong flag; all problems of a command line belong in one message.
    """
    names = "{" + ",".join(get_args(kind)) + "}"
    meta = {"argparse_meta": {"choices": None, "type": str, "metavar": names}}
    return field(default=default, metadata=meta)


@dataclass(kw_only=True)
class AttentionOptions:
    """How attention heads are gated."""

    attention_variant: str = field(
        default="sink", metadata={"argparse_meta": {"type": str}, "records": variants}
    )
    """What is added to softmax attention, by its record in megasink.variants."""

    softmax_offset_init: float = 0.0
    """Initial sink logit of every head. At 0 a head of a new model starts as off-by-one attention:
    its gate is n/(n+1) over n visible tokens, so training starts from vanilla attention, and the
    gradient of the logit, proportional to 1 - gate, is not zero. GPT-OSS and Megatron draw it
    from N(0, 0.02), the same to two digits but dependent on the random state."""

    attention_kernel: str = "auto"
    """Attention kernel: auto, or the name of one that must run ('eager', 'flash-cpu', ...). One
    that would drop a term is refused."""


@dataclass(kw_only=True)
class BiasOptions:
    """Sinks and biases: their values, how they are shared and trained (P2.23 to P2.29)."""

    bias_shared_heads: bool = False
    """One key bias and one value bias per layer, shared by all its heads, in place of one per query
    head (P2.29)."""

    bias_fixed_value: FixedValue = _choice(FixedValue, "none")  # noqa: RUF009
    """A fixed value for the key of --attention-variant k-bias (P2.28), in place of zero. unit: on
    the first channel. uniform: the same on every channel."""

    bias_fixed_value_norm: float = 1.0
    """The norm of the value of --bias-fixed-value; P2 takes 1, 5 and 20."""

    sink_lr_mult: float = 1.0
    """Multiplies the learning rate, maximum and minimum, of the sink parameters: softmax offsets,
    key biases and value biases."""

    sink_weight_decay: float = 0.0
    """Weight decay of the sink parameters, in place of --weight-decay."""

    sink_token: bool = False
    """Every sequence starts with a learnable token of its own (P2.23), at position 0; the text
    follows from position 1. The last token of each sample gives way to it."""


@dataclass(kw_only=True)
class SimilarityOptions:
    """Other weights than the softmax's (P2.30 to P2.38)."""

    attention_similarity: Similarity = _choice(Similarity, "softmax")  # noqa: RUF009
    """The weight of a key, with z = q.k / sqrt(d): exp(z) (softmax); sigmoid(z); elu(z) + 1; elu(q)
    + 1 times elu(k) + 1 (elu-kernel, linear attention); z itself (identity); an MLP of q times that
    of k. Other than softmax: with --attention-variant vanilla and --head-balance-coeff 0."""

    attention_normalization: Normalization = _choice(Normalization, "row-sum")  # noqa: RUF009
    """What the weights of a row are divided by. row-sum: their sum; max(abs(sum), 1) for identity
    and mlp, whose weights have signs. none: 1; not for softmax."""

    attention_scale_alpha: float = 1.0
    """The weights of a row add up to this in place of 1 (P2.38): the output of core attention is
    multiplied by it."""


@dataclass(kw_only=True)
class GateOptions:
    """The explicit gate of --attention-variant gated (P1); its defaults are those of P0."""

    gate_position: GatePosition = _choice(GatePosition, "sdpa")  # noqa: RUF009
    """What is gated: the SDPA output (P1's G1), the value (G2) or key (G3) of each group, the query
    (G4), before qk-norm and RoPE, or the output of the layer after its projection (G5)."""

    gate_granularity: GateGranularity = _choice(GateGranularity, "headwise")  # noqa: RUF009
    """One score per head and token, or one per element of the head."""

    gate_shared_heads: bool = False
    """Every head of a layer takes the mean of their gates, after the activation (P1.9, P1.10)."""

    gate_operation: GateOperation = _choice(GateOperation, "multiply")  # noqa: RUF009
    """Multiply with the gate, or add it (P1.11)."""

    gate_activation: GateActivation = _choice(GateActivation, "sigmoid")  # noqa: RUF009
    """From score to gate; ns-sigmoid is 0.5 + 0.5 * sigmoid (P1.14)."""

    gate_input: GateInput = _choice(GateInput, "hidden")  # noqa: RUF009
    """hidden: scores are projected from the normed hidden state. none: they are parameters, the
    same for every token, that start at 0 (P1.15)."""

    sdpa_output_norm: OutputNorm = _choice(OutputNorm, "none")  # noqa: RUF009
    """Non-linearity on the SDPA output of each head, before its gate: RMSNorm (P1.16) or SiLU
    (P1.17). Also without a gate."""

    match_ffn_width: bool = False
    """Make the FFN narrower, so that the model has as many parameters as without the gate (P1.21):
    to the nearest multiple of 128. The numbers are printed."""


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

    sandwich_norm: bool = False
    """Normalise the outputs of attention and FFN before they are added to the residual stream,
    beside the norms before them (P1.24)."""

    residual_clip: float | None = None
    """Clamp the outputs of attention and FFN to (-C, C) before they are added to the residual
    stream (P1.25; the paper takes 300 and 100)."""

    post_norm: bool = False
    """Normalise the residual stream after each addition, nowhere else: no norm before attention and
    FFN and none after the last layer (P2.42)."""

    multi_head_addition: bool = False
    """Add the outputs of the heads up and project the sum with one matrix [head dim, hidden size]
    (P2.44), in place of a matrix for each head."""

    ffn_activation: FFNActivation | None = _choice(FFNActivation, None)  # noqa: RUF009
    """Activation of the FFN and of the experts (P2.41); those that end in glu are gated units.
    None: what Megatron's own flags say (--swiglu, --squared-relu, --quick-geglu; else gelu).
    Gated units get the FFN size that Megatron gives with --swiglu unless --ffn-hidden-size is set;
    gelu is the exact one, by the error function."""


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

    head_balance_decay_iters: int = 0
    """Steps at the end of the run over which the coefficient falls linearly."""

    head_balance_shared_heads: int = 0
    """For fine-tuning (Eq. 8): the m most important heads of each layer are shared and left alone,
    the loss evens out the others. 0: all heads count (Eq. 7)."""

    head_balance_shared_refresh: int = 0
    """Choose the shared heads anew every so many steps; 0: once, from the first step, and keep
    them (they are stored in the checkpoint)."""


@dataclass(kw_only=True)
class ObservingOptions:
    """What is watched while a run trains (docs/observing.md)."""

    head_heatmap_interval: int = 1000
    """Draw the [layer, head] head importance into TensorBoard and W&B every so many steps and after
    the last one; 0: never. A picture takes the last rank about 0.3 s."""

    log_sink_rate: bool = False
    """In every evaluation count attention sinks, Sink^0.3_1 (P2.2): the share of heads whose mean
    attention to the first token, over the first 64, exceeds 0.3; and the same for the sink beside
    the keys, where there is one."""

    analyze_interval: int = 0
    """Analyze the model as it is, by `megasink analyze`'s metrics, at the evaluations of every so
    many steps and the last one; 0: never. Writes RUN/analysis/iter_..., which `megasink trace RUN`
    and `megasink report` read. A multiple of --eval-interval; models cut by tensor, pipeline,
    context or expert parallelism are analyzed from their checkpoints instead."""

    analyze_samples: int = 32
    """How many samples of the validation set --analyze-interval takes: its first ones, always the
    same. The data-parallel ranks share them."""

    stop_on_divergence: float | None = None
    """End the run, with exit code 2 and without another checkpoint, when the training loss (its
    exponential moving average of factor 0.98) is this many nats above its lowest value; looked at
    every --log-interval steps."""


RESUME = ("newest", "auto")


@dataclass(kw_only=True)
class RunOptions:
    """Where a run lives."""

    run_dir: str | None = None
    """Folder of the run: checkpoints, TensorBoard, metrics.jsonl, logs and the resolved
    configuration. A folder that holds a run of another configuration is refused."""

    resume: str | None = field(
        default=None,
        metadata={"argparse_meta": {"nargs": "?", "const": "newest", "choices": RESUME}},
    )
    """Go on from the newest whole checkpoint of --run-dir. With the value auto, start there at step
    0 where there is none yet: the same command line starts a run and goes on with it, as
    `sbatch --requeue` and `torchrun --max-restarts` need."""

    verify_checkpoint: bool = False
    """With --resume: compare the checksums of everything in a checkpoint before it is loaded, at
    the cost of reading it once more; without it only the sizes of the files are compared."""

    plugin: list[str] | None = field(
        default=None, metadata={"argparse_meta": {"action": "append", "metavar": "MODULE"}}
    )
    """Import this Python module first, which registers variants, metrics or conversion targets of
    your own; may be repeated. --resume does not repeat it: say it again."""

    cpu: bool = False
    """Run on the CPU platform; chosen by itself, and said, where no CUDA device is present."""


MODEL_OPTIONS = (
    AttentionOptions,
    BiasOptions,
    SimilarityOptions,
    GateOptions,
    PositionOptions,
    BlockOptions,
)
"""What a model is; the others say how it is trained."""

OPTIONS = (*MODEL_OPTIONS, HeadBalanceOptions, ObservingOptions, RunOptions)


def visible_tokens(window_size: tuple[int, int] | None) -> int | None:
    """Tokens that a token sees, itself included; None for all.

    Megatron's ``--window-size`` counts those to the left of the token itself; -1 is no limit.
    """
    return None if window_size is None or window_size[0] < 0 else window_size[0] + 1
