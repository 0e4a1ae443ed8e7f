"""Why an architecture without a target cannot be imported: by its name, or by what its keys say."""

from collections.abc import Mapping
from typing import Any

_BY_NAME = {
    "olmo2": "it normalizes the outputs of attention and FFN, not their inputs, and its "
    "qk-norm spans all heads, where Megatron's spans one head",
    "granite": "its multipliers (embedding, attention, residual, logits) have no counterpart",
    "llama4": "its layers without RoPE and its chunked attention have no counterpart",
    "gpt2": "its weights are transposed, with query, key and value in one tensor, and its FFN and "
    "norms have biases",
    "phi3": "query, key and value are one tensor, and its RoPE has a factor for each dimension",
}
# {key: what a value other than null, false and 0 means}
_BY_KEY = {
    "is_encoder_decoder": "it is an encoder and a decoder",
    "vision_config": "it reads images beside text",
    "audio_config": "it reads sound beside text",
    "kv_lora_rank": "it has multi-head latent attention",
    "linear_num_value_heads": "it has layers of linear attention",
    "state_size": "it has state-space layers",
    "ssm_state_size": "it has state-space layers",
    "mamba_d_state": "it has state-space layers",
    "use_parallel_residual": "attention and FFN read the same input, side by side",
    "parallel_attn": "attention and FFN read the same input, side by side",
    "attn_logit_softcapping": "its attention scores have a soft cap",
    "alibi": "its positions are distances (ALiBi)",
    "clip_qkv": "its queries, keys and values are clamped",
    "type_vocab_size": "it is an encoder: its attention is not causal",
    "query_pre_attn_scalar": "its attention has a scale of its own, and its norms add 1 to gains",
}


def why_not(config: Mapping[str, Any]) -> str:
    """Return why megasink cannot import the model of a config.json, without a subject."""
    if named := _BY_NAME.get(str(config.get("model_type"))):
        return named
    found = dict.fromkeys(text for key, text in _BY_KEY.items() if config.get(key))
    return "; ".join(found) or "no target says what its tensors are"
