"""Configuration of a decoder trained with megasink, with options named like their flags.

The files *_megasink.py are exported with models that no architecture of transformers supports. They
need only torch and transformers.
"""

import math
from typing import ClassVar

from transformers import PreTrainedConfig

# Kernels that transformers passes sinks to, besides "eager" and "flex_attention".
FLASH_WITH_SINKS = ("flash_attention_4", "kernels-community/vllm-flash-attn3")
OURS = 'or, after `import megasink.transformers`, "megasink"'


class MegasinkConfig(PreTrainedConfig):
    """Configuration of the model."""

    model_type = "megasink"
    keys_to_ignore_at_inference: ClassVar = ["past_key_values", "cache"]
    attribute_map: ClassVar = {"logit_softcap": "final_logit_softcapping"}
    base_model_pp_plan: ClassVar = {
        "embed_tokens": (["input_ids"], ["inputs_embeds"]),
        "layers": (["hidden_states", "attention_mask"], ["hidden_states"]),
        "norm": (["hidden_states"], ["hidden_states"]),
    }

    vocab_size: int = 32000
    hidden_size: int = 768
    intermediate_size: int = 2048  # width of the FFN, or of one expert
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    num_key_value_heads: int = 12
    head_dim: int = 64
    # "silu", "gelu" (exact), "relu", "relu2", or "gpt-oss" (clamped gated unit).
    hidden_act: str = "silu"
    gated_unit: bool = True  # the FFN computes act(gate) * up rather than act(up)
    num_experts: int = 0
    num_experts_per_tok: int = 0
    norm_topk_prob: bool = True  # probabilities of the chosen experts are scaled to sum to one
    # "softmax", or "sigmoid" as in DeepSeek-V3: probabilities of chosen experts always sum to one
    # before moe_router_topk_scaling_factor.
    moe_router_score_function: str = "softmax"
    moe_router_enable_expert_bias: bool = False  # takes part in the choice of experts alone
    moe_router_topk_scaling_factor: float | None = None
    shared_expert_intermediate_size: int = 0  # 0 for no shared expert
    first_k_dense_replace: int = 0  # number of first layers with an FFN in place of experts
    dense_intermediate_size: int = 0  # its width
    n_group: int = 1  # of experts
    topk_group: int = 1  # that a token may choose from
    output_router_logits: bool = False  # train with the load-balancing loss of experts
    router_aux_loss_coef: float = 0.001
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    rms_norm_eps: float = 1e-5
    use_cache: bool = True
    tie_word_embeddings: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    pad_token_id: int | None = None
    rope_parameters: dict | None = None  # one RoPE for all layers
    linear_bias: bool = False  # in every linear layer
    qkv_bias: bool = False  # of queries, keys, values and gates
    qk_norm: bool = False  # of each query and key head
    zero_centred_norms: bool = False  # norms store their weight minus one
    # Widths of latent attention, as in DeepSeek-V3; None for other attention, and q_lora_rank also
    # without a latent of the queries. head_dim is then qk_rope_head_dim.
    kv_lora_rank: int | None = None
    q_lora_rank: int | None = None
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None
    layer_types: list[str] | None = None
    sliding_window: int | None = None  # tokens that a "sliding_attention" layer sees
    # "vanilla"; "sink", a learned logit per head in the softmax denominator; "off-by-one", the same
    # with logit 0; "gated"; "k-bias", "kv-bias", "v-bias".
    attention_variant: str = "vanilla"
    # Per layer, whether it has that attention rather than "vanilla"; None if all have it.
    attention_variant_layers: list[bool] | None = None
    # gate_granularity, ..., gate_input: of the explicit gate in "gated".
    gate_granularity: str = "headwise"
    gate_position: str = "sdpa"
    gate_shared_heads: bool = False
    gate_operation: str = "multiply"
    gate_activation: str = "sigmoid"
    gate_input: str = "hidden"
    sdpa_output_norm: str = "none"  # or "rmsnorm" or "silu", on each head's output before its gate
    sandwich_norm: bool = False  # the outputs of attention and FFN are normalized too
    post_norm: bool = False  # the residual stream is normalized instead of their inputs
    residual_clip: float | None = None  # the outputs of attention and FFN are clamped
    multi_head_addition: bool = False  # one output projection applies to the sum of the heads
    # bias_...: of the bias variants.
    bias_shared_heads: bool = False
    bias_fixed_value: str = "none"
    bias_fixed_value_norm: float = 1.0
    attention_scale_alpha: float = 1.0  # factor of the softmax output
    normalization: str = "RMSNorm"  # or "LayerNorm"
    norm_without_gain: bool = False  # of the residual stream
    embedding_norm: bool = False  # without weight
    qk_l2_norm: bool = False  # each query and key head is normalized without weight
    final_logit_softcapping: float | None = None  # logits are c * tanh(logits / c)
    position_embedding_type: str = "rope"  # "learned_absolute" or "none"
    sinusoidal_position_embedding: bool = False  # a fixed table replaces the learned one
    rotary_percent: float = 1.0  # fraction of a head that RoPE rotates
    no_rope_layers: list[int] | None = None  # per layer, whether it has RoPE; None if all have it
    # Embeddings are multiplied by mup_embedding_mult, logits by mup_output_mult, and scores by
    # sqrt(mup_base_head_dim or 1) / head_dim.
    use_mup: bool = False
    mup_embedding_mult: float = 1.0
    mup_output_mult: float = 1.0
    mup_base_head_dim: float | None = None
    attention_bias_type: str = "none"  # "alibi", or "t5" or "bucket" with relative_attention_...
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128

    def __post_init__(self, **kwargs):
        if self.layer_types is None:
            self.layer_types = ["full_attention"] * self.num_hidden_layers
        layers = self.attention_variant_layers
        if layers is not None and len(layers) != self.num_hidden_layers:
            raise ValueError(
                f"attention_variant_layers has {len(layers)} entries for "
                f"{self.num_hidden_layers} layers"
            )
        if self.is_latent:
            self.head_dim, self.num_key_value_heads = (
                self.qk_rope_head_dim,
                self.num_attention_heads,
            )
        super().__post_init__(**kwargs)
        self.settle_rope()
        # Not a property: some versions of transformers assign to it.
        self.base_model_tp_plan = self.tensor_parallel_plan()

    def settle_rope(self):
        """Settle the fraction of rotated channels, and check that all layers share one RoPE."""
        rope = self.rope_parameters or {}
        kinds = [name for name, value in rope.items() if isinstance(value, dict)]
        if kinds and self.position_embedding_type == "rope":
            raise ValueError(
                f"rope_parameters per layer type ({', '.join(kinds)}): a megasink model has one "
                "RoPE for all layers"
            )
        share = rope.get("partial_rotary_factor")
        if share is not None and self.rotary_percent not in (1.0, share):
            raise ValueError(
                f"rotary_percent {self.rotary_percent} and partial_rotary_factor {share}: give one"
            )
        if share is not None:
            self.rotary_percent = share
        elif self.rotary_percent != 1.0 and rope:
            rope["partial_rotary_factor"] = self.rotary_percent

    def variant_of(self, layer_idx: int) -> str:
        """Return the attention variant of a layer."""
        layers = self.attention_variant_layers
        return self.attention_variant if layers is None or layers[layer_idx] else "vanilla"

    @property
    def softmax_scale(self) -> float:
        """Return the factor of scores."""
        if self.is_latent:
            rope = self.rope_parameters
            log = math.log(max(rope.get("factor") or 1.0, 1.0))
            stretched = 0.1 * (rope.get("mscale_all_dim") or 0.0) * log + 1.0  # by YaRN
            return stretched**2 * (self.qk_nope_head_dim + self.qk_rope_head_dim) ** -0.5
        if not self.use_mup:
            return self.head_dim**-0.5
        return (self.mup_base_head_dim or 1.0) ** 0.5 / self.head_dim

    @property
    def is_latent(self) -> bool:
        """Whether the layers have latent attention."""
        return self.kv_lora_rank is not None

    @property
    def value_width(self) -> int:
        """Width of the values of a head."""
        return self.v_head_dim if self.is_latent else self.head_dim

    @property
    def projection_bias(self) -> bool:
        """Whether the projections of the input of attention have biases."""
        return (self.qkv_bias or self.linear_bias) and not self.is_latent

    def dense_width(self, layer_idx: int) -> int:
        """Return the width of the FFN of a layer; 0 for experts."""
        if not self.num_experts:
            return self.intermediate_size
        return self.dense_intermediate_size if layer_idx < self.first_k_dense_replace else 0

    def rotates(self, layer_idx: int) -> bool:
        """Return whether a layer has RoPE."""
        return self.no_rope_layers is None or bool(self.no_rope_layers[layer_idx])

    @property
    def has_sink(self) -> bool:
        """Whether the softmax denominator has a sink logit, in the layers with the variant."""
        return self.attention_variant in ("sink", "off-by-one")

    @property
    def needs_scores(self) -> bool:
        """Whether only `eager_attention_forward` can compute the attention."""
        return self.attention_variant in ("k-bias", "kv-bias") or self.attention_bias_type != "none"

    def kernel_problem(self, name: str) -> str | None:
        """Return why an attention implementation would be wrong; transformers accepts some."""
        of_engine = any(word in name for word in ("flash", "/", "sglang"))  # SGLang 0.5.23
        if self.needs_scores and name != "eager":
            return 'would drop a key or position bias: use "eager"'
        if self.has_sink and (of_engine or "sdpa" in name) and name not in FLASH_WITH_SINKS:
            return f'would drop attention sinks: use "eager", "flex_attention" {OURS}'
        if self.is_latent and (of_engine or "vllm" in name or "paged" in name):
            return f'may need values as wide as keys: use "eager", "sdpa" {OURS}'
        return None

    @property
    def float32_parameters(self) -> set[str]:
        """Parameters and buffers that stay float32 in a 16-bit model."""
        names = {"sinks"} if self.has_sink else set()
        if self.attention_variant[0] == "k":
            names.add("key_bias")
        if "v-bias" in self.attention_variant:
            names.add("value_bias")
        if self.moe_router_enable_expert_bias:
            names.add("e_score_correction_bias")
        return names | ({"position_bias"} if self.attention_bias_type == "t5" else set())

    @property
    def base_model_ep_plan(self) -> dict[str, str] | None:
        """Expert-parallel plan: each rank holds whole experts."""
        if not self.num_experts:
            return None
        weights = dict.fromkeys(("gate_up_proj", "down_proj"), "grouped_gemm")
        plan = {f"layers.*.mlp.experts.{name}": how for name, how in weights.items()}
        return plan | {"layers.*.mlp.experts": "ep_dispatch_experts"}

    def tensor_parallel_plan(self) -> dict[str, str] | None:
        """Tensor-parallel plan of the parameters; None if one of them cannot be split."""
        gated = self.attention_variant == "gated"
        undivided = self.gate_shared_heads or self.gate_input == "none"
        if (
            (gated and (undivided or self.gate_position == "output"))
            or self.sdpa_output_norm == "rmsnorm"
            or self.attention_variant.endswith("-bias")
            or self.attention_bias_type != "none"
            or self.multi_head_addition
            or self.is_latent
        ):
            return None
        attention = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise"}
        if gated:
            attention["gate.proj"] = "colwise"
        if self.qk_norm:
            attention |= dict.fromkeys(("q_norm", "k_norm"), "replicated_with_grad_allreduce")
        attention["o_proj"] = "rowwise"
        plan = {f"layers.*.self_attn.{name}": how for name, how in attention.items()}
        if self.has_sink:
            plan["layers.*.self_attn.sinks"] = "colwise"
            plan["layers.*.self_attn"] = "local_params"
        dense = {"gate_proj": "colwise"} if self.gated_unit else {}
        dense |= {"up_proj": "colwise", "down_proj": "rowwise"}
        at = "layers.*.mlp"
        if self.num_experts:
            plan[f"{at}.experts.gate_up_proj"] = "packed_colwise"
            plan[f"{at}.experts.down_proj"] = "rowwise"
            plan[f"{at}.experts"] = "moe_tp_experts"
            at = f"{at}.shared_expert"
        if not self.num_experts or self.shared_expert_intermediate_size:
            plan |= {f"{at}.{name}": how for name, how in dense.items()}
        if self.num_experts and self.first_k_dense_replace:
            plan |= {f"layers.*.mlp.{name}": how for name, how in dense.items()}
        return plan


MegasinkConfig.register_for_auto_class()
