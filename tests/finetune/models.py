"""Tiny random models of every kind that a fine-tuning exports again."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from megasink.transformers.modeling.configuration_megasink import MegasinkConfig
from megasink.transformers.modeling.modeling_megasink import MegasinkForCausalLM
from tests.analysis.capture.tiny_models import COMMON

SHAPE = COMMON | {
    "max_position_embeddings": 128,
    "initializer_range": 0.5,
    "eos_token_id": 1,
    "pad_token_id": 2,
    "bos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2}
# One layer of gated delta-net, whose state would pass from one packed conversation to the next.
DELTA_NET = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
}
# {name: (class of transformers, or "megasink"; options; type of most weights)}
MODELS = {
    "llama": ("Llama", {"tie_word_embeddings": True, "use_cache": False}, "float32"),
    "qwen3": ("Qwen3", {}, "bfloat16"),
    "mixtral": ("Mixtral", EXPERTS | {"num_local_experts": 4}, "bfloat16"),
    "router-loss": (
        "Qwen3Moe",
        EXPERTS
        | {"num_experts": 4, "moe_intermediate_size": 24}
        | {"output_router_logits": True, "router_aux_loss_coef": 0.5},
        "float16",
    ),
    "gpt_oss": ("GptOss", EXPERTS | {"num_local_experts": 4}, "bfloat16"),
    "granite_swa": ("GraniteSWA", {"layer_types": ["full_attention"] * 2}, "bfloat16"),
    "lfm3": ("Lfm3", {"layer_types": ["full_attention"] * 2}, "bfloat16"),
    "own-sink": ("megasink", {"attention_variant": "sink", "qk_norm": True}, "bfloat16"),
    "own-gated": ("megasink", {"attention_variant": "gated"}, "bfloat16"),
    "own-experts": (
        "megasink",
        EXPERTS
        | {"num_experts": 4, "attention_variant": "sink", "tie_word_embeddings": True}
        | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
        "bfloat16",
    ),
    "own-latent": ("megasink", LATENT | {"attention_variant": "sink", "qk_norm": True}, "bfloat16"),
    "qwen3_next": (
        "Qwen3Next",
        EXPERTS
        | DELTA_NET
        | {"num_experts": 4, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
        "bfloat16",
    ),
    "qwen3_5": ("Qwen3_5Text", DELTA_NET, "bfloat16"),
}


def make(name: str, folder: Path, vocabulary: int) -> None:
    """Write a model beside a tokenizer; what megasink keeps in float32 is so in its files."""
    kind, options, dtype = MODELS[name]
    torch.manual_seed(11)
    given = SHAPE | {"vocab_size": vocabulary} | options
    own = kind == "megasink"
    config: Any
    if own:
        config = MegasinkConfig(**given)
        model = MegasinkForCausalLM(config)
    else:
        config = getattr(transformers, f"{kind}Config")(**given)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter_name, value in (*model.named_parameters(), *model.named_buffers()):
            if parameter_name.split(".")[-1] in ("sinks", "e_score_correction_bias", "value_bias"):
                value.normal_().add_(1 / 3)
    model.save_pretrained(folder)
    wide = config.float32_parameters if own else {"sinks"} if kind == "GraniteSWA" else set()
    path = folder / "model.safetensors"
    cast = {
        n: v if n.split(".")[-1] in wide else v.to(getattr(torch, dtype))
        for n, v in load_file(path).items()
    }
    save_file(cast, path, {"format": "pt"})
    edit(folder / "config.json", dtype=dtype, a_key_of_its_own={"kept": [1, 2]})
    edit(folder / "generation_config.json", temperature=0.7, do_sample=True, top_k=20)


def edit(path: Path, **changes: object) -> None:
    """Change keys of a JSON file."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=2))


def facts_of(path: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The type and shape of each tensor of a file."""
    return {n: (v.dtype, tuple(v.shape)) for n, v in load_file(path).items()}
