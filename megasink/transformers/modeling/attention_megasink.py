"""Attention of a decoder trained with megasink: sinks, biases and explicit gates.

Shapes: B batch, T queries, S keys, H query heads, G key/value groups, N heads or groups,
D head dim, C gate scores per head (1 or D), M hidden size.
"""

import math
from dataclasses import fields

import torch
import torch.nn.functional as F
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .rotary_megasink import rotate

# What transformers calls the cache of keys and values: "cache" from 5.24 on. Before, that is what
# continuous batching hands to the kernels.
_FIELDS = {field.name for field in fields(BaseModelOutputWithPast)}
CACHE = "cache" if "cache" in _FIELDS else "past_key_values"


def given_cache(past_key_values, kwargs):
    """Take the cache out of a model's arguments, whichever name it has; None if there is none."""
    if CACHE == "past_key_values" or past_key_values is not None:
        return past_key_values
    return kwargs.pop(CACHE, None)


def eager_attention_forward(
    module, query, key, value, attention_mask, scaling, dropout=0.0, s_aux=None, **kwargs
):
    """Softmax attention in which each head may have an extra key, the slot.

    Its logit is the sink s_aux [H], with value zero, or scale * q . k* for a key bias k*.
    Query [B, H, T, D], key and value [B, G, S, D] -> output [B, T, H, D], weights [B, H, T, S].
    """
    key = key.repeat_interleave(module.num_key_value_groups, dim=1)
    value = value.repeat_interleave(module.num_key_value_groups, dim=1)
    scores = torch.matmul(query, key.transpose(2, 3)).float() * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    slot = None if s_aux is None else s_aux.view(1, -1, 1, 1)
    if module.key_bias is not None:
        slot = (query * module.key_bias[..., None, :]).sum(-1, keepdim=True) * scaling
    if slot is None:
        weights = scores.softmax(-1)
    else:
        slot = slot.float().expand(*scores.shape[:-1], 1)
        weights, slot = torch.cat((scores, slot), -1).softmax(-1).split((scores.shape[-1], 1), -1)
    weights = F.dropout(weights, dropout, module.training)
    out = torch.matmul(weights.to(value.dtype), value)
    if module.key_bias is not None and module.slot_value is not None:
        out = out + (slot * module.slot_value[..., None, :]).to(out.dtype)
    return out.transpose(1, 2).contiguous(), weights


class MegasinkRMSNorm(nn.Module):
    def __init__(self, config, size, gain=True):
        super().__init__()
        self.zero_centred, self.weight = config.zero_centred_norms, None
        if gain:
            self.weight = nn.Parameter(torch.full((size,), 0.0 if self.zero_centred else 1.0))
        self.eps = config.rms_norm_eps

    def forward(self, hidden_states):
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.weight is None:
            return wide.to(hidden_states.dtype)
        weight = 1.0 + self.weight.float() if self.zero_centred else self.weight.float()
        return (weight * wide).to(hidden_states.dtype)


class MegasinkLayerNorm(MegasinkRMSNorm):
    def __init__(self, config, size):
        super().__init__(config, size)
        self.bias = nn.Parameter(torch.zeros(size))

    def forward(self, hidden_states):
        weight = 1.0 + self.weight if self.zero_centred else self.weight
        return F.layer_norm(hidden_states, weight.shape, weight, self.bias, self.eps)


def norm(config, size):
    if config.normalization == "LayerNorm":
        return MegasinkLayerNorm(config, size)
    return MegasinkRMSNorm(config, size, gain=not config.norm_without_gain)


def head_norm(config):
    """Norm of each query or key head; None without."""
    if config.qk_l2_norm:
        return MegasinkRMSNorm(config, config.head_dim, gain=False)
    return norm(config, config.head_dim) if config.qk_norm else None


class MegasinkGateScore(nn.Module):
    """gate = f(score), averaged over shared heads; a module, so that hooks can read the gate."""

    def __init__(self, config):
        super().__init__()
        self.activation, self.shared_heads = config.gate_activation, config.gate_shared_heads

    def forward(self, score):
        """Score [B, T, N, C], float32 -> gate of the same shape, with N = 1 for shared heads."""
        gate = score if self.activation in ("identity", "silu") else score.sigmoid()
        if self.activation == "silu":
            gate = F.silu(score)
        elif self.activation == "ns-sigmoid":
            gate = 0.5 + 0.5 * gate
        return gate.mean(-2, keepdim=True) if self.shared_heads else gate


class MegasinkGate(nn.Module):
    """score = W x (or a parameter), gate = f(score), out = y * gate or y + gate."""

    def __init__(self, config):
        super().__init__()
        heads, self.width = config.num_attention_heads, 1
        if config.gate_position in ("key", "value"):
            heads = config.num_key_value_heads
        if config.gate_granularity == "elementwise":
            self.width = config.value_width
        if config.gate_position == "output":
            heads, self.width = 1, config.hidden_size
        self.operation, self.act = config.gate_operation, MegasinkGateScore(config)
        self.proj = self.logit = None
        if config.gate_input == "hidden":
            self.proj = nn.Linear(
                config.hidden_size, heads * self.width, bias=config.projection_bias
            )
        else:
            self.logit = nn.Parameter(torch.zeros(heads * self.width))

    def forward(self, gated, hidden_states):
        """Gated tensor [B, T, N, D], normalized hidden states [B, T, M] -> [B, T, N, D]."""
        if self.logit is None:
            score = self.proj(hidden_states)
        else:
            score = self.logit.expand(*hidden_states.shape[:-1], -1)
        gate = self.act(score.unflatten(-1, (-1, self.width)).float())
        out = gated * gate if self.operation == "multiply" else gated + gate
        return out.to(gated.dtype)


class MegasinkPositionBias(nn.Module):
    """Score biases per head and distance, in float32: ALiBi, T5's, or the T5 bucket itself."""

    def __init__(self, config):
        super().__init__()
        self.kind, self.heads = config.attention_bias_type, config.num_attention_heads
        self.buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance
        self.weight = None
        if self.kind == "t5":
            self.weight = nn.Parameter(torch.zeros(self.buckets, self.heads))

    def forward(self, mask, past):
        """Mask [B, 1, T, S], count of tokens before the queries -> biased mask [B, H, T, S]."""
        queries, keys = (torch.arange(size, device=mask.device) for size in mask.shape[-2:])
        # A sliding-window cache drops earlier keys.
        first_key = max(past + len(queries) - len(keys), 0)
        distance = (past + queries[:, None] - keys - first_key).clamp(min=0)
        if self.kind == "alibi":
            slopes = torch.tensor(alibi_slopes(self.heads), device=mask.device)
            return mask - slopes[:, None, None] * distance
        half = self.buckets // 2
        ratio = torch.log(distance.double().clamp(min=half) / half)
        ratio = ratio / math.log(self.max_distance / half)
        # Rounding of log must not move a distance exactly on a boundary below it.
        far = (half + (ratio * (self.buckets - half) + 1e-9).floor()).clamp(max=self.buckets - 1)
        bucket = torch.where(distance < half, distance, far.long())
        bias = (
            bucket[..., None].float() if self.weight is None else F.embedding(bucket, self.weight)
        )
        return mask + bias.permute(2, 0, 1)


def alibi_slopes(heads):
    """2 ** (-8 h / heads) for a power of two; further heads take every other slope of 2 * power."""
    power = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    return slopes + [2.0 ** (-4.0 * h / power) for h in range(1, 2 * power, 2)][: heads - power]


class MegasinkAttention(nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        self.config, self.layer_idx = config, layer_idx
        self.head_dim, heads = config.head_dim, config.num_attention_heads
        self.num_key_value_groups = heads // config.num_key_value_heads
        self.scaling, self.is_causal = config.softmax_scale, True
        windowed = config.layer_types[layer_idx] == "sliding_attention"
        self.sliding_window = config.sliding_window if windowed else None
        self.add_projections(config)
        inputs = config.value_width * (1 if config.multi_head_addition else heads)
        self.o_proj = nn.Linear(inputs, config.hidden_size, bias=config.linear_bias)
        self.variant = variant = config.variant_of(layer_idx)
        self.gate = MegasinkGate(config) if variant == "gated" else None
        self.gate_position = config.gate_position if variant == "gated" else None
        self.position_bias = None
        if config.attention_bias_type != "none":
            self.position_bias = MegasinkPositionBias(config)
        self.output_norm = None
        if config.sdpa_output_norm == "rmsnorm":
            self.output_norm = nn.Parameter(torch.ones(heads * self.head_dim))
        shape = (self.head_dim,) if config.bias_shared_heads else (heads, self.head_dim)
        self.key_bias = nn.Parameter(torch.zeros(shape)) if variant[0] == "k" else None
        self.value_bias = nn.Parameter(torch.zeros(shape)) if "v-bias" in variant else None

    def add_projections(self, config):
        """Add the projections to queries, keys and values, and their norms."""
        hidden, bias = config.hidden_size, config.projection_bias
        groups = config.num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, groups, bias=bias)
        self.v_proj = nn.Linear(hidden, groups, bias=bias)
        self.q_norm, self.k_norm = head_norm(config), head_norm(config)

    @property
    def slot_value(self):
        """Value of the key bias, [D] or [H, D]; None for zero."""
        kind, size = self.config.bias_fixed_value, self.config.bias_fixed_value_norm
        if self.value_bias is not None or kind == "none":
            return self.value_bias
        if kind == "uniform":
            return torch.full_like(self.key_bias, size * self.head_dim**-0.5)
        return size * F.one_hot(torch.zeros_like(self.key_bias[..., 0]).long(), self.head_dim)

    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        """Normalized hidden states [B, T, M] -> [B, T, M], weights [B, H, T, S] or None."""
        *heads, shape = self.heads(hidden_states, position_embeddings, past_key_values, kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self,
            *heads,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            **kwargs,
        )
        return self.outputs(out.reshape(shape), hidden_states), weights

    def heads(self, hidden_states, position_embeddings, past_key_values, kwargs):
        """Return queries [B, H, T, D], keys and values [B, G, S, D], and the shape (B, T, H, D)."""
        query, key, value, shape = self.project(hidden_states, position_embeddings)
        if past_key_values is not None:
            # A paged cache adds to the kernel's arguments what it needs.
            added = {"kwargs": kwargs} if CACHE == "cache" else {}
            key, value = past_key_values.update(key, value, self.layer_idx, **added)
        return query, key, value, shape

    def project(self, hidden_states, position_embeddings):
        """Return what `heads` does, for the new tokens alone."""
        x, position = hidden_states, self.gate_position
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (proj(x).unflatten(-1, (-1, self.head_dim)) for proj in projections)
        shape = query.shape
        if position == "query":
            query = self.gate(query, x)
        elif position == "key":
            key = self.gate(key, x)
        elif position == "value":
            value = self.gate(value, x)
        if self.q_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
        if position_embeddings is not None and self.config.rotates(self.layer_idx):
            cos, sin = position_embeddings
            query, key = rotate(query, cos, sin), rotate(key, cos, sin)
        return query, key, value, shape

    def outputs(self, out, hidden_states):
        """Return what leaves the layer, [B, T, M], of the heads' outputs [B, T, H, D]."""
        x, position = hidden_states, self.gate_position
        if self.variant == "v-bias":
            out = out + self.value_bias.to(out.dtype)
        if self.config.attention_scale_alpha != 1.0:
            out = out * self.config.attention_scale_alpha
        if self.output_norm is not None:
            wide = out.float()
            wide = wide * (wide.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).rsqrt()
            out = (wide * self.output_norm.view(-1, self.head_dim)).to(out.dtype)
        elif self.config.sdpa_output_norm == "silu":
            out = F.silu(out)
        if position == "sdpa":
            out = self.gate(out, x)
        out = out.sum(-2) if self.config.multi_head_addition else out.flatten(-2)
        out = self.o_proj(out)
        if position == "output":
            out = self.gate(out.unsqueeze(-2), x).squeeze(-2)
        return out


class MegasinkSinkAttention(MegasinkAttention):
    """Attention with sinks: a class, for vLLM reads `s_aux=self.sinks` in the source of `forward`.

    Layers without sinks have no such attribute: transformers' paged attention checks for it.
    """

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        learned = self.variant == "sink"
        self.sinks = nn.Parameter(torch.zeros(config.num_attention_heads), learned)

    def forward(
        self, hidden_states, position_embeddings, attention_mask, past_key_values=None, **kwargs
    ):
        """Normalized hidden states [B, T, M] -> [B, T, M], weights [B, H, T, S] or None."""
        *heads, shape = self.heads(hidden_states, position_embeddings, past_key_values, kwargs)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention_forward
        )
        out, weights = attend(
            self,
            *heads,
            attention_mask,
            dropout=0.0,
            scaling=self.scaling,
            sliding_window=self.sliding_window,
            s_aux=self.sinks,
            **kwargs,
        )
        return self.outputs(out.reshape(shape), hidden_states), weights
