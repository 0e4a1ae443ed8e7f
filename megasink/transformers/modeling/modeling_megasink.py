"""A decoder trained with megasink, for transformers: sinks, gates and related options.

Shapes: B batch, T queries, S keys, H query heads, D head dim, M hidden size.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import nn
from transformers import GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.cache_utils import DynamicCache
from transformers.integrations import use_experts_implementation
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    MoeCausalLMOutputWithPast,
    MoeModelOutputWithPast,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.utils import can_return_tuple
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_megasink import (
    CACHE,
    MegasinkAttention,
    MegasinkGate,
    MegasinkPositionBias,
    MegasinkRMSNorm,
    given_cache,
    norm,
)
from .configuration_megasink import MegasinkConfig
from .ffn_megasink import MegasinkMLP, MegasinkRouter, activation, gated_unit
from .latent_megasink import attention_of
from .rotary_megasink import MegasinkRotaryEmbedding, sinusoids


# Defined in this file because transformers searches its source for the decorator.
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
        """Tokens [B * T, M], their experts and weights [B * T, K] -> [B * T, M]."""
        total = torch.zeros_like(hidden_states)
        for expert in top_k_index.unique().tolist():
            token, place = torch.where(top_k_index == expert)
            hidden = F.linear(hidden_states[token], self.gate_up_proj[expert])
            out = F.linear(self._apply_gate(hidden), self.down_proj[expert])
            out = out * top_k_weights[token, place, None]
            total.index_add_(0, token, out.to(total.dtype))
        return total


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
        _, weights, experts = self.gate(x)
        out = self.experts(x, experts, weights)
        if self.shared_expert is not None:
            out = out + self.shared_expert(x)
        return out.view(hidden_states.shape)


class MegasinkDecoderLayer(GradientCheckpointingLayer):
    def __init__(self, config, layer_idx):
        super().__init__()
        size, self.clip = config.hidden_size, config.residual_clip
        self.self_attn = attention_of(config, layer_idx)
        width = config.dense_width(layer_idx)
        self.mlp = MegasinkMLP(config, width) if width else MegasinkMoE(config)
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
    _can_record_outputs: ClassVar = {
        "hidden_states": MegasinkDecoderLayer,
        "attentions": MegasinkAttention,
        "router_logits": OutputRecorder(MegasinkRouter, index=0),
    }

    def __init__(self, config, *args, **kwargs):
        plain = not config.needs_scores
        self._supports_sdpa = plain and not config.has_sink
        self._supports_flex_attn = plain
        self._supports_flash_attn = plain and not config.is_latent
        self._keep_in_fp32_modules_strict = config.float32_parameters
        super().__init__(config, *args, **kwargs)

    def _check_and_adjust_attn_implementation(self, attn_implementation, *args, **kwargs):
        """Refuse implementations that drop a sink or bias, or cannot take narrow values."""
        name = attn_implementation or "eager"
        if problem := self.config.kernel_problem(name):
            raise ValueError(f'attn_implementation="{name}" {problem}')
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
            if getattr(module, "e_score_correction_bias", None) is not None:
                init.zeros_(module.e_score_correction_bias)
        elif isinstance(module, MegasinkGate) and module.logit is not None:
            init.zeros_(module.logit)
        elif isinstance(module, MegasinkRMSNorm) and module.weight is not None:
            init.constant_(module.weight, 0.0 if module.zero_centred else 1.0)
        elif isinstance(module, MegasinkAttention):
            if hasattr(module, "sinks"):
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
        self.embed_norm = nn.Identity()
        if config.embedding_norm:
            self.embed_norm = MegasinkRMSNorm(config, config.hidden_size, gain=False)
        self.embed_positions = None
        learned = config.position_embedding_type == "learned_absolute"
        if learned and not config.sinusoidal_position_embedding:
            self.embed_positions = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        layers = range(config.num_hidden_layers)
        self.layers = nn.ModuleList([MegasinkDecoderLayer(config, layer) for layer in layers])
        self.norm = nn.Identity() if config.post_norm else norm(config, config.hidden_size)
        self.rotary_emb = None
        if config.position_embedding_type == "rope":
            self.rotary_emb = MegasinkRotaryEmbedding(config)
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
    ) -> MoeModelOutputWithPast | BaseModelOutputWithPast:
        """Tokens [B, T] -> last hidden states [B, T, M], as in any decoder of transformers."""
        past_key_values = given_cache(past_key_values, kwargs)
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        tokens = inputs_embeds.shape[1]
        # + 0: some caches count in place while the layers run; paged ones come with positions.
        past = getattr(past_key_values, "get_seq_length", int)() + 0
        if position_ids is None and torch.is_tensor(attention_mask) and attention_mask.dim() == 2:
            position_ids = (attention_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -tokens:]
        elif position_ids is None:
            position_ids = past + torch.arange(tokens, device=inputs_embeds.device)[None]
        masks = self.masks(inputs_embeds, attention_mask, past_key_values, position_ids)
        hidden_states, rotations = self.positions(inputs_embeds, position_ids)
        hidden_states = self.embed_norm(hidden_states * self.config.mup_embedding_mult)
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
        output = MoeModelOutputWithPast if self.config.num_experts else BaseModelOutputWithPast
        return output(self.norm(hidden_states), past_key_values)

    def positions(self, embeds, position_ids):
        """Add position embeddings; return them and RoPE's cosines and sines [B, T, D]."""
        if self.rotary_emb is not None:
            return embeds, self.rotary_emb(embeds, position_ids)
        if self.embed_positions is not None:
            embeds = embeds + self.embed_positions(position_ids)
        elif self.config.position_embedding_type == "learned_absolute":
            embeds = embeds + sinusoids(position_ids, self.config.hidden_size).to(embeds.dtype)
        return embeds, None

    def masks(self, embeds, attention_mask, past_key_values, position_ids):
        """Return {layer type: mask}."""
        makers = {
            "full_attention": create_causal_mask,
            "sliding_attention": create_sliding_window_causal_mask,
        }
        if isinstance(attention_mask, dict):  # already made by generate for some caches
            return attention_mask
        given = {
            "config": self.config,
            "inputs_embeds": embeds,
            "attention_mask": attention_mask,
            CACHE: past_key_values,
            "position_ids": position_ids,
        }
        return {kind: makers[kind](**given) for kind in set(self.config.layer_types)}


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
        past_key_values=None,
        inputs_embeds=None,
        labels=None,
        use_cache=None,
        output_router_logits=None,
        logits_to_keep=0,
        **kwargs,
    ) -> MoeCausalLMOutputWithPast | CausalLMOutputWithPast:
        """Tokens [B, T] -> logits [B, T, vocabulary] of the last `logits_to_keep`; 0 for all.

        With `output_router_logits`, the loss has the load-balancing loss of experts, as in Mixtral.
        """
        config = self.config
        if output_router_logits is None:
            output_router_logits = config.output_router_logits
        kwargs["output_router_logits"] = bool(output_router_logits and config.num_experts)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=given_cache(past_key_values, kwargs),
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **kwargs,
        )
        logits = self.lm_head(kept_positions(outputs.last_hidden_state, logits_to_keep))
        if (cap := config.final_logit_softcapping) is not None:
            logits = cap * torch.tanh(logits.float() / cap)
        logits = logits * config.mup_output_mult
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, vocab_size=config.vocab_size, **kwargs)
        given = {
            "logits": logits,
            CACHE: getattr(outputs, CACHE),
            "hidden_states": outputs.hidden_states,
            "attentions": outputs.attentions,
        }
        if not config.num_experts:
            return CausalLMOutputWithPast(loss=loss, **given)
        aux_loss, router_logits = None, outputs.router_logits
        if router_logits is not None:
            if config.moe_router_score_function == "sigmoid":
                # Their softmax is each expert's share of the sigmoids.
                router_logits = tuple(F.logsigmoid(logits) for logits in router_logits)
            tokens = outputs.last_hidden_state.shape[1]
            flat = torch.is_tensor(attention_mask) and attention_mask.dim() == 2
            aux_loss = load_balancing_loss_func(
                router_logits,
                config.num_experts,
                config.num_experts_per_tok,
                attention_mask[:, -tokens:] if flat else None,
            )
            if loss is not None:
                loss = loss + config.router_aux_loss_coef * aux_loss.to(loss.device)
        given["router_logits"] = outputs.router_logits
        return MoeCausalLMOutputWithPast(loss=loss, aux_loss=aux_loss, **given)


def kept_positions(hidden_states, keep):
    """Select tokens of [B, T, M]: the last `keep` (0: all), indices [S], [B, S], or mask [B, T]."""
    if not torch.is_tensor(keep):
        return hidden_states[:, -keep:]
    if keep.dim() == 1:
        return hidden_states[:, keep]
    if keep.dtype == torch.bool:
        return hidden_states[keep]
    return torch.take_along_dim(hidden_states, keep[..., None], dim=1)


MegasinkModel.register_for_auto_class("AutoModel")
MegasinkForCausalLM.register_for_auto_class("AutoModelForCausalLM")
