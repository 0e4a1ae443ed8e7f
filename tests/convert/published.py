"""config.json of released models, key for key, with sizes small enough to run.

Sizes, and the numbers of layers, heads, experts and tokens, are ours; everything else is as
released.
"""

import json
from typing import Any

from megasink.convert.megasink_model import MegasinkOptions


def _keys(text: str) -> dict[str, Any]:
    """Of a part of a config.json."""
    entries: dict[str, Any] = json.loads(f"{{{text}}}")
    return entries


COMMON = _keys("""
    "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 101, "attention_dropout": 0.0, "hidden_act": "silu",
    "initializer_range": 0.02, "torch_dtype": "bfloat16", "use_cache": true
""")
LLAMA = COMMON | _keys("""
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "attention_bias": false,
    "pretraining_tp": 1, "rms_norm_eps": 1e-05
""")
LLAMA3_ROPE = _keys("""
    "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192,
    "rope_type": "llama3"
""")
MISTRAL = COMMON | _keys("""
    "architectures": ["MistralForCausalLM"], "model_type": "mistral", "rms_norm_eps": 1e-05,
    "tie_word_embeddings": false
""")
NANOCHAT = MegasinkOptions(
    norm_without_gain=True,
    embedding_norm=True,
    qk_l2_norm=True,
    gated_unit=False,
    logit_softcap=15.0,
)
QWEN = COMMON | _keys("""
    "rms_norm_eps": 1e-06, "use_sliding_window": false
""")
QWEN3 = QWEN | _keys("""
    "attention_bias": false, "head_dim": 32, "max_position_embeddings": 40960, "rope_scaling":
    null, "rope_theta": 1000000, "sliding_window": null
""")

# {model: (its config.json, fields of Architecture that it must give)}
RELEASED = {
    "Llama-2-7b": (
        LLAMA
        | _keys("""
            "torch_dtype": "float16", "max_position_embeddings": 4096, "rope_scaling": null,
            "tie_word_embeddings": false
        """),
        {"head_dim": 12, "rope_base": 10000.0, "rope_factor": None, "dtype": "float16"},
    ),
    "Llama-3.1-8B-Instruct": (
        LLAMA
        | {"rope_scaling": LLAMA3_ROPE | {"factor": 8.0}}
        | _keys("""
            "bos_token_id": 1, "eos_token_id": [2, 3, 4], "max_position_embeddings": 131072,
            "mlp_bias": false, "rope_theta": 500000.0, "tie_word_embeddings": false
        """),
        {"rope_base": 500000.0, "rope_factor": 8.0, "tied": False, "positions": 131072},
    ),
    "Mistral-7B-v0.1": (
        MISTRAL
        | _keys("""
            "bos_token_id": 1, "eos_token_id": 2, "max_position_embeddings": 32768, "rope_theta":
            10000.0, "sliding_window": 4096
        """),
        {"windows": (4096, 4096), "head_dim": 12, "groups": 2},
    ),
    # Written by hand: transformers takes 4096 for a window that is not named.
    "Mistral without a window": (
        MISTRAL | {"head_dim": None, "max_position_embeddings": 32768, "rope_theta": 10000.0},
        {"windows": (4096, 4096), "head_dim": 12},
    ),
    # In the keys of transformers' own configuration; only the initial range is not its default.
    "nanochat-d32": (
        COMMON
        | _keys("""
            "architectures": ["NanoChatForCausalLM"], "model_type": "nanochat", "attention_bias":
            false, "final_logit_softcapping": 15.0, "hidden_act": "relu2",
            "max_position_embeddings": 2048, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
            "tie_word_embeddings": false
        """),
        {"options": NANOCHAT, "activation": "relu2", "head_dim": 12},
    ),
    "Qwen2.5-0.5B": (
        QWEN
        | _keys("""
            "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2",
            "max_position_embeddings": 32768, "max_window_layers": 24, "rope_theta": 1000000.0,
            "sliding_window": 32768, "tie_word_embeddings": true, "use_mrope": false
        """),
        {"qkv_bias": True, "bias": False, "tied": True, "windows": (None, None)},
    ),
    "Qwen3-0.6B": (
        QWEN3
        | _keys("""
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "max_window_layers": 28,
            "tie_word_embeddings": true
        """),
        {"qk_norm": True, "head_dim": 32, "tied": True, "rope_base": 1000000.0, "norm_eps": 1e-06},
    ),
    "Qwen3-30B-A3B": (
        QWEN3
        | _keys("""
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe",
            "decoder_sparse_step": 1, "max_window_layers": 48, "mlp_only_layers": [],
            "moe_intermediate_size": 24, "norm_topk_prob": true, "num_experts": 4,
            "num_experts_per_tok": 2, "output_router_logits": false, "router_aux_loss_coef":
            0.001, "tie_word_embeddings": false
        """),
        {"experts": 4, "topk": 2, "ffn": 24, "renormalize": True, "qk_norm": True},
    ),
    "Mixtral-8x7B-v0.1": (
        COMMON
        | _keys("""
            "architectures": ["MixtralForCausalLM"], "model_type": "mixtral",
            "max_position_embeddings": 32768, "num_experts_per_tok": 2, "num_local_experts": 4,
            "output_router_logits": false, "rms_norm_eps": 1e-05, "rope_theta": 1000000.0,
            "router_aux_loss_coef": 0.02, "sliding_window": null, "tie_word_embeddings": false
        """),
        {"experts": 4, "topk": 2, "ffn": 40, "head_dim": 12, "windows": (None, None)},
    ),
}
# GPT-OSS without YaRN, and with its weights unpacked from MXFP4.
_GPT_OSS = COMMON | _keys("""
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "attention_bias": true,
    "experts_per_token": 2, "head_dim": 16, "initial_context_length": 4096, "layer_types":
    ["sliding_attention", "full_attention"], "max_position_embeddings": 131072,
    "num_experts_per_tok": 2, "num_local_experts": 4, "output_router_logits": false,
    "rms_norm_eps": 1e-05, "rope_parameters": {"rope_type": "default", "rope_theta": 150000},
    "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 128, "swiglu_limit": 7.0,
    "tie_word_embeddings": false
""")
RELEASED["gpt-oss-20b"] = (
    _GPT_OSS,
    {"bias": True, "qkv_bias": True, "activation": "gpt-oss", "windows": (128, None)},
)
# {model: (its config.json, what the message says)}
REFUSED = {
    "gpt-oss-20b in another quantization": (
        _GPT_OSS | {"quantization_config": {"quant_method": "gptq"}},
        ("weights quantized with gptq",),
    ),
    "gpt-oss without RoPE's parameters": (
        {key: value for key, value in _GPT_OSS.items() if not key.startswith("rope_")},
        ("no rope_parameters", "YaRN"),
    ),
}


def respelled(config: dict) -> dict:
    """The same in the keys of transformers 5."""
    new = dict(config)
    rope = {"rope_type": "default"} | (new.pop("rope_scaling", None) or {})
    rope["rope_theta"] = new.pop("rope_theta", 10000.0)
    return new | {"rope_parameters": rope, "dtype": new.pop("torch_dtype")}
