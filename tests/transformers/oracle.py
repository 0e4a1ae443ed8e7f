"""Attention by its definition, S x S in the dtype of the model, and the batches it is compared on.

transformers' eager functions compute the softmax in float32 whatever the dtype; this one does not.

Shapes: B rows, T queries, S keys, V vocabulary.
"""

import copy
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.masking_utils import eager_mask

import megasink.transformers  # noqa: F401
from tests.analysis.capture.tiny_models import VOCABULARY, tiny_model

ORACLE, TOKENS = "megasink_oracle", 13


def oracle_attention(module, query, key, value, attention_mask, scaling=None, s_aux=None, **kwargs):
    repeats = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(-1, -2) * scale + attention_mask
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), weights


@contextmanager
def oracle() -> Iterator[None]:
    """The oracle is an attention implementation."""
    AttentionInterface.register(ORACLE, oracle_attention)
    AttentionMaskInterface.register(ORACLE, eager_mask)
    try:
        yield
    finally:
        AttentionInterface._global_mapping.pop(ORACLE)
        AttentionMaskInterface._global_mapping.pop(ORACLE)


class Batch(NamedTuple):
    """Inputs of a model, and which of its tokens are not padding."""

    ids_BT: Tensor
    mask_BT: Tensor | None
    positions_BT: Tensor | None
    real_BT: Tensor


def batch(layout: str, tokens: int = TOKENS, rows: int = 3) -> Batch:
    """Random tokens: "whole" rows, padding on the "left" or "right", or "packed" documents."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(3, VOCABULARY, (rows, tokens), generator=generator)
    real = torch.ones_like(ids)
    if layout in ("left", "right"):
        for row in range(1, rows):  # the first row is whole
            padding = slice(0, 3 * row) if layout == "left" else slice(-3 * row, None)
            real[row, padding] = 0
        return Batch(ids, real, None, real.bool())
    if layout == "packed":
        bounds = [[0, 4, 5, tokens], [0, 6, tokens], [0, tokens]]
        rows_ = [
            torch.cat([torch.arange(b - a) for a, b in itertools.pairwise(r)])
            for r in bounds[:rows]
        ]
        return Batch(ids, None, torch.stack(rows_), real.bool())
    return Batch(ids, None, None, real.bool())


def logits_of(model: PreTrainedModel, inputs: Batch) -> Tensor:
    """[B, T, V], 0 at padding, whose logits mean nothing."""
    logits = model(
        inputs.ids_BT,
        attention_mask=inputs.mask_BT,
        position_ids=inputs.positions_BT,
        use_cache=False,
    ).logits
    return logits.masked_fill(~inputs.real_BT[..., None], 0.0)


def trained(
    model: PreTrainedModel, implementation: str, inputs: Batch
) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits, and the gradients of a random projection of them."""
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = logits_of(model, inputs)
    generator = torch.Generator().manual_seed(2)
    random = torch.randn(logits.shape, generator=generator, dtype=torch.float64)
    (logits * random).sum().backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), copy.deepcopy(grads)


def in_double(name: str, **options) -> PreTrainedModel:
    """A tiny model in float64 that trains without dropout."""
    model = tiny_model(name, "eager", **options).double().train()
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the grouped one knows no float64
    return model


def distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest value."""
    actual, expected = actual.detach(), expected.detach()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))
