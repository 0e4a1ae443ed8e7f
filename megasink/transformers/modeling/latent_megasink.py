"""Latent attention of a decoder trained with megasink, which shares a latent among its heads.

The tensors have the names of DeepSeek-V3's. Caches hold the keys and values of the heads.

Shapes: B batch, T tokens, H heads, M hidden size, D width of queries and keys, R of their rotated
channels (the last ones), V of values.
"""

import torch
from torch import nn

from .attention_megasink import (
    MegasinkAttention,
    MegasinkSinkAttention,
    eager_attention_forward,
    norm,
)
from .rotary_megasink import rotate

# transformers finds the "eager" function in the file of an attention's class.
__all__ = ["attention_of", "eager_attention_forward"]


class MegasinkLatent:
    """Mixin for `MegasinkAttention`: its projections go through latents."""

    def add_projections(self, config):
        """Add the projections to queries, keys and values, and the norms of their latents."""
        hidden, heads = config.hidden_size, config.num_attention_heads
        self.rotated, self.values = config.qk_rope_head_dim, config.v_head_dim
        self.plain, rank = config.qk_nope_head_dim, config.kv_lora_rank
        self.kv_a_proj_with_mqa = nn.Linear(hidden, rank + self.rotated, bias=False)
        self.kv_a_layernorm = norm(config, rank) if config.qk_norm else nn.Identity()
        self.kv_b_proj = nn.Linear(rank, heads * (self.plain + self.values), bias=False)
        rank, queries = config.q_lora_rank, heads * (self.plain + self.rotated)
        if rank is None:
            self.q_proj = nn.Linear(hidden, queries, bias=False)
            return
        self.q_a_proj = nn.Linear(hidden, rank, bias=False)
        self.q_a_layernorm = norm(config, rank) if config.qk_norm else nn.Identity()
        self.q_b_proj = nn.Linear(rank, queries, bias=False)

    def project(self, hidden_states, position_embeddings):
        """Return queries and keys [B, H, T, D], values [B, H, T, V], and the shape (B, T, H, V)."""
        x, (cos, sin) = hidden_states, position_embeddings
        latent, key_rotated = self.kv_a_proj_with_mqa(x).split(
            (self.kv_b_proj.in_features, self.rotated), -1
        )
        both = self.kv_b_proj(self.kv_a_layernorm(latent)).unflatten(
            -1, (-1, self.plain + self.values)
        )
        key, value = both.split((self.plain, self.values), -1)
        if self.config.q_lora_rank is None:
            query = self.q_proj(x)
        else:
            query = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)))
        query = query.unflatten(-1, (-1, self.plain + self.rotated)).transpose(1, 2)
        query, query_rotated = query.split((self.plain, self.rotated), -1)
        query = torch.cat((query, _rotate_pairs(query_rotated, cos, sin)), -1)
        key = key.transpose(1, 2)
        key_rotated = _rotate_pairs(key_rotated.unsqueeze(1), cos, sin)
        key = torch.cat((key, key_rotated.expand(-1, key.shape[1], -1, -1)), -1)
        return query, key, value.transpose(1, 2), value.shape


def _rotate_pairs(x, cos, sin):
    """Rotate neighboring channels of [B, N, T, R] as pairs; the result has all first ones first."""
    return rotate(torch.cat((x[..., 0::2], x[..., 1::2]), -1), cos, sin)


class MegasinkLatentAttention(MegasinkLatent, MegasinkAttention):
    """Latent attention without sinks."""


class MegasinkLatentSinkAttention(MegasinkLatent, MegasinkSinkAttention):
    """Latent attention with sinks."""


def attention_of(config, layer_idx):
    """Return the attention of a layer."""
    plain, with_sinks = MegasinkAttention, MegasinkSinkAttention
    if config.is_latent:
        plain, with_sinks = MegasinkLatentAttention, MegasinkLatentSinkAttention
    has_sink = config.variant_of(layer_idx) in ("sink", "off-by-one")
    return (with_sinks if has_sink else plain)(config, layer_idx)
