"""Released configurations of 2025 and 2026, with sizes small enough to run.

A configuration has the defaults of its class in transformers, which are those of a released model,
and the keys in which the named one differs. Sizes and numbers (layers, heads, experts, tokens) are
ours.
"""

from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": 101,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
    "dtype": "float32",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}

_ROUTED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}


def _llama3(factor: float) -> dict[str, Any]:
    rope = {"rope_type": "llama3", "factor": factor, "rope_theta": 5e5}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return rope | {"original_max_position_embeddings": 8192}


def _yarn(factor: float, original: int, **others: Any) -> dict[str, Any]:
    rope = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    return rope | {"rope_theta": 1e6} | others


def _theta(theta: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


_DELTA_NET = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2}
_DELTA_NET |= {"linear_num_value_heads": 4, "head_dim": 16}


def _quarter(theta: float) -> dict[str, Any]:
    return {"rope_parameters": _theta(theta)["rope_parameters"] | {"partial_rotary_factor": 0.25}}


# {model: (type, keys that differ from the defaults)}
IMPORTED: dict[str, tuple[str, dict[str, Any]]] = {
    "SmolLM2-1.7B": ("llama", {"tie_word_embeddings": True, **_theta(130000.0)}),
    "Llama-3.3-70B-Instruct": (
        "llama",
        {"rope_parameters": _llama3(8.0), "max_position_embeddings": 131072},
    ),
    "Falcon3-7B-Base": ("llama", {"head_dim": 16, **_theta(1000042.0)}),
    "Mistral-Small-24B-2501": ("mistral", {"sliding_window": None, **_theta(1e8)}),
    "DeepSeek-R1-Distill-Qwen-7B": ("qwen2", _theta(1e4)),
    "Qwen2.5-7B with YaRN": (
        "qwen2",
        {"rope_parameters": _yarn(4.0, 32768), "max_position_embeddings": 131072},
    ),
    "Qwen3-4B-Instruct-2507": ("qwen3", {"tie_word_embeddings": True, **_theta(5e6)}),
    "Qwen3-30B-A3B-2507": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True, **_theta(1e7)}),
    "Mixtral-8x7B": ("mixtral", {"num_local_experts": 4, **_theta(1e6)}),
    "nanochat-d32": ("nanochat", {}),
    "DeepSeek-V3": (
        "deepseek_v3",
        _ROUTED
        | {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 4}
        | {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
        | {"v_head_dim": 8, "head_dim": 4}
        | {"rope_parameters": _yarn(40.0, 4096, rope_theta=1e4, mscale=1.0, mscale_all_dim=1.0)},
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {"num_local_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
        | {"rope_parameters": _yarn(32.0, 4096, rope_theta=150000.0, truncate=False)}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 8},
    ),
    "Qwen3-Next-80B-A3B": (
        "qwen3_next",
        {**EXPERTS, **_DELTA_NET, "shared_expert_intermediate_size": 24, **_quarter(1e7)},
    ),
    "Qwen3.5-9B": ("qwen3_5_text", {**_DELTA_NET, **_quarter(1e7)}),
    "Seed-OSS-36B-Base": ("seed_oss", _theta(1e7)),
    "AFM-4.5B": (
        "arcee",
        {"rope_parameters": _yarn(20.0, 4096, rope_theta=1e4), "max_position_embeddings": 65536},
    ),
    "cwm": ("cwm", {"rope_parameters": _llama3(16.0) | {"rope_theta": 1e6}, "sliding_window": 8}),
    "Ministral-8B-Instruct-2410": (
        "ministral",
        {"layer_types": ["full_attention", *["sliding_attention"] * 3], "sliding_window": 8}
        | _theta(1e8),
    ),
    "helium-1-2b": ("helium", _theta(20000.0)),
    "ERNIE-4.5-0.3B": ("ernie4_5", {}),
    "GLM-4-9B-0414": ("glm4", {}),
    "GLM-4-32B-0414": ("glm4", {"attention_bias": False}),
    "GLM-4.5-Air": ("glm4_moe", {**_ROUTED, "attention_bias": True, **_theta(1e6)}),
    "dots.llm1": (
        "dots1",
        {**_ROUTED, "n_shared_experts": 2, "norm_topk_prob": True, "first_k_dense_replace": 1}
        | {"routed_scaling_factor": 2.5, "sliding_window": None, **_theta(1e7)},
    ),
    "phi-4": ("phi3", _theta(250000.0)),
    "stablelm-2-1_6b": (
        "stablelm",
        {"use_qkv_bias": True, "hidden_size": 64, "head_dim": 16},
    ),
    "Llama-3.1-Minitron-4B's family, Nemotron": ("nemotron", {}),
    "Jais-2-8B": ("jais2", _theta(5e5)),
    "SmolLM3-3B": ("smollm3", _theta(5e6)),
    "granite-3.3-2b-base": (
        "granite",
        {"attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8.0}
        | {"residual_multiplier": 0.22, "tie_word_embeddings": True, **_theta(1e7)},
    ),
    "HyperCLOVAX-SEED-Think-14B": (
        "hyperclovax",
        {"attention_multiplier": 0.0078125, "embedding_multiplier": 10.0, "logits_scaling": 0.125},
    ),
}
# {model: (type, keys that differ, what the message says)}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Phi-4-mini": (
        "phi3",
        {"partial_rotary_factor": 0.75}
        | {
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}
            | {"long_factor": [1.0] * 4, "short_factor": [1.0] * 4}
        },
        "RoPE scaling 'longrope'",
    ),
    "OLMo-2-7B": ("olmo2", {}, "qk-norm spans all heads|spans all heads"),
    "OLMo-3-7B": ("olmo3", {}, "'olmo3' cannot be imported"),
    "gemma-3-1b": ("gemma3_text", {}, "another scale"),
    "MiniMax-M2": ("minimax_m2", {}, "'minimax_m2' cannot be imported"),
    "EXAONE-4.0-1.2B": ("exaone4", {}, "'exaone4' cannot be imported"),
    "command-a": ("cohere2", {}, "'cohere2' cannot be imported"),
    "Apertus-8B": ("apertus", {}, "'apertus' cannot be imported"),
    "Hunyuan-7B": ("hunyuan_v1_dense", {}, "'hunyuan_v1_dense' cannot be imported"),
    "Nemotron-H-8B": ("nemotron_h", {}, "state-space layers"),
}


def config_of(kind: str, keys: dict[str, Any], sizes: dict[str, Any] = SIZES) -> dict[str, Any]:
    """Return a config.json in the spelling of the installed transformers."""
    import copy

    import transformers

    given = copy.deepcopy(sizes | keys)  # transformers changes what it reads
    given["attention_dropout"] = 0.0
    config: dict[str, Any] = transformers.AutoConfig.for_model(kind, **given).to_dict()
    return config | {"model_type": kind, "torch_dtype": config.pop("dtype", None) or "float32"}
