"""The keys and shapes of a model's weights in a torch_dist checkpoint, from its architecture."""

from collections.abc import Sequence

from megasink.attention.variants.gate_options import gate_shape
from megasink.convert.architecture import Architecture, DeltaNet, Latent
from megasink.convert.weight_table import EXPERTS, LAYERS, numbered

Shape = tuple[int, ...]


def weight_shapes(model: Architecture) -> dict[str, Shape]:
    """Return {key: shape} of all weights, without axes of layers and experts; see `numbered`."""
    if not model.layers_differ:
        return _same_in_all_layers(model)
    alike, others = apart([_same_in_all_layers(model.of_layer(n)) for n in range(model.layers)])
    return alike | {
        numbered(key, layer): shape
        for layer, shapes in enumerate(others)
        for key, shape in shapes.items()
    }


def apart[Name, Value](
    by_layer: Sequence[dict[Name, Value]],
) -> tuple[dict[Name, Value], list[dict[Name, Value]]]:
    """Separate weights shared by all layers from those of single layers."""
    alike = {
        name: value
        for name, value in by_layer[0].items()
        if all(name in layer and layer[name] == value for layer in by_layer)
    }
    others = [{n: v for n, v in layer.items() if n not in alike} for layer in by_layer]
    return alike, others


def _same_in_all_layers(model: Architecture) -> dict[str, Shape]:
    mixer = _delta_net(model, model.delta_net) if model.delta_net else _attention(model)
    layer = {f"self_attention.{key}": shape for key, shape in mixer.items()}
    layer |= _ffn(model) | _norms(model)
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (model.padded, model.hidden)}
    if model.options.learned_positions:
        shapes["embedding.position_embeddings.weight"] = (model.positions, model.hidden)
    shapes |= {LAYERS + key: shape for key, shape in layer.items()}
    if not model.options.post_norm:
        shapes |= _norm(model, "decoder.final_layernorm.", model.hidden)
    if not model.tied:
        shapes["output_layer.weight"] = (model.padded, model.hidden)
    return shapes


def _delta_net(model: Architecture, sizes: DeltaNet) -> dict[str, Shape]:
    keys, values, heads = sizes.keys, sizes.values, sizes.linear_num_value_heads
    rows = {"query": keys, "key": keys, "value": values, "z": values, "beta": heads, "alpha": heads}
    kernel = sizes.linear_conv_kernel_dim
    return {
        **{f"in_proj.weight.{part}": (size, model.hidden) for part, size in rows.items()},
        **{f"conv1d.weight.{x}": (rows[x], 1, kernel) for x in ("query", "key", "value")},
        **dict.fromkeys(("dt_bias", "A_log"), (heads,)),
        "out_norm.weight": (sizes.linear_value_head_dim,),
        "out_proj.weight": (model.hidden, values),
    }


def _attention(model: Architecture) -> dict[str, Shape]:
    hidden, head_dim, heads = model.hidden, model.head_dim, model.heads
    gates = heads if model.megatrons_gate else 0
    mixed = (heads + gates + 2 * model.groups) * head_dim
    inputs = head_dim if model.options.multi_head_addition else heads * head_dim
    attention: dict[str, Shape] = {
        "linear_qkv.weight": (mixed, hidden),
        "linear_proj.weight": (hidden, inputs),
    }
    if model.qkv_bias:
        attention["linear_qkv.bias"] = (mixed,)
    if model.latent is not None:
        attention = _latent(model, model.latent)
    if model.bias:
        attention["linear_proj.bias"] = (hidden,)
    attention |= _gate(model)
    if model.options.attention_bias_type == "t5":
        buckets = model.options.relative_attention_num_buckets
        attention["core_attention.relative_bias.weight"] = (buckets, heads)
    options = model.gate_options()
    for parameter in model.variant.parameters:
        attention[f"core_attention.{parameter.name}"] = parameter.shape(options)
    return attention


def _latent(model: Architecture, latent: Latent) -> dict[str, Shape]:
    hidden, heads, ranks = model.hidden, model.heads, {"kv": latent.keys}
    rows = {"kv": heads * (latent.plain + latent.values)}
    shapes: dict[str, Shape] = {
        "linear_kv_down_proj.weight": (latent.keys + latent.rotated, hidden)
    }
    queries = heads * (latent.plain + latent.rotated)
    if latent.queries is None:
        shapes["linear_q_proj.weight"] = (queries, hidden)
    else:
        ranks["q"], rows["q"] = latent.queries, queries
        shapes["linear_q_down_proj.weight"] = (latent.queries, hidden)
    for x, rank in ranks.items():
        shapes[f"linear_{x}_up_proj.weight"] = (rows[x], rank)
        if model.qk_norm:
            shapes |= _norm(model, f"linear_{x}_up_proj.layer_norm_", rank)
    return shapes | {"linear_proj.weight": (hidden, heads * latent.values)}


def _norm(model: Architecture, prefix: str, size: int) -> dict[str, Shape]:
    if model.options.norm_without_gain:
        return {}
    kinds = ("weight", "bias") if model.options.normalization == "LayerNorm" else ("weight",)
    return {f"{prefix}{kind}": (size,) for kind in kinds}


def _norms(model: Architecture) -> dict[str, Shape]:
    """Return the norms of a layer."""
    norms: dict[str, Shape] = {}
    if not model.options.post_norm:
        before_ffn = "pre_mlp_layernorm." if model.experts else "mlp.linear_fc1.layer_norm_"
        projection = "in_proj" if model.delta_net else "linear_qkv"
        before = f"self_attention.{projection}.layer_norm_"
        for prefix in ("input_layernorm." if model.latent else before, before_ffn):
            norms |= _norm(model, prefix, model.hidden)
    if model.options.post_norm or model.options.sandwich_norm:
        for prefix in ("post_self_attn_layernorm.", "post_mlp_layernorm."):
            norms |= _norm(model, prefix, model.hidden)
    if model.qk_norm and not (model.latent or model.delta_net):
        for x in "qk":
            norms |= _norm(model, f"self_attention.{x}_layernorm.", model.head_dim)
    return norms


def _gate(model: Architecture) -> dict[str, Shape]:
    """Return the explicit gate, unless its rows are in linear_qkv, and the SDPA output norm."""
    shapes: dict[str, Shape] = {}
    if model.options.sdpa_output_norm == "rmsnorm":
        shapes["output_norm.weight"] = (model.heads * model.head_dim,)
    if not model.variant.explicit_gate or model.megatrons_gate:
        return shapes
    heads, width = gate_shape(model.gate_options())
    if model.options.gate_input == "none":
        return shapes | {"gate.logit": (heads * width,)}
    shapes["linear_gate.weight"] = (heads * width, model.hidden)
    if model.qkv_bias and not model.latent:
        shapes["linear_gate.bias"] = (heads * width,)
    return shapes


def _ffn(model: Architecture) -> dict[str, Shape]:
    hidden, width = model.hidden, model.ffn
    shapes: dict[str, Shape]
    if not model.experts:
        rows = 2 * width if model.options.gated_unit else width
        shapes = {"mlp.linear_fc1.weight": (rows, hidden), "mlp.linear_fc2.weight": (hidden, width)}
        if model.bias:
            shapes |= {"mlp.linear_fc1.bias": (rows,), "mlp.linear_fc2.bias": (hidden,)}
        return shapes
    shapes = {
        "mlp.router.weight": (model.experts, hidden),
        "mlp.experts.experts.linear_fc1.weight": (2 * width, hidden),
        "mlp.experts.experts.linear_fc2.weight": (hidden, width),
    }
    if model.bias:
        shapes["mlp.router.bias"] = (model.experts,)
        shapes["mlp.experts.experts.linear_fc1.bias"] = (2 * width,)
        shapes["mlp.experts.experts.linear_fc2.bias"] = (hidden,)
    if model.options.moe_router_enable_expert_bias:
        shapes["mlp.router.expert_bias"] = (model.experts,)
    if model.shared_ffn:
        shared = model.shared_ffn
        shapes["mlp.shared_experts.linear_fc1.weight"] = (2 * shared, hidden)
        shapes["mlp.shared_experts.linear_fc2.weight"] = (hidden, shared)
        if model.shared_gate:
            shapes["mlp.shared_experts.gate_weight"] = (1, hidden)
    return shapes


def leading_axes(key: str) -> int:
    """Return the number of axes (layers, experts) before those of `weight_shapes`."""
    of_all_layers = key.startswith(LAYERS) and not is_numbered(key)
    return of_all_layers + (EXPERTS in key)


def is_numbered(key: str) -> bool:
    """Return whether a key is one of `numbered`."""
    return key.startswith(LAYERS) and key.removeprefix(LAYERS).partition(".")[0].isdigit()
