"""Every field of the small JSON files of a model and of a run, damaged: never a traceback.

A value of another type or out of range is refused; what can be meant, such as another angle of
RoPE or a name that nothing computes with, may be taken.
"""

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.damage.harness import Case, Sound

VALUES: dict[str, Any] = {
    "zero": 0,
    "minus-one": -1,
    "huge": 10**30,
    "nan": math.nan,
    "inf": math.inf,
    "word": "x",
    "digit": "4",
    "list": [],
    "object": {},
    "true": True,
    "half": 1.5,
    "null": None,
}
_NO_NUMBER = {"nan", "inf", "word", "digit", "list", "object", "true"}
# {kind: the values that no field of it may have}
KINDS = {
    "count": _NO_NUMBER | {"zero", "minus-one", "huge", "half"},
    "maybe-count": _NO_NUMBER | {"minus-one", "huge", "half"},
    "positive": _NO_NUMBER | {"zero", "minus-one", "huge"},
    "epsilon": _NO_NUMBER | {"zero", "minus-one", "huge", "half"},
    "share": _NO_NUMBER | {"minus-one", "huge", "half"},
    "spread": _NO_NUMBER | {"minus-one", "huge"},
    "flag": VALUES.keys() - {"true", "null"},
    "name": VALUES.keys() - {"null"},
    "ids": {"huge", "nan", "inf", "word", "digit", "object", "half"},
    "text": VALUES.keys() - {"word", "digit", "null"},
    "object": VALUES.keys() - {"object", "null"},
    "any": set(),
}
# A token may be named by an object; a field that nobody reads may be anything.
CONFIG = {
    "attention_bias": "flag",
    "attention_dropout": "share",
    "bos_token_id": "ids",
    "dtype": "name",
    "eos_token_id": "ids",
    "head_dim": "count",
    "hidden_act": "name",
    "hidden_size": "count",
    "initializer_range": "spread",
    "intermediate_size": "count",
    "max_position_embeddings": "count",
    "mlp_bias": "flag",
    "model_type": "name",
    "num_attention_heads": "count",
    "num_hidden_layers": "count",
    "num_key_value_heads": "count",
    "pad_token_id": "any",  # -1 is one that is never met
    "pretraining_tp": "any",
    "rms_norm_eps": "epsilon",
    "rope_parameters": "object",
    "tie_word_embeddings": "flag",
    "use_cache": "flag",
    "vocab_size": "count",
}
TOKENIZER = {
    "backend": "any",
    "clean_up_tokenization_spaces": "any",
    "eos_token": "any",
    "model_max_length": "any",
    "pad_token": "any",
    "tokenizer_class": "any",
    "unk_token": "any",
    "added_tokens_decoder": "any",
    "chat_template": "any",
}
# What `analyze` reads with a reader of its own.
_ANALYZED = ("config.json", "tokenizer_config.json")
GENERATION = {"bos_token_id": "any", "eos_token_id": "any", "use_cache": "any"}
ROPE = {"rope_theta": "positive", "rope_type": "name", "factor": "any"}
INDEX = {"weight_map": "object", "metadata": "any"}
# The name of a tensor's file.
ENTRY = {"model.norm.weight": "name"}
RUN = {
    "add_bias_linear": "flag",
    "add_qkv_bias": "flag",
    "attention_scale_alpha": "positive",
    "attention_variant": "name",
    "attention_variant_layers": "any",
    "bf16": "flag",
    "bias_fixed_value": "name",
    "bias_fixed_value_norm": "positive",
    "ffn_activation": "name",
    "ffn_hidden_size": "count",
    "gate_granularity": "name",
    "gate_position": "name",
    "group_query_attention": "flag",
    "hidden_size": "count",
    "init_method_std": "spread",
    "kv_channels": "count",
    "layernorm_epsilon": "epsilon",
    "logit_softcap": "any",
    "max_position_embeddings": "count",
    "moe_router_topk": "count",
    "normalization": "name",
    "num_attention_heads": "count",
    "num_experts": "any",
    "num_layers": "count",
    "num_query_groups": "count",
    "padded_vocab_size": "count",
    "position_embedding_type": "name",
    "qk_layernorm": "flag",
    "residual_clip": "any",
    "rope_scaling_factor": "positive",
    "rotary_base": "positive",
    "rotary_percent": "share",
    "sink_token_id": "any",
    "softmax_offset_init": "any",
    "swiglu": "flag",
    "tokenizer_type": "text",
    "tokenizer_model": "any",
    "untie_embeddings_and_output_weights": "flag",
    "use_rope_scaling": "flag",
    "vocab_size": "maybe-count",
    "window_attn_skip_freq": "any",
    "window_size": VALUES.keys() - {"null"},
}

_NO_VALUE = {"word", "digit", "list", "object"}
# Of every line of a run's metrics.jsonl.
METRICS = {
    "iteration": _NO_VALUE | {"null", "half", "nan", "inf"},
    "lm_loss": _NO_VALUE | {"null"},
    "seconds": _NO_VALUE,
    "tokens": _NO_VALUE,
    "imbalance": _NO_VALUE,
    "imbalance_per_layer": VALUES.keys() - {"null"},
    "importance": VALUES.keys() - {"null"},
    "learning_rate": "any",
    "skipped": "any",
}


def _changed(path: Path, place: tuple[str, ...], value: Any) -> None:
    texts = [path.read_text()] if path.suffix == ".json" else path.read_text().splitlines()
    contents = [json.loads(text) for text in texts]
    for content in contents:
        part = content
        for name in place[:-1]:
            part = part[name]
        if path.suffix == ".json" or place[-1] in part:
            part[place[-1]] = value
    path.write_text("\n".join(map(json.dumps, contents)))


def _case(command: str, file: str, place: tuple[str, ...], value: Any, code: int | None) -> Case:
    def make(folder: Path, sound: Sound) -> list[str]:
        of_run = command in ("generate", "export", "compare")
        copy = folder / "model"
        ignore = shutil.ignore_patterns("data-cache", "tensorboard")
        shutil.copytree(sound.run if of_run else sound.hf, copy, ignore=ignore)
        if file.endswith("index.json"):
            _write_index(copy)
        _changed(copy / file, place, value)
        return {
            "convert": ["convert-from-hf", str(copy), "--output", "{out}", "--no-verify"],
            "analyze": [
                *("analyze", str(copy), "--data", str(sound.root / "texts.jsonl"), "--device"),
                *("cpu", "--output", "{out}", "--max-samples", "1", "--seq-length", "16"),
            ],
            "generate": [
                *(
                    "generate",
                    str(copy),
                    "--prompt",
                    "Text",
                    "--max-new-tokens",
                    "1",
                    "--device",
                    "cpu",
                ),
            ],
            "export": ["convert-to-hf", str(copy), "--output", "{out}", "--no-verify"],
            "compare": ["compare", str(copy), "--output", "{out}.png"],
        }[command]

    # A word is refused by its meaning, too: "RoPE scaling 'x'".
    says = place[-1] if code == 2 and not isinstance(value, str) else ""
    return Case(make, code, says)


def _write_index(folder: Path) -> None:
    from safetensors import safe_open

    shard = folder / "model-00001-of-00001.safetensors"
    (folder / "model.safetensors").rename(shard)
    with safe_open(shard, framework="pt") as file:
        names = dict.fromkeys(file.keys(), shard.name)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": names})
    )


def _cases() -> Iterator[tuple[str, Case]]:
    files: list[tuple[str, str, tuple[str, ...], dict[str, Any]]] = [
        ("convert", "config.json", (), CONFIG),
        ("convert", "config.json", ("rope_parameters",), ROPE),
        ("convert", "tokenizer_config.json", (), TOKENIZER),
        ("convert", "generation_config.json", (), GENERATION),
        ("convert", "model.safetensors.index.json", (), INDEX),
        ("convert", "model.safetensors.index.json", ("weight_map",), ENTRY),
        ("export", "config.json", ("arguments",), RUN),
        ("compare", "metrics.jsonl", (), METRICS),
    ]
    for command, file, place, kinds in files:
        for i, (key, kind) in enumerate(kinds.items()):
            refused = KINDS[kind] if isinstance(kind, str) else kind
            for j, (label, value) in enumerate(VALUES.items()):
                if (i + j) % 3:
                    continue  # of each field a third of the values, of each kind all
                code = 2 if label in refused else None
                # A run is read by two commands, in turns; a folder by a third now and then.
                which = "generate" if command == "export" and j % 2 else command
                yield (
                    f"{which}/{file}/{'.'.join((*place, key))}/{label}",
                    _case(which, file, (*place, key), value, code),
                )
                if file in _ANALYZED and which == "convert" and (i + j) % 2 == 0:
                    name = f"analyze/{file}/{'.'.join((*place, key))}/{label}"
                    yield name, _case("analyze", file, (*place, key), value, None)


CASES = dict(_cases())
