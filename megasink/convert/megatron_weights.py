"""The weights of Megatron's model, by key of a torch_dist checkpoint, from its architecture."""

from megasink.convert.architecture import Architecture
from megasink.convert.table import LAYERS

Shape = tuple[int, ...]


def weight_shapes(model: Architecture) -> dict[str, Shape]:
    """{key: shape}; those of a layer, or of an expert in it, without the axes of layers, experts.

    Shapes as in `megasink.convert.transforms`.
    """
    hidden, head_dim, heads = model.hidden, model.head_dim, model.heads
    gates = heads if model.attention == "elementwise" else 0
    mixed = (heads + gates + 2 * model.groups) * head_dim
    attention: dict[str, Shape] = {
        "linear_qkv.layer_norm_weight": (hidden,),
        "linear_qkv.weight": (mixed, hidden),
        "linear_proj.weight": (hidden, heads * head_dim),
    }
    if model.attention == "headwise":
        attention["linear_gate.weight"] = (heads, hidden)
    if model.attention == "sink":
        attention["core_attention.softmax_offset"] = (heads,)
    if model.qk_norm:
        attention |= {f"{x}_layernorm.weight": (head_dim,) for x in "qk"}
    if model.qkv_bias:
        attention["linear_qkv.bias"] = (mixed,)
        if model.attention == "headwise":
            attention["linear_gate.bias"] = (heads,)
    if model.bias:
        attention["linear_proj.bias"] = (hidden,)
    layer = {f"self_attention.{key}": shape for key, shape in attention.items()}
    layer |= _ffn(model)
    shapes: dict[str, Shape] = {"embedding.word_embeddings.weight": (model.padded, hidden)}
    shapes |= {LAYERS + key: shape for key, shape in layer.items()}
    shapes["decoder.final_layernorm.weight"] = (hidden,)
    if not model.tied:
        shapes["output_layer.weight"] = (model.padded, hidden)
    return shapes


def _ffn(model: Architecture) -> dict[str, Shape]:
    hidden, width = model.hidden, model.ffn
    if not model.experts:
        found: dict[str, Shape] = {
            "mlp.linear_fc1.layer_norm_weight": (hidden,),
            "mlp.linear_fc1.weight": (2 * width, hidden),
            "mlp.linear_fc2.weight": (hidden, width),
        }
        if model.bias:
            found |= {"mlp.linear_fc1.bias": (2 * width,), "mlp.linear_fc2.bias": (hidden,)}
        return found
    found = {
        "pre_mlp_layernorm.weight": (hidden,),
        "mlp.router.weight": (model.experts, hidden),
        "mlp.experts.experts.linear_fc1.weight": (2 * width, hidden),
        "mlp.experts.experts.linear_fc2.weight": (hidden, width),
    }
    if model.shared_ffn:
        shared = model.shared_ffn
        found["mlp.shared_experts.linear_fc1.weight"] = (2 * shared, hidden)
        found["mlp.shared_experts.linear_fc2.weight"] = (hidden, shared)
    return found
