"""Configuration of a decoder trained with megasink: its options by the names of their flags.

The three files *_megasink.py lie beside the weights of a model that no architecture of
transformers is. They need torch and transformers alone.
"""

from typing import ClassVar

from transformers import PreTrainedConfig


class MegasinkConfig(PreTrainedConfig):
    """What the model is.

    Attributes:
        intermediate_size: width of the FFN, of one expert where there are experts.
        hidden_act: of the FFN: "silu", "gelu" (exact), "relu"; "gpt-oss", the clamped gated unit.
        gated_unit: the FFN multiplies act(gate) with up; else it is act(up).
        norm_topk_prob: the chosen experts' probabilities add up to one.
        shared_expert_intermediate_size: 0 for no shared expert.
        linear_bias, qkv_bias: biases of every linear layer; of queries, keys, values and gates.
        qk_norm, zero_centred_norms: norm of each query and key head; norms store weight minus one.
        layer_types, sliding_window: a "sliding_attention" layer sees so many tokens.
        attention_variant: "vanilla"; "sink", a learned logit per head in the denominator of the
            softmax; "off-by-one", that logit at 0; "gated"; "k-bias", "kv-bias", "v-bias".
        gate_granularity, ..., gate_input: of the explicit gate of "gated".
        sdpa_output_norm: "none"; "rmsnorm" or "silu" on each head's output, before its gate.
        sandwich_norm, post_norm, residual_clip: of the outputs of attention and FFN; of the
            residual stream, in place of the norms before them; the outputs are clamped.
        multi_head_addition: one output projection for the sum of the heads.
        bias_shared_heads, bias_fixed_value, bias_fixed_value_norm: of the bias variants.
        attention_scale_alpha: factor of the output of the softmax.
        normalization: "RMSNorm" or "LayerNorm".
        position_embedding_type: "rope", "learned_absolute" or "none".
        sinusoidal_position_embedding: a fixed table in place of the learned one.
        rotary_percent: share of a head that RoPE turns.
        attention_bias_type: "none", "alibi", "t5" or "bucket"; with relative_attention_num_buckets
            and relative_attention_max_distance for the last two.
    """

    model_type = "megasink"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values"]
    base_model_tp_plan: ClassVar = {
        "layers.*.self_attn.q_proj": "colwise",
        "layers.*.self_attn.k_proj": "colwise",
        "layers.*.self_attn.v_proj": "colwise",
        "layers.*.self_attn.gate.proj": "colwise",
        "layers.*.self_attn.q_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.k_norm": "replicated_with_grad_allreduce",
        "layers.*.self_attn.o_proj": "rowwise",
        "layers.*.self_attn.sinks": "colwise",
        "layers.*.self_attn": "local_params",
        "layers.*.mlp.gate_proj": "colwise",
        "layers.*.mlp.up_proj": "colwise",
        "layers.*.mlp.down_proj": "rowwise",
        "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
        "layers.*.mlp.experts.down_proj": "rowwise",
        "layers.*.mlp.experts": "moe_tp_experts",
        "layers.*.mlp.shared_expert.gate_proj": "colwise",
        "layers.*.mlp.shared_expert.up_proj": "colwise",
        "layers.*.mlp.shared_expert.down_proj": "rowwise",
    }
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    hidden_act: str = "silu"
    gated_unit: bool = True
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True
    shared_expert_intermediate_size: int = 0
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    rope_parameters: dict | None = None
    linear_bias: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    zero_centred_norms: bool = False
    layer_types: list[str] | None = None
    sliding_window: int | None = None
    attention_variant: str = "vanilla"
    gate_granularity: str = "headwise"
    gate_position: str = "sdpa"
    gate_shared_heads: bool = False
    gate_operation: str = "multiply"
    gate_activation: str = "sigmoid"
    gate_input: str = "hidden"
    sdpa_output_norm: str = "none"
    sandwich_norm: bool = False
    post_norm: bool = False
    residual_clip: float | None = None
    multi_head_addition: bool = False
    bias_shared_heads: bool = False
    bias_fixed_value: str = "none"
    bias_fixed_value_norm: float = 1.0
    attention_scale_alpha: float = 1.0
    normalization: str = "RMSNorm"
    position_embedding_type: str = "rope"
    sinusoidal_position_embedding: bool = False
    rotary_percent: float = 1.0
    attention_bias_type: str = "none"
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        super().__post_init__(**kwargs)
        if not self.divides_by_heads:
            self.base_model_tp_plan = None

    @property
    def has_sink(self) -> bool:
        """Whether the softmax has a logit of its own in its denominator."""
        return self.attention_variant in ("sink", "off-by-one")

    @property
    def needs_scores(self) -> bool:
        """Whether attention needs what only `eager_attention_forward` computes."""
        return self.attention_variant in ("k-bias", "kv-bias") or self.attention_bias_type != "none"

    @property
    def divides_by_heads(self) -> bool:
        """Whether the plan of tensor parallelism says how every parameter is divided."""
        gated = self.attention_variant == "gated"
        whole = self.gate_shared_heads or self.gate_input == "none"
        return not (
            (gated and (whole or self.gate_position == "output"))
            or self.sdpa_output_norm == "rmsnorm"
            or self.attention_variant.endswith("-bias")
            or self.attention_bias_type != "none"
            or self.multi_head_addition
        )


MegasinkConfig.register_for_auto_class()
