"""The head-balance loss by plain autograd in models of transformers: HeadBalanceLoss equals it.

Attention is the definition with its S x S matrix, and Eq. 7 and 8 of P0 are those of
tests/balance/definition.py:
nothing of megasink.balance and megasink.transformers takes part.

Shapes: B rows, T tokens, L layers with gates, H query heads.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface

from megasink.attention import reference_attention
from tests.analysis.capture.tiny_models import tiny_model
from tests.balance.definition import balance_loss

NAME = "balance_definition"


def definition(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention by its definition; it leaves its gates on the module."""
    out_BHTD, _lse, module.gate_of_definition = reference_attention(
        query,
        key,
        value,
        variant="vanilla" if s_aux is None else "sink",
        sink_H=None if s_aux is None else s_aux.to(query.dtype),
        window=sliding_window,
        scale=scaling,
    )
    return out_BHTD.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, definition)
AttentionMaskInterface.register(NAME, lambda *_, **__: None)

# The logits of explicit gates, written out: class -> (module that computes them, logits of heads).
_EXPLICIT: dict[str, Any] = {
    "Qwen3_5Attention": ("q_proj", lambda x, heads: x.unflatten(-1, (heads, -1)).chunk(2, -1)[1]),
    "Lfm3Attention": ("g_proj", lambda x, heads: x[..., None]),
    "MegasinkAttention": ("gate.proj", lambda x, heads: x.unflatten(-1, (heads, -1))),
}


class Oracle:
    """A tiny model, which keeps the gates [B, H, T] of each layer in its last forward pass."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float64, **options: Any):
        model = without_grouped_experts(tiny_model(name, NAME, **options))
        self.model: Any = model.to(dtype).train()
        self.heads = self.model.config.num_attention_heads
        self._attentions = [
            layer.self_attn for layer in self.model.model.layers if hasattr(layer, "self_attn")
        ]
        for attention in self._attentions:
            explicit = _EXPLICIT.get(type(attention).__name__)
            if explicit is None or getattr(attention, "gate", 0) is None:
                continue
            module, logits = explicit
            projection = attention.get_submodule(module)
            projection.register_forward_hook(self._explicit(attention, logits))

    def _explicit(self, attention: Any, logits: Any) -> Any:
        def hook(_module: Any, _args: Any, output: Tensor) -> None:
            gate_BTHX = logits(output, self.heads).sigmoid()
            attention.explicit_gate = gate_BTHX.mean(-1).transpose(1, 2)

        return hook

    def importance(self, real_BT: Tensor | None = None) -> Tensor:
        """The importance [L, H] of the last forward pass, differentiable."""
        rows = []
        for attention in self._attentions:
            gate_BHT = getattr(attention, "explicit_gate", attention.gate_of_definition)
            if real_BT is None:
                rows.append(gate_BHT.mean((0, 2)))
            else:
                rows.append(gate_BHT.transpose(1, 2)[real_BT].mean(0))
        return torch.stack(rows)

    def gradients(self) -> dict[str, Tensor]:
        """Take the gradients of the parameters."""
        return take_gradients(self.model)


def without_grouped_experts(model: Any) -> Any:
    """The model, whose experts then compute in float64 too."""
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")
    return model


def take_gradients(model: Any) -> dict[str, Tensor]:
    """{name: gradient}, which the model then no longer has."""
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def coefficients(importance_LH: Tensor, coeff: float, routed: list[list[int]]) -> Tensor:
    """dL/dImp [L, H]: what the next step's importance is multiplied with (scope global)."""
    leaf_LH = importance_LH.detach().requires_grad_()
    (found_LH,) = torch.autograd.grad(balance_loss(leaf_LH, coeff, routed), leaf_LH)
    return found_LH


def tokens(seed: int, rows: int = 2, length: int = 12) -> Tensor:
    """[B, T]."""
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))
