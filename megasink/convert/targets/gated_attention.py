"""Targets with an explicit gate on the SDPA output: LFM3, Qwen3-Next, Qwen3.5 text."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from megasink.convert.architecture import Architecture, DeltaNet
from megasink.convert.targets import rows
from megasink.convert.targets.softmax_attention import (
    QWEN_EVERY_LAYER,
    QWEN_EXPERTS,
    read_qwen_experts,
)
from megasink.convert.targets.target import Config, Target, layer_interval, layer_types, register
from megasink.convert.transforms import GateUp, Joined
from megasink.convert.weight_table import Row, row

# Qwen stores elementwise gates; a headwise gate is stored repeated.
_GATES = ("elementwise", "headwise")
# Qwen's mixtures always have a shared expert; one of this width with zero weights adds nothing.
_NO_SHARED_EXPERT = 16
_OUTPUT_GATES = {"attn_output_gate": True, "output_gate_type": "swish"}
_FIXED: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _OUTPUT_GATES,
    "qwen3_next": {"decoder_sparse_step": 1},
    "qwen3_5_moe_text": QWEN_EVERY_LAYER | _OUTPUT_GATES,
}
_ENGINES = ("", "", "activation pattern")
_STACKED = ("experts.gate_up_proj", "experts.down_proj")


def _qwen(
    joined: Callable[[Architecture, DeltaNet], tuple[Row, ...]], names: tuple[str, ...] = ()
) -> Callable[[Architecture], tuple[Row, ...]]:
    """Return the table of a Qwen; `joined` makes rows of in_proj, `names` is of stacked experts."""

    def layer(model: Architecture) -> tuple[Row, ...]:
        if model.delta_net:
            mixer = (*joined(model, model.delta_net), *_delta_net(model, model.delta_net))
        else:
            mixer = rows.attention(model, zero_centred=True)
            if model.attention == "headwise":
                mixer = rows.with_repeated_gate(model, mixer)
        ffn = _experts(model, names) if model.experts else rows.ffn(model)
        return rows.decoder(model, ffn, mixer, zero_centred=True)

    return lambda model: rows.of_layers(model, layer)


def _linear(name: str) -> str:
    return f"{rows.LAYER}linear_attn.{name}"


def _inputs(names: str) -> tuple[str, ...]:
    return tuple(f"{rows.ATTENTION}in_proj.weight.{name}" for name in names.split())


def _joined_by_head(model: Architecture, sizes: DeltaNet) -> tuple[Row, ...]:
    """Qwen3-Next's two projections: for each key head, all parts that belong to it."""
    heads = sizes.linear_num_key_heads
    key, value, each = sizes.keys // heads, sizes.values // heads, sizes.linear_num_value_heads
    qkvz, ba = Joined(heads, (key, key, value, value)), Joined(heads, 2 * (each // heads,))
    return (
        Row(_inputs("query key value z"), (_linear("in_proj_qkvz.weight"),), qkvz),
        Row(_inputs("beta alpha"), (_linear("in_proj_ba.weight"),), ba),
    )


def _joined_qkv(model: Architecture, sizes: DeltaNet) -> tuple[Row, ...]:
    """Qwen3.5's four projections."""
    qkv = Joined(1, (sizes.keys, sizes.keys, sizes.values))
    return (
        Row(_inputs("query key value"), (_linear("in_proj_qkv.weight"),), qkv),
        *(
            row(_inputs(ours)[0], _linear(f"in_proj_{theirs}.weight"))
            for ours, theirs in (("z", "z"), ("beta", "b"), ("alpha", "a"))
        ),
    )


def _delta_net(model: Architecture, sizes: DeltaNet) -> tuple[Row, ...]:
    at = rows.ATTENTION
    channels = tuple(f"{at}conv1d.weight.{name}" for name in ("query", "key", "value"))
    joined = Joined(1, (sizes.keys, sizes.keys, sizes.values))
    return (
        Row(channels, (_linear("conv1d.weight"),), joined),
        row(f"{at}dt_bias", _linear("dt_bias")),
        row(f"{at}A_log", _linear("A_log")),
        row(
            f"{at}out_norm.weight", _linear("norm.weight"), transform=rows.norm_weight(model, False)
        ),
        row(f"{at}out_proj.weight", _linear("out_proj.weight")),
    )


def _experts(model: Architecture, names: tuple[str, ...]) -> tuple[Row, ...]:
    at, shared = f"{rows.LAYER}mlp.", f"{rows.MLP}shared_experts."
    of_all = rows.experts()
    if names:
        pairs = zip(of_all[1:], names, strict=True)
        of_all = (of_all[0], *(row(each.megatron[0], at + name) for each, name in pairs))
    if model.shared_gate:
        gate, up, down = (
            f"{at}shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")
        )
        return (
            *of_all,
            row(f"{shared}linear_fc1.weight", gate, up, transform=GateUp()),
            row(f"{shared}linear_fc2.weight", down),
            row(f"{shared}gate_weight", f"{at}shared_expert_gate.weight"),
        )
    zeros = {
        "shared_expert.gate_proj.weight": (_NO_SHARED_EXPERT, model.hidden),
        "shared_expert.up_proj.weight": (_NO_SHARED_EXPERT, model.hidden),
        "shared_expert.down_proj.weight": (model.hidden, _NO_SHARED_EXPERT),
        "shared_expert_gate.weight": (1, model.hidden),
    }
    return (*of_all, *rows.zeros(model, at, zeros))


def _lfm3(model: Architecture) -> tuple[Row, ...]:
    gate = row(f"{rows.ATTENTION}linear_gate.weight", f"{rows.LAYER}self_attn.g_proj.weight")
    return rows.decoder(
        model,
        rows.ffn(model, "feed_forward.", ("w1", "w3", "w2")),
        (*rows.attention(model), gate),
        norms=("operator_norm", "ffn_norm"),
        last_norm="embedding_norm",
    )


def _rope(model: Architecture) -> Config:
    return {"rope_type": "default", "rope_theta": model.rope_base}


def _qwen_config(model: Architecture) -> Config:
    share, every = model.options.rotary_percent, layer_interval(model)
    return {
        "layer_types": layer_types(model),
        # llama.cpp's converter reads this key, and assumes 4 without it.
        **({"full_attention_interval": every} if every else {}),
        **(dataclasses.asdict(model.delta_net) if model.delta_net else {}),
        "rope_parameters": _rope(model) | {"partial_rotary_factor": share},
    }


def _qwen_experts(model: Architecture) -> Config:
    if not model.experts:
        return _qwen_config(model) | {"num_experts": 0}
    return {
        **_qwen_config(model),
        **{key: getattr(model, name) for key, name in QWEN_EXPERTS.items()},
        "intermediate_size": model.dense_ffn or model.ffn,
        "mlp_only_layers": list(range(model.dense_layers)),
        "shared_expert_intermediate_size": model.shared_ffn or _NO_SHARED_EXPERT,
    }


def _types(config: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer, as transformers reads it."""
    every, given = config.get("full_attention_interval") or 4, config.get("layer_types")
    return given or [
        "linear_attention" if (layer + 1) % every else "full_attention"
        for layer in range(config["num_hidden_layers"])
    ]


def _read_qwen(config: Mapping[str, Any]) -> dict[str, Any]:
    linear = tuple(kind == "linear_attention" for kind in _types(config))
    if not any(linear):
        return {}
    return {"linear_layers": linear, "delta_net": DeltaNet.of(config)}


def _read_qwen_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    mixers = _read_qwen(config)
    if config.get("num_experts") == 0:
        return mixers
    experts = read_qwen_experts(config)
    if dense := len(config.get("mlp_only_layers") or ()):
        mixers |= {"dense_layers": dense, "dense_ffn": config["intermediate_size"]}
    names = {name: config[key] for key, name in QWEN_EXPERTS.items() if name not in experts}
    # megasink's own exports say whether the shared expert is more than zeros.
    shared = config["shared_expert_intermediate_size"]
    if (config.get("megasink") or {"shared_gate": True}).get("shared_gate"):
        names |= {"shared_gate": True, "shared_ffn": shared}
    return {**mixers, **experts, **names}


def _qwen_refused(config: Mapping[str, Any]) -> list[str]:
    types, every = _types(config), config.get("full_attention_interval")
    layers = config["num_hidden_layers"]
    problems = []
    if every and types != _types({**config, "layer_types": None}):
        problems.append(f"layer_types that contradict full_attention_interval {every}")
    if "full_attention" not in types:
        problems.append("layer_types with only linear attention, which has no gated heads")
    sizes = DeltaNet.of(config)
    if sizes.linear_num_value_heads % sizes.linear_num_key_heads:
        problems.append(
            f"linear_num_value_heads {sizes.linear_num_value_heads}, which is not a multiple of "
            f"linear_num_key_heads {sizes.linear_num_key_heads}"
        )
    # transformers 4 reads one of the two, and 5 the other.
    rope = config.get("rope_parameters") or {}
    shares = {part.get("partial_rotary_factor") for part in (config, rope)} - {None}
    if len(shares) > 1:
        problems.append(f"partial_rotary_factor {' and '.join(sorted(map(str, shares)))}")
    dense = config.get("mlp_only_layers") or []
    if dense != list(range(min(len(dense), layers - 1))):
        problems.append(f"mlp_only_layers {dense}, which are not the first of {layers} layers")
    return problems


def _lfm3_config(model: Architecture) -> Config:
    return {
        "use_sandwich_norm": False,
        "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), _rope(model)),
    }


def _lfm3_refused(config: Mapping[str, Any]) -> list[str]:
    problems = []
    if "conv" in (config.get("layer_types") or ["conv"]):
        problems.append("layer_types: convolutions")
    if config.get("use_sandwich_norm", True):
        problems.append("use_sandwich_norm")
    parameters = config.get("rope_parameters") or {}
    ropes = [parameters.get(kind) for kind in set(config.get("layer_types") or [])]
    if any(r != ropes[0] or not r or r.get("rope_type") != "default" for r in ropes):
        problems.append("rope_parameters: layers with different or scaled RoPE")
    return problems


for target in (
    Target(
        name="lfm3",
        architecture="Lfm3ForCausalLM",
        since="5.23",
        attention=("headwise",),
        table=_lfm3,
        keys={"norm_eps": "norm_eps"},
        defaults={"rms_norm_eps": 1e-5, "tie_word_embeddings": True},
        fixed={"use_attention_gate": True, "attention_bias": False},
        config=_lfm3_config,
        read=lambda config: {
            "rope_base": float(config["rope_parameters"]["full_attention"]["rope_theta"])
        },
        refused=_lfm3_refused,
        qk_norm=True,
        activations=("silu",),
        windows="mixed",
        rope_scaling=(),
        rope_by_layer=True,
    ),
    *(
        Target(
            name=name,
            architecture=f"{architecture}ForCausalLM",
            since=since,
            attention=_GATES,
            table=table,
            fixed={"attention_bias": False, **_FIXED[name]},
            defaults={"head_dim": 256, **({"norm_topk_prob": True} if reads_experts else {})},
            config=_qwen_experts if reads_experts else _qwen_config,
            read=_read_qwen_experts if reads_experts else _read_qwen,
            refused=_qwen_refused,
            partial_rotary=0.25,
            moe=moe,
            qk_norm=True,
            renormalizes=name != "qwen3_next",
            delta_net=True,
            shared_gate=reads_experts,
            first_dense=name == "qwen3_next",
            misfits=lambda model: ["its experts are not in groups"] * bool(model.expert_groups),
            rope_scaling=(),
            engines=engines,
        )
        for name, architecture, since, moe, engines, table in (
            ("qwen3_5_text", "Qwen3_5", "5.13", False, _ENGINES, _qwen(_joined_qkv)),
            ("qwen3_next", "Qwen3Next", "5.15", None, _ENGINES, _qwen(_joined_by_head)),
            ("qwen3_5_moe_text", "Qwen3_5Moe", "5.23", True, (), _qwen(_joined_qkv, _STACKED)),
        )
        for reads_experts in (moe is not False,)
    ),
):
    register(target)
