"""Rows shared by several targets, with Megatron's keys in torch_dist checkpoints.

TransformerEngine's spec and Megatron's own have the same keys: the norms before attention and FFN
are always named as if they were fused into the linear layers after them.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence

from megasink.convert.architecture import Architecture
from megasink.convert.megatron_weights import apart
from megasink.convert.transforms import (
    Constant,
    FusedQKV,
    GatedGroupedQKV,
    GateUp,
    GroupedQKV,
    PaddedRows,
    RepeatedGateQKV,
    Shifted,
    Transform,
)
from megasink.convert.weight_table import (
    LAYERS,
    NORM_BEFORE_EXPERTS,
    NORM_OF_LOCAL_SPEC,
    Row,
    numbered,
    row,
)

LAYER = "model.layers.{layer}."
ATTENTION = f"{LAYERS}self_attention."
QKV = f"{ATTENTION}linear_qkv."
MLP = f"{LAYERS}mlp."
EXPERTS = f"{MLP}experts.experts."
_FFN_NAMES = ("gate_proj", "up_proj", "down_proj")
LATENT = {
    "self_attention.linear_q_up_proj.layer_norm_": "self_attn.q_a_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attn.kv_a_layernorm.",
    "self_attention.linear_q_proj.": "self_attn.q_proj.",
    "self_attention.linear_q_down_proj.": "self_attn.q_a_proj.",
    "self_attention.linear_q_up_proj.": "self_attn.q_b_proj.",
    "self_attention.linear_kv_down_proj.": "self_attn.kv_a_proj_with_mqa.",
    "self_attention.linear_kv_up_proj.": "self_attn.kv_b_proj.",
    "self_attention.linear_proj.": "self_attn.o_proj.",
}
"""For a layer with latent attention, {start of Megatron's key: name in DeepSeek-V3}."""


def of_layers(
    model: Architecture, table: Callable[[Architecture], Sequence[Row]]
) -> tuple[Row, ...]:
    """Return the rows of layers that may differ; `table` has those of a model with equal layers."""
    by_layer = [{row.hf: row for row in table(model.of_layer(n))} for n in range(model.layers)]
    alike, others = apart(by_layer)
    return (
        *alike.values(),
        *(_of_one(row, n) for n, rows in enumerate(others) for row in rows.values()),
    )


def _of_one(row: Row, layer: int) -> Row:
    names = tuple(name.replace("{layer}", str(layer)) for name in row.hf)
    return dataclasses.replace(
        row, megatron=tuple(numbered(key, layer) for key in row.megatron), hf=names
    )


def norm_weight(model: Architecture, zero_centred: bool) -> Transform:
    """Return the transform between the norms of a model and those of a target."""
    if model.zero_centred == zero_centred:
        return Transform()
    return Shifted(1 if model.zero_centred else -1)


def decoder(
    model: Architecture,
    ffn: tuple[Row, ...],
    attention_rows: tuple[Row, ...] | None = None,
    *,
    zero_centred: bool = False,
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm"),
    last_norm: str = "norm",
) -> tuple[Row, ...]:
    """Return the whole table: embedding, layers, output layer.

    `norms` are named before attention and FFN and, with sandwich norms, after each;
    `zero_centred` is whether the target stores their weights minus one.
    """
    before_ffn = NORM_BEFORE_EXPERTS if model.experts else NORM_OF_LOCAL_SPEC
    after = (f"{LAYERS}post_self_attn_layernorm.weight", f"{LAYERS}post_mlp_layernorm.weight")
    projection = f"{ATTENTION}in_proj." if model.delta_net else QKV
    before = f"{LAYERS}input_layernorm." if model.latent else f"{projection}layer_norm_"
    keys = (f"{before}weight", before_ffn, *after)[: len(norms)]

    def norm(key: str, name: str) -> Iterator[Row]:
        weight = norm_weight(model, zero_centred)
        yield row(key, f"{name}.weight", transform=weight)
        if model.options.normalization == "LayerNorm":
            yield row(key.removesuffix("weight") + "bias", f"{name}.bias")

    return (
        *embedding(model),
        *(each for key, name in zip(keys, norms, strict=True) for each in norm(key, LAYER + name)),
        *(attention(model, zero_centred) if attention_rows is None else attention_rows),
        *ffn,
        *norm("decoder.final_layernorm.weight", f"model.{last_norm}"),
        *output_layer(model),
    )


def dense(model: Architecture) -> tuple[Row, ...]:
    """Return the table of a dense model with the usual names."""
    return decoder(model, ffn(model))


def embedding(model: Architecture) -> tuple[Row, ...]:
    """Return the row of the token embedding."""
    rows = PaddedRows(model.vocabulary, model.padded)
    return (row("embedding.word_embeddings.weight", "model.embed_tokens.weight", transform=rows),)


def output_layer(model: Architecture) -> tuple[Row, ...]:
    """Return the row of the output layer, unless it is tied to the embedding."""
    if model.tied:
        return ()
    kept = PaddedRows(model.vocabulary, model.padded)
    return (row("output_layer.weight", "lm_head.weight", transform=kept),)


def zeros(model: Architecture, at: str, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Row, ...]:
    """Return rows for tensors that only the target has: {name after `at`: shape}."""
    return tuple(Row((), (at + name,), Constant(of, model.dtype)) for name, of in shapes.items())


def attention(
    model: Architecture, zero_centred: bool = False, mixed: GroupedQKV | None = None
) -> tuple[Row, ...]:
    """Return the rows of the projections, biases and qk-norm; `mixed` transforms linear_qkv."""
    at = f"{LAYER}self_attn."
    sizes = (model.groups, model.queries, model.head_dim)
    qkv: tuple[str, ...] = (f"{at}qkv_proj",)
    if not isinstance(mixed, FusedQKV):
        qkv = tuple(f"{at}{name}_proj" for name in "qkv")
    plain = mixed or GroupedQKV(*sizes)
    gated = GatedGroupedQKV(*sizes) if model.attention == "elementwise" else plain
    rows = [row(f"{QKV}weight", *(f"{name}.weight" for name in qkv), transform=gated)]
    if model.qkv_bias:
        rows.append(row(f"{QKV}bias", *(f"{name}.bias" for name in qkv), transform=plain))
    rows.append(row(f"{ATTENTION}linear_proj.weight", f"{at}o_proj.weight"))
    if model.bias:
        rows.append(row(f"{ATTENTION}linear_proj.bias", f"{at}o_proj.bias"))
    if model.qk_norm:
        weight = norm_weight(model, zero_centred)
        rows += [
            row(f"{ATTENTION}{x}_layernorm.weight", f"{at}{x}_norm.weight", transform=weight)
            for x in "qk"
        ]
    return tuple(rows)


def with_repeated_gate(model: Architecture, rows: tuple[Row, ...]) -> tuple[Row, ...]:
    """Adapt the rows of `attention` to store a headwise gate as an elementwise one."""
    sizes = (model.groups, model.queries, model.head_dim)
    first = rows[0]
    keys = (*first.megatron, f"{ATTENTION}linear_gate.weight")
    return (Row(keys, first.hf, RepeatedGateQKV(*sizes)), *rows[1:])


def sinks(model: Architecture, name: str = "sinks") -> tuple[Row, ...]:
    """Return the row of one sink logit per head; zeros for a variant whose logit is fixed at 0."""
    name = f"{LAYER}self_attn.{name}"
    if not model.variant.parameters:
        return (Row((), (name,), Constant((model.heads,), "float32")),)
    return (row(f"{ATTENTION}core_attention.softmax_offset", name),)


def ffn(
    model: Architecture, at: str = "mlp.", names: tuple[str, ...] = _FFN_NAMES
) -> tuple[Row, ...]:
    """Return the rows of an FFN; two names if its first layer is one tensor, gated or not."""
    *first, down = (f"{LAYER}{at}{name}" for name in names)
    split = GateUp() if len(first) == 2 else Transform()
    rows = []
    for kind in ("weight", "bias") if model.bias else ("weight",):
        both = (f"{name}.{kind}" for name in first)
        rows.append(row(f"{MLP}linear_fc1.{kind}", *both, transform=split))
        rows.append(row(f"{MLP}linear_fc2.{kind}", f"{down}.{kind}"))
    return tuple(rows)


def experts(at: str = "mlp.", names: tuple[str, str, str] = _FFN_NAMES) -> tuple[Row, ...]:
    """Return the rows of a router, and of experts with separate tensors."""
    gate, up, down = (f"{LAYER}{at}experts.{{expert}}.{name}.weight" for name in names)
    return (
        row(f"{MLP}router.weight", f"{LAYER}{at}gate.weight"),
        row(f"{EXPERTS}linear_fc1.weight", gate, up, transform=GateUp()),
        row(f"{EXPERTS}linear_fc2.weight", down),
    )
