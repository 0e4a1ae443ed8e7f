"""A decoder trained with megasink, for transformers: sinks, gates and the options around them.

Shapes: B batch, T queries, S keys, H query heads, D head dim, M hidden size.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.cache_utils import DynamicCache
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from .attention_megasink import (
    MegasinkAttention,
    MegasinkGate,
    MegasinkPositionBias,
    MegasinkRMSNorm,
    norm,
)
from .configuration_megasink import MegasinkConfig

# Kernels that transformers hands the sinks to, beside "eager" and "flex_attention".
FLASH_WITH_SINKS = ("flash_attention_4", "kernels-community/vllm-flash-attn3")


def activation(config):
    """None for "gpt-oss", whose unit is not a product with an activation."""
    return None if config.hidden_act == "gpt-oss" else ACT2FN[config.hidden_act]


def gated_unit(act_fn, gate, up):
    """act(gate) * up; without act GPT-OSS's clamped unit."""
    if act_fn is not None:
        return act_fn(gate) * up
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    return gate * torch.sigmoid(1.702 * gate) * (up + 1.0)


class MegasinkMLP(nn.Module):
    def __init__(self, config, width):
        super().__init__()
        self.act_fn, bias = activation(config), config.linear_bias
        self.gate_proj = None
        if config.gated_unit:
            self.gate_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.up_proj = nn.Linear(config.hidden_size, width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)

    def forward(self, x):
        if self.gate_proj is None:
            return self.down_proj(self.act_fn(self.up_proj(x)))
        return self.down_proj(gated_unit(self.act_fn, self.gate_proj(x), self.up_proj(x)))


@use_experts_implementation
class MegasinkExperts(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.num_experts, self.act_fn = config.num_experts, activation(config)
        experts, hidden, width = config.num_experts, config.hidden_size, config.intermediate_size
        self.gate_up_proj = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, width))

    def _apply_gate(self, gate_up):
        return gated_unit(self.act_fn, *gate_up.chunk(2, dim=-1))

    def forward(self, hidden_states, top_k_index, top_k_weights):
        """Tokens [B * T, M], experts of each and their weights -> [B * T, M]."""
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            hidden = F.linear(hidden_states[token], self.gate_up_proj[expert])
            out = F.linear(self._apply_gate(hidden), self.down_proj[expert])
            out = out * top_k_weights[token, place, None]
            total.index_add_(0, token, out.to(total.dtype))
        return total


class MegasinkRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))

    def forward(self, hidden_states):
        logits = F.linear(hidden_states, self.weight)
        weights, experts = torch.topk(logits.softmax(-1, dtype=torch.float32), self.top_k, dim=-1)
        if self.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        return experts, weights.to(logits.dtype)


class MegasinkMoE(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.gate = MegasinkRouter(config)
        self.experts = MegasinkExperts(config)
        self.shared_expert = None
        if config.shared_expert_intermediate_size:
            self.shared_expert = MegasinkMLP(config, config.shared_expert_intermediate_size)

    def forward(self, hidden_states):
        x = hidden_states.view(-1, hidden_states.shape[-1])
        experts, weights = self.gate(x)
        out = self.experts(x, experts, weights)
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        return out.view(hidden_states.shape)


class MegasinkDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        size, self.clip = config.hidden_size, config.residual_clip
        self.self_attn = MegasinkAttention(config, layer_idx)
        self.mlp = MegasinkMoE(config) if config.num_experts else None
        if self.mlp is None:
            self.mlp = MegasinkMLP(config, config.intermediate_size)
        self.post_norm, after = config.post_norm, config.post_norm or config.sandwich_norm
        self.input_layernorm = nn.Identity() if self.post_norm else norm(config, size)
        self.post_attention_layernorm = nn.Identity() if self.post_norm else norm(config, size)
        self.attention_output_norm = norm(config, size) if after else nn.Identity()
        self.mlp_output_norm = norm(config, size) if after else nn.Identity()

    def add(self, residual, output, output_norm):
        if self.clip is not None:
            output = output.clamp(-self.clip, self.clip)
        if self.post_norm:
            return output_norm(residual + output)
        return residual + output_norm(output)

    def forward(self, hidden_states, **kwargs):
        output, _ = self.self_attn(self.input_layernorm(hidden_states), **kwargs)
        hidden_states = self.add(hidden_states, output, self.attention_output_norm)
        output = self.mlp(self.post_attention_layernorm(hidden_states))
        return self.add(hidden_states, output, self.mlp_output_norm)


class MegasinkPreTrainedModel(PreTrainedModel):
    config_class = MegasinkConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("MegasinkDecoderLayer",)
    _skip_keys_device_placement = ("past_key_values",)
    _supports_attention_backend = True
    _keep_in_fp32_modules_strict = ("sinks", "key_bias", "value_bias", "position_bias")
    _can_record_outputs: ClassVar = {
        "hidden_states": MegasinkDecoderLayer,
        "attentions": MegasinkAttention,
    }

    def __init__(self, config, *args, **kwargs):
        plain = not config.needs_scores
        self._supports_sdpa = plain and not config.has_sink
        self._supports_flash_attn = self._supports_flex_attn = plain
        super().__init__(config, *args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        """Refuse what would leave a sink or a bias out; transformers lets some of it pass."""
        name = attn_implementation or "eager"
        kernel = "flash" in name or "sdpa" in name or "/" in name
        drops_sinks = self.config.has_sink and kernel and name not in FLASH_WITH_SINKS
        if drops_sinks or (self.config.needs_scores and name != "eager"):
            what = "attention sinks" if drops_sinks else "a bias of keys or positions"
            fine = '"eager"' if self.config.needs_scores else '"eager" or "flex_attention"'
            raise ValueError(f'attn_implementation="{name}" would leave out {what}: use {fine}')
        return super()._check_and_adjust_attn_implementation(attn_implementation, *args, **kwargs)

    def _init_weights(self, module):
        super()._init_weights(module)
        std = self.config.initializer_range
        if isinstance(module, MegasinkExperts):
            init.normal_(module.gate_up_proj, mean=0.0, std=std)
            init.normal_(module.down_proj, mean=0.0, std=std)
        elif isinstance(module, MegasinkRouter | MegasinkPositionBias):
            if module.weight is not None:
                init.normal_(module.weight, mean=0.0, std=std)
        elif isinstance(module, MegasinkGate) and module.logit is not None:
            init.zeros_(module.logit)
        elif isinstance(module, MegasinkRMSNorm):
            init.constant_(module.weight, 0.0 if module.zero_centred else 1.0)
        elif isinstance(module, MegasinkAttention):
            if self.config.has_sink:
                init.zeros_(module.sinks)
            for parameter in (module.key_bias, module.value_bias):
                if parameter is not None:
                    init.normal_(parameter, mean=0.0, std=std)
            if module.output_norm is not None:
                init.ones_(module.output_norm)


class MegasinkModel(MegasinkPreTrainedModel):
    def __init__(self, config):
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, config.pad_token_id)
        self.embed_positions = None
        learned = config.position_embedding_type == "learned_absolute"
        if learned and not config.sinusoidal_position_embedding:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([MegasinkDecoderLayer(config, layer) for layer in layers])
        self.norm = nn.Identity() if config.post_norm else norm(config, config.hidden_size)
        self.gradient_checkpointing = False
        self.post_init()

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        past_key_values=None,
        inputs_embeds=None,
        use_cache=None,
        **kwargs,
    ):
        """As any decoder of transformers: tokens [B, T] -> last hidden states [B, T, M]."""
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        tokens = inputs_embeds.shape[1]
        # Some caches count in place while the layers run.
        past = 0 if past_key_values is None else past_key_values.get_seq_length() + 0
        if position_ids is None and torch.is_tensor(attention_mask) and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
        elif position_ids is None:
            position_ids = past + torch.arange(tokens, device=inputs_embeds.device)[None]
        masks = self.masks(inputs_embeds, attention_mask, past_key_values, position_ids)
        hidden_states, rotations = self.positions(inputs_embeds, position_ids)
        for kind, layer in zip(self.config.layer_types, self.layers, strict=True):
            mask, bias = masks[kind], layer.self_attn.position_bias
            hidden_states = layer(
                hidden_states,
                attention_mask=mask if bias is None else bias(mask, past),
                position_ids=position_ids,
                past_key_values=past_key_values,
                position_embeddings=rotations,
                **kwargs,
            )
        return BaseModelOutputWithPast(
            last_hidden_state=self.norm(hidden_states), past_key_values=past_key_values
        )

    def positions(self, embeds, position_ids):
        """The embeddings with those of the positions, and RoPE's cosines and sines [B, 1, T, D]."""
        config, kind = self.config, self.config.position_embedding_type
        if kind == "rope":
            frequencies = inverse_frequencies(config, embeds.device)
            angles = position_ids[..., None].float() * frequencies
            angles = torch.cat((angles, angles), dim=-1)[:, None]
            return embeds, (angles.cos().to(embeds.dtype), angles.sin().to(embeds.dtype))
        if kind == "learned_absolute" and self.embed_positions is not None:
            embeds = embeds + self.embed_positions(position_ids)
        elif kind == "learned_absolute":
            embeds = embeds + sinusoids(position_ids, config.hidden_size).to(embeds.dtype)
        return embeds, None

    def masks(self, embeds, attention_mask, past_key_values, position_ids):
        """{kind of layer: mask}."""
        makers = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        masks = attention_mask  # generate makes them itself for some caches
        if not isinstance(masks, dict):
            given = (self.config, embeds, attention_mask, past_key_values, position_ids)
            masks = {kind: makers[kind](*given) for kind in set(self.config.layer_types)}
        return masks


def inverse_frequencies(config, device):
    """Of RoPE, float32, by channel pair: made anew each time, so that no dtype rounds them."""
    if config.rope_parameters["rope_type"] != "default":
        make = ROPE_INIT_FUNCTIONS[config.rope_parameters["rope_type"]]
        return make(config, device)[0].float()
    channels = int(config.head_dim * config.rotary_percent)
    exponent = torch.arange(0, channels, 2, device=device).float() / channels
    return 1.0 / config.rope_parameters["rope_theta"] ** exponent


def sinusoids(position_ids, size):
    """[B, T, size]: channel 2k is sin(t / 10000 ** (2k / size)), channel 2k + 1 its cosine."""
    exponent = torch.arange(0, size, 2, device=position_ids.device).double() / size
    angle = position_ids[..., None].double() * 10000.0**-exponent
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(-2).float()


class MegasinkForCausalLM(MegasinkPreTrainedModel, GenerationMixin):
    _tied_weights_keys: ClassVar = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan: ClassVar = {"lm_head": "colwise_gather_output"}
    _pp_plan: ClassVar = {"lm_head": (["hidden_states"], ["logits"])}

    def __init__(self, config):
        super().__init__(config)
        self.model = MegasinkModel(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids=None,
        attention_mask=None,
        position_ids=None,
        labels=None,
        logits_to_keep=0,
        **kwargs,
    ):
        """Tokens [B, T] -> logits [B, T, tokens] of the last `logits_to_keep`; 0 for all."""
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(outputs.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=self.config.vocab_size, **kwargs)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


MegasinkModel.register_for_auto_class("AutoModel")
MegasinkForCausalLM.register_for_auto_class("AutoModelForCausalLM")
