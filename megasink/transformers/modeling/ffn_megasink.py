"""Feed-forward networks of a decoder trained with megasink, and the router of experts.

Shapes: B batch, T tokens, M hidden size, E experts, K experts per token.
"""

import torch
import torch.nn.functional as F
from torch import nn
from transformers.activations import ACT2FN


def activation(config):
    """Return the activation; None for "gpt-oss", whose gated unit has none."""
    return None if config.hidden_act == "gpt-oss" else ACT2FN[config.hidden_act]


def gated_unit(act_fn, gate, up):
    """Compute act(gate) * up, or GPT-OSS's clamped unit without act."""
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


class MegasinkRouter(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.top_k, self.norm_topk_prob = config.num_experts_per_tok, config.norm_topk_prob
        self.sigmoid = config.moe_router_score_function == "sigmoid"
        self.scaling_factor = config.moe_router_topk_scaling_factor
        self.groups, self.top_groups = config.n_group, config.topk_group
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        bias = torch.zeros(config.num_experts) if config.moe_router_enable_expert_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, hidden_states):
        """Tokens [B * T, M] -> logits [B * T, E], weights and experts per token [B * T, K]."""
        logits = F.linear(hidden_states, self.weight)
        scores = logits.float().sigmoid() if self.sigmoid else logits.softmax(-1, torch.float32)
        # The order is the same, but not that of the sums of groups.
        choice = scores if self.sigmoid or not self.norm_topk_prob else logits.float()
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias.float()
        if self.groups > 1:  # the score of a group is the sum of its best experts
            by_group = choice.unflatten(-1, (self.groups, -1))
            best = by_group.topk(self.top_k // self.top_groups, dim=-1).values.sum(-1)
            kept = torch.zeros_like(best).scatter(1, best.topk(self.top_groups).indices, 1.0)
            choice = by_group.masked_fill(kept[..., None] == 0, -torch.inf).flatten(-2)
        experts = torch.topk(choice, self.top_k, dim=-1).indices
        weights = scores.gather(-1, experts)
        if self.sigmoid and self.top_k > 1:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        elif self.norm_topk_prob and not self.sigmoid:
            weights = weights / weights.sum(-1, keepdim=True)
        if self.scaling_factor is not None:
            weights = weights * self.scaling_factor
        return logits, weights.to(logits.dtype), experts
