"""Rows that architectures share. Keys of Megatron are those of torch_dist checkpoints.

Under TransformerEngine's spec and Megatron's own the keys are the same: the norms before attention
and FFN have the names that they have where they are fused into the linear layers after them.
"""

from collections.abc import Mapping

import torch

from megasink.convert.architecture import Architecture
from megasink.convert.table import LAYERS, NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC, Row, row
from megasink.convert.transforms import (
    Constant,
    GatedGroupedQKV,
    GateUp,
    GroupedQKV,
    PaddedRows,
    RepeatedGateQKV,
    Same,
    Shifted,
    Transform,
)

LAYER = "model.layers.{layer}."
ATTENTION = f"{LAYERS}self_attention."
QKV = f"{ATTENTION}linear_qkv."
MLP = f"{LAYERS}mlp."
EXPERTS = f"{MLP}experts.experts."


def norm_weight(model: Architecture, zero_centred: bool) -> Transform:
    """Between the norms of a model and of a target that stores them so."""
    if model.zero_centred == zero_centred:
        return Same()
    return Shifted(1 if model.zero_centred else -1)


def decoder(
    model: Architecture,
    ffn: tuple[Row, ...],
    attention_rows: tuple[Row, ...] | None = None,
    *,
    zero_centred: bool = False,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    last_norm: str = "norm",
) -> tuple[Row, ...]:
    """The whole table: embedding, layers, output layer.

    Args:
        ffn, attention_rows: of a layer; None for `attention`.
        zero_centred: the weights of its norms are stored minus one.
        norms: names of those before attention and before the FFN.
        last_norm: name of the one after the last layer.
    """
    weight = norm_weight(model, zero_centred)
    before_ffn = NORM_BEFORE_EXPERTS if model.experts else NORM_OF_LOCAL_SPEC
    return (
        *embedding(model),
        row(f"{QKV}layer_norm_weight", f"{LAYER}{norms[0]}.weight", transform=weight),
        row(before_ffn, f"{LAYER}{norms[1]}.weight", transform=weight),
        *(attention(model, zero_centred) if attention_rows is None else attention_rows),
        *ffn,
        row("decoder.final_layernorm.weight", f"model.{last_norm}.weight", transform=weight),
        *output_layer(model),
    )


def embedding(model: Architecture) -> tuple[Row, ...]:
    """The tokens' embeddings."""
    rows = PaddedRows(model.vocabulary, model.padded)
    return (row("embedding.word_embeddings.weight", "model.embed_tokens.weight", transform=rows),)


def output_layer(model: Architecture) -> tuple[Row, ...]:
    """The output layer, where it is not the embedding."""
    if model.tied:
        return ()
    kept = PaddedRows(model.vocabulary, model.padded)
    return (row("output_layer.weight", "lm_head.weight", transform=kept),)


def zeros(model: Architecture, at: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Row, ...]:
    """Tensors that the target has and Megatron's model has not: {name behind `at`: shape}."""
    dtype = getattr(torch, model.dtype)
    return tuple(Row((), (at + name,), Constant(shape, dtype)) for name, shape in shapes.items())


def attention(
    model: Architecture, zero_centred: bool = False, out: str = "o_proj"
) -> tuple[Row, ...]:
    """Projections, their biases, and qk-norm."""
    at = f"{LAYER}self_attn."
    sizes = (model.groups, model.queries, model.head_dim)
    qkv = tuple(f"{at}{name}_proj" for name in "qkv")
    weights = tuple(f"{name}.weight" for name in qkv)
    mixed: Row
    if model.attention == "elementwise":
        mixed = row(f"{QKV}weight", *weights, transform=GatedGroupedQKV(*sizes))
    else:
        mixed = row(f"{QKV}weight", *weights, transform=GroupedQKV(*sizes))
    rows = [mixed]
    if model.qkv_bias:
        biases = (f"{name}.bias" for name in qkv)
        rows.append(row(f"{QKV}bias", *biases, transform=GroupedQKV(*sizes)))
    rows.append(row(f"{ATTENTION}linear_proj.weight", f"{at}{out}.weight"))
    if model.bias:
        rows.append(row(f"{ATTENTION}linear_proj.bias", f"{at}{out}.bias"))
    if model.qk_norm:
        weight = norm_weight(model, zero_centred)
        rows += [
            row(f"{ATTENTION}{x}_layernorm.weight", f"{at}{x}_norm.weight", transform=weight)
            for x in "qk"
        ]
    return tuple(rows)


def with_repeated_gate(model: Architecture, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """`attention` for a headwise gate in an architecture whose gates are elementwise."""
    sizes = (model.groups, model.queries, model.head_dim)
    first = rows[0]
    keys = (*first.megatron, f"{ATTENTION}linear_gate.weight")
    return (Row(keys, first.hf, RepeatedGateQKV(*sizes)), *rows[1:])


def sinks(model: Architecture, name: str = "sinks") -> tuple[Row, ...]:
    """One logit per head; zeros for a variant whose logit is fixed there."""
    name = f"{LAYER}self_attn.{name}"
    if not model.variant.parameters:
        return (Row((), (name,), Constant((model.heads,), torch.float32)),)
    return (row(f"{ATTENTION}core_attention.softmax_offset", name),)


def ffn(
    model: Architecture,
    at: str = "mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> tuple[Row, ...]:
    """A gated unit."""
    gate, up, down = (f"{LAYER}{at}{name}" for name in names)
    rows = []
    for kind in ("weight", "bias") if model.bias else ("weight",):
        both = (f"{gate}.{kind}", f"{up}.{kind}")
        rows.append(row(f"{MLP}linear_fc1.{kind}", *both, transform=GateUp()))
        rows.append(row(f"{MLP}linear_fc2.{kind}", f"{down}.{kind}"))
    return tuple(rows)


def experts(
    at: str = "mlp.",
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    router: str = "gate",
) -> tuple[Row, ...]:
    """A router and experts with a tensor each."""
    gate, up, down = (f"{LAYER}{at}experts.{{expert}}.{name}.weight" for name in names)
    return (
        row(f"{MLP}router.weight", f"{LAYER}{at}{router}.weight"),
        row(f"{EXPERTS}linear_fc1.weight", gate, up, transform=GateUp()),
        row(f"{EXPERTS}linear_fc2.weight", down),
    )
