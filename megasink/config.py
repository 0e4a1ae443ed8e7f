"""The options of a model and of its head-balance loss; `run_options.py` has those of runs.

They are dataclasses. Megatron's ArgumentGroupFactory turns each field into a flag
(``softmax_offset_init`` becomes ``--softmax-offset-init``) and the string below it into its help.
"""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from megasink.attention.variants import variants

FixedValue = Literal["none", "unit", "uniform"]
Similarity = Literal["softmax", "sigmoid", "elu-plus-one", "elu-kernel", "identity", "mlp"]
Normalization = Literal["row-sum", "none"]
GatePosition = Literal["sdpa", "value", "key", "query", "output"]
GateGranularity = Literal["headwise", "elementwise"]
GateOperation = Literal["multiply", "add"]
GateActivation = Literal["sigmoid", "silu", "ns-sigmoid", "identity"]
GateInput = Literal["hidden", "none"]
OutputNorm = Literal["none", "rmsnorm", "silu"]
SwitchHeads = Literal["none", "value", "key-value"]
AttentionBias = Literal["none", "alibi", "t5", "bucket"]
Scope = Literal["global", "data-parallel", "microbatch"]
FFNActivation = Literal["relu", "gelu", "silu", "reglu", "geglu", "swiglu"]
# Fields of Megatron's TransformerConfig that attention or the head-balance loss would ignore:
# (name, the value that is fine, why). The trainer refuses their flags, HeadBalance their fields.
IGNORED: tuple[tuple[str, Any, str], ...] = (
    ("apply_query_key_layer_scaling", False, "not supported"),
    ("qk_clip", False, "the kernels do not return the maximum logit"),
    ("log_max_attention_logit", False, "the kernels do not return the maximum logit"),
    ("flash_decode", False, "it bypasses core attention and its window"),
    ("overlap_moe_expert_parallel_comm", False, "not tested: it splits the layers"),
    ("fine_grained_activation_offloading", False, "not tested: use recompute to save memory"),
)
# Supported values of Megatron's --cp-comm-type.
COMM_TYPES = ("all_gather", "a2a", "p2p")
# Options that must be positive, although their types allow other numbers.
FACTORS = ("attention_scale_alpha", "bias_fixed_value_norm", "residual_clip", "logit_softcap")


def layer_pattern(text: str) -> str | list[int]:
    """Return the value of --attention-variant-layers; argparse names this function in errors."""
    from megasink.attention.variants import variant_layers

    return variant_layers.layer_pattern(text)


def _choice(kind: Any, default: str | None) -> Any:
    """Return a field whose choices argparse shows but does not check.

    argparse stops at the first wrong flag; megasink reports all problems in one message.
    """
    names = get_args(kind)
    meta = {"choices": None, "type": str, "metavar": "{" + ",".join(names) + "}"}
    return field(default=default, metadata={"argparse_meta": meta, "choices": names})


@dataclass(kw_only=True)
class AttentionOptions:
    """How attention heads are gated."""

    attention_variant: str = field(
        default="sink", metadata={"argparse_meta": {"type": str}, "records": variants}
    )
    """Variant of attention: the name of a record in megasink.attention.variants."""

    attention_variant_layers: list[int] | str | None = field(
        default=None,
        metadata={
            "argparse_meta": {"type": layer_pattern, "metavar": "{windowed,full,PATTERN}"},
        },
    )
    """Layers that have --attention-variant; the others have plain softmax attention. windowed or
    full: the layers with or without a sliding window. Or a list such as "([1]*5+[0])*8": 1 for a
    layer with the variant, as in --window-attn-skip-freq. None: all layers."""

    softmax_offset_init: float = 0.0
    """Initial sink logit of every head. At 0 a new model starts with off-by-one attention: the gate
    over n visible tokens is n/(n+1), close to vanilla attention. GPT-OSS and Megatron draw the
    logit from N(0, 0.02), which gives nearly the same gate."""

    attention_kernel: str = "auto"
    """Attention kernel: auto, or the name of a required kernel ('eager', 'flash-cpu', ...). A
    kernel that would drop a term is rejected. The gate around it is computed by Triton kernels on a
    GPU; 'auto+torch' computes it with PyTorch, as on a CPU, and 'auto+triton' requires Triton."""


@dataclass(kw_only=True)
class BiasOptions:
    """Values, sharing and training of sinks and biases (P2.23 to P2.29)."""

    bias_shared_heads: bool = False
    """Use one key bias and one value bias per layer, shared by all heads, instead of one per query
    head (P2.29)."""

    bias_fixed_value: FixedValue = _choice(FixedValue, "none")  # noqa: RUF009
    """Fixed value vector of the key of --attention-variant k-bias (P2.28), instead of zero. unit:
    nonzero on the first channel only. uniform: the same on every channel."""

    bias_fixed_value_norm: float = 1.0
    """Norm of the --bias-fixed-value vector; P2 uses 1, 5 and 20."""

    sink_lr_mult: float = 1.0
    """Multiplier on the maximum and minimum learning rate of the sink parameters: softmax offsets,
    key biases and value biases."""

    sink_weight_decay: float = 0.0
    """Weight decay of the sink parameters, instead of --weight-decay."""

    sink_token: bool = False
    """Start every sequence with an extra learnable token (P2.23) at position 0; the text follows
    from position 1. The last token of each sample is dropped to make room."""


@dataclass(kw_only=True)
class SimilarityOptions:
    """Attention weights other than softmax (P2.30 to P2.38)."""

    attention_similarity: Similarity = _choice(Similarity, "softmax")  # noqa: RUF009
    """Weight of a key, with z = q.k / sqrt(d): exp(z) (softmax); sigmoid(z); elu(z) + 1;
    (elu(q) + 1).(elu(k) + 1) (elu-kernel, linear attention); z itself (identity); MLP(q) times
    MLP(k). All but softmax require --attention-variant vanilla and --head-balance-coeff 0."""

    attention_normalization: Normalization = _choice(Normalization, "row-sum")  # noqa: RUF009
    """Divisor of the weights of a row. row-sum: their sum, or max(abs(sum), 1) for identity and
    mlp, whose weights are signed. none: 1; not for softmax."""

    attention_scale_alpha: float = 1.0
    """Factor on the output of core attention: the weights of a row then sum to this factor instead
    of 1 (P2.38)."""


@dataclass(kw_only=True)
class GateOptions:
    """The explicit gate of --attention-variant gated (P1), with P0's defaults."""

    gate_position: GatePosition = _choice(GatePosition, "sdpa")  # noqa: RUF009
    """Tensor to gate: the SDPA output (P1's G1), the value (G2) or key (G3) of each group, the
    query (G4), or the layer output after its projection (G5). Queries and keys are gated before
    qk-norm and RoPE."""

    gate_granularity: GateGranularity = _choice(GateGranularity, "headwise")  # noqa: RUF009
    """One score per head and token, or one per element of the head."""

    gate_shared_heads: bool = False
    """Share one gate per layer: the mean over its heads, after the activation (P1.9, P1.10)."""

    gate_operation: GateOperation = _choice(GateOperation, "multiply")  # noqa: RUF009
    """Multiply by the gate, or add it (P1.11)."""

    gate_activation: GateActivation = _choice(GateActivation, "sigmoid")  # noqa: RUF009
    """Activation that maps score to gate; ns-sigmoid is 0.5 + 0.5 * sigmoid (P1.14)."""

    gate_input: GateInput = _choice(GateInput, "hidden")  # noqa: RUF009
    """hidden: scores are projected from the normed hidden state. none: scores are parameters,
    shared by all tokens and initialized to 0 (P1.15)."""

    sdpa_output_norm: OutputNorm = _choice(OutputNorm, "none")  # noqa: RUF009
    """Nonlinearity on the SDPA output of each head, before the gate: RMSNorm (P1.16) or SiLU
    (P1.17). Works without a gate too."""

    match_ffn_width: bool = False
    """Narrow the FFN, in multiples of 128, to keep the parameter count of the model without the
    gate (P1.21). The widths are printed."""


@dataclass(kw_only=True)
class SwitchOptions:
    """Switch heads: tokens select experts of the value and key projections (P1.39)."""

    switch_heads: SwitchHeads = _choice(SwitchHeads, "none")  # noqa: RUF009
    """Projections with experts: value, or key and value. A token gets the sum of the experts that
    it selects, each times the sigmoid of the expert's score."""

    switch_experts: int = 1
    """Number of experts in each key/value group."""

    switch_top_k: int = 1
    """Number of experts, those with the highest scores, that a token selects in each group."""


@dataclass(kw_only=True)
class PositionOptions:
    """Attention masks and position encodings (P2.18 to P2.22)."""

    prefix_lm_tokens: int = 0
    """Prefix length of a prefix language model (P2.18): the prefix tokens attend to each other in
    both directions, every later token attends to them, and only later targets count in the loss.
    0: causal language model."""

    attention_bias_type: AttentionBias = _choice(AttentionBias, "none")  # noqa: RUF009
    """Position bias on the scores, by head and distance; needs --position-embedding-type none.
    alibi: fixed slopes (P2.22). t5: a learned scalar per layer, head and distance bucket. bucket:
    the bucket index itself (P2.21). --relative-attention-num-buckets and
    --relative-attention-max-distance set the buckets."""

    sinusoidal_position_embedding: bool = False
    """With --position-embedding-type learned_absolute: use a fixed table of sines and cosines
    (P2.20) instead of the learned one."""


@dataclass(kw_only=True)
class BlockOptions:
    """The transformer block around attention (P1.24, P1.25, P2.41 to P2.44)."""

    sandwich_norm: bool = False
    """Normalize the outputs of attention and FFN before they are added to the residual stream, in
    addition to the pre-norms (P1.24)."""

    residual_clip: float | None = None
    """Clamp the outputs of attention and FFN to (-C, C) before they are added to the residual
    stream (P1.25; the paper uses 300 and 100)."""

    post_norm: bool = False
    """Normalize the residual stream after each addition and nowhere else: no norm before attention
    and FFN or after the last layer (P2.42)."""

    multi_head_addition: bool = False
    """Sum the outputs of the heads and project the sum with one matrix [head dim, hidden size]
    (P2.44), instead of one matrix per head."""

    ffn_activation: FFNActivation | None = _choice(FFNActivation, None)  # noqa: RUF009
    """Activation of the FFN and of the experts (P2.41); names ending in glu are gated units. None:
    follow Megatron's own flags (--swiglu, --squared-relu, --quick-geglu; else gelu). Gated units
    use the FFN size that Megatron sets for --swiglu unless --ffn-hidden-size is given; gelu is the
    exact version, with the error function."""


@dataclass(kw_only=True)
class NanochatOptions:
    """Norms, logits and initial weights of nanochat, whose models P0 trains (docs/recipes.md)."""

    norm_without_gain: bool = False
    """Use RMSNorms without weights in the residual stream and the sandwich norm. --qk-l2-norm does
    so for queries and keys."""

    embedding_norm: bool = False
    """Normalize the embeddings before the first layer: RMSNorm without a weight."""

    logit_softcap: float | None = None
    """Cap c of the logits, which become c * tanh(logits / c), in float32, in training and
    inference."""

    zero_init_outputs: bool = False
    """Initialize the output projections of attention and FFN, and the output layer, with zeros."""


@dataclass(kw_only=True)
class HeadBalanceOptions:
    """The head-balance loss of P0, Eq. 7: coefficient * sum over layers of H * CV^2."""

    head_balance_coeff: float = 1e-4
    """Coefficient (lambda) of the head-balance loss; 0 disables it. P0 trains from scratch with
    1e-4."""

    head_balance_scope: Scope = _choice(Scope, "global")  # noqa: RUF009
    """Tokens over which the loss averages the importance. global: the global batch, at the cost of
    one small all-reduce per step; the gradient uses the importance of the previous step.
    data-parallel: the concurrent microbatches of all replicas. microbatch: each microbatch
    alone."""

    head_balance_shared_heads: int = 0
    """For fine-tuning (Eq. 8): exempt the m most important heads of each layer (the shared heads)
    and balance the others. 0: balance all heads (Eq. 7)."""

    head_balance_shared_refresh: int = 0
    """Interval in steps at which the shared heads are chosen again; 0: choose once, at the first
    step (the choice is stored in the checkpoint)."""


_HEADS = (AttentionOptions, BiasOptions, SimilarityOptions, GateOptions, SwitchOptions)
MODEL_OPTIONS = (*_HEADS, PositionOptions, BlockOptions, NanochatOptions)
"""Options that define the model."""

TRANSFORMER_OPTIONS = (*MODEL_OPTIONS, HeadBalanceOptions)
"""Options in a TransformerConfig that define a model and its loss, for any training loop."""


def visible_tokens(window_size: tuple[int, int] | None) -> int | None:
    """Return the number of tokens visible to a token, including itself; None for all.

    Megatron's ``--window-size`` counts the tokens to the left, excluding itself; -1 is unlimited.
    """
    return None if window_size is None or window_size[0] < 0 else window_size[0] + 1
