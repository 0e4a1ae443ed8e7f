"""Tiny random models of the architectures that are probed, out of their configurations."""

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import train_tokenizer
from megasink.transformers.modeling import configuration_megasink, modeling_megasink

VOCABULARY, WINDOW = 64, 5
REAL_TEXTS = Path(textwrap.__file__).read_text().split("\n    def ")
"""Real text that no commit changes, in pieces."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_HYBRID = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}

# name -> (configuration class, model class, options beside the common ones)
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "qwen3-moe": ("Qwen3MoeConfig", "Qwen3MoeForCausalLM", _EXPERTS),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {"num_local_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
    ),
    "granite-swa": ("GraniteSWAConfig", "GraniteSWAForCausalLM", _SLIDING),
    "flint": ("FlintConfig", "FlintForCausalLM", {**_EXPERTS, **_SLIDING}),
    "qwen3.5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", _HYBRID),
    "qwen3-next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {**_HYBRID, **_EXPERTS}),
    "gemma-3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _SLIDING),
    "olmo-2": ("Olmo2Config", "Olmo2ForCausalLM", {}),
    "gpt-2": ("GPT2Config", "GPT2LMHeadModel", {}),
    "gpt-neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": WINDOW}),
    "lfm3": ("Lfm3Config", "Lfm3ForCausalLM", {"layer_types": ["full_attention"] * 2}),
    "afmoe": (
        "AfmoeConfig",
        "AfmoeForCausalLM",
        {"layer_types": ["full_attention"] * 2, "num_dense_layers": 2},
    ),
    "ling-3": (
        "BailingHybridConfig",
        "BailingHybridForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "num_key_value_heads": 4,
            "kv_lora_rank": 8,
            "q_lora_rank": None,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 4,
            "v_head_dim": 8,
            **_EXPERTS,
        },
    ),
    "own-sink": (
        "MegasinkConfig",
        "MegasinkForCausalLM",
        {"attention_variant": "sink", "num_experts": 4, "num_experts_per_tok": 2, **_SLIDING},
    ),
    "own-gated": (
        "MegasinkConfig",
        "MegasinkForCausalLM",
        {"attention_variant": "gated", "sandwich_norm": True},
    ),
}
GATED = {
    "qwen3.5": "elementwise",
    "qwen3-next": "elementwise",
    "lfm3": "headwise",
    "afmoe": "elementwise",
    "ling-3": "headwise",
    "own-gated": "headwise",
}
SINKS = {"gpt-oss", "granite-swa", "flint", "own-sink"}


def _class(name: str) -> Any:
    """Of transformers, or of our own modelling file."""
    own = configuration_megasink if name.endswith("Config") else modeling_megasink
    return getattr(own if name.startswith("Megasink") else transformers, name)


def tiny_model(name: str, implementation: str | None = None, **options: Any) -> PreTrainedModel:
    """A model in evaluation mode with weights large enough for skewed attention, sinks of +-5.

    Args:
        implementation: of its attention; None for the model's default.
    """
    config_class, model_class, own = ARCHITECTURES[name]
    config = _class(config_class)(**{**COMMON, **own, **options})
    torch.manual_seed(0)
    arguments = {} if implementation is None else {"attn_implementation": implementation}
    model = _class(model_class)._from_config(config, **arguments)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("sinks"):
                parameter.copy_(torch.linspace(-5, 5, parameter.numel()))
            elif parameter.dim() > 1:
                parameter.normal_(0.0, 0.25)
    return model.eval()


def save_with_tokenizer(
    root: Path, name: str, texts: Sequence[str], tokens: int = 400, **options: Any
) -> Path:
    """A folder of transformers, root/name, with a tokenizer of so many tokens of the texts."""
    root.mkdir(exist_ok=True)
    source = root / "tokenizer-texts.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    train_tokenizer(list(Corpus([source])), tokens, root / "tokenizer")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(root / "tokenizer")
    options = {"vocab_size": len(tokenizer)} | options
    tiny_model(name, **options).save_pretrained(root / name)
    tokenizer.save_pretrained(root / name)
    return root / name
