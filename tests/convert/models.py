"""Tiny models of every target, as Architecture: importable without megatron."""

from megasink.convert.architecture import Architecture

# head_dim is not hidden / heads; 101 tokens leave 27 padded rows.
SMALL = {
    "layers": 2,
    "hidden": 48,
    "heads": 4,
    "groups": 2,
    "head_dim": 16,
    "ffn": 40,
    "vocabulary": 101,
    "padded": 128,
    "tied": False,
    "positions": 96,
    "norm_eps": 1e-5,
    "rope_base": 10000.0,
    "windows": (None, None),
    "init_std": 0.2,
}
MOE = {"experts": 4, "topk": 2}


def model(**options) -> Architecture:
    """A small vanilla model with these options instead."""
    return Architecture(**(SMALL | options))


# {name: (target, model)}
MODELS = {
    "llama": ("llama", model()),
    "llama-tied-geglu": ("llama", model(tied=True, activation="gelu")),
    "llama-bias": ("llama", model(bias=True, qkv_bias=True)),
    "llama3": ("llama", model(rope_base=500000.0, rope_factor=32.0, positions=16384)),
    "qwen2": ("qwen2", model(qkv_bias=True)),
    "qwen3": ("qwen3", model(qk_norm=True)),
    "qwen3-windows": ("qwen3", model(qk_norm=True, windows=(5, None))),
    "mixtral": ("mixtral", model(**MOE)),
    "mixtral-window": ("mixtral", model(**MOE, windows=(5, 5))),
    "qwen3_moe": ("qwen3_moe", model(**MOE, qk_norm=True)),
    "qwen3_moe-not-renormalized": (
        "qwen3_moe",
        model(**MOE, qk_norm=True, renormalize=False, tied=True),
    ),
    "granite_swa": ("granite_swa", model(attention="sink")),
    "granite_swa-tied-windows": (
        "granite_swa",
        model(attention="sink", tied=True, windows=(None, 5)),
    ),
    "off-by-one": ("granite_swa", model(attention="off-by-one")),
    "flint": ("flint", model(attention="sink", qk_norm=True)),
    "flint-window": ("flint", model(attention="sink", qk_norm=True, windows=(5, 5))),
    "granitemoe_swa": ("granitemoe_swa", model(attention="sink", **MOE)),
    "granitemoe_swa-shared": (
        "granitemoe_swa",
        model(attention="sink", **MOE, shared_ffn=24, windows=(5, None)),
    ),
    "gpt_oss": ("gpt_oss", model(attention="sink", **MOE, activation="gpt-oss")),
    "lfm3": ("lfm3", model(attention="headwise", qk_norm=True)),
    "lfm3-tied-window": (
        "lfm3",
        model(attention="headwise", qk_norm=True, tied=True, windows=(5, None)),
    ),
    "qwen3_5": ("qwen3_5_text", model(attention="elementwise", qk_norm=True)),
    "qwen3_5-headwise-relu": (
        "qwen3_5_text",
        model(attention="headwise", qk_norm=True, activation="relu", tied=True),
    ),
    "qwen3_next": ("qwen3_next", model(attention="elementwise", qk_norm=True, **MOE)),
    "qwen3_next-headwise": ("qwen3_next", model(attention="headwise", qk_norm=True, **MOE)),
}
# With room for the tokens of a tokenizer of bytes.
TEXT = {"vocabulary": 400, "padded": 512}
OTHERS = {
    "sink-text": ("granite_swa", model(attention="sink", **TEXT)),
    "plain-text": ("llama", model(**TEXT)),
    "biased-text": ("qwen2", model(qkv_bias=True, **TEXT)),
    # 24 layers of 12 MB.
    "large": (
        "llama",
        model(
            layers=24, hidden=512, heads=8, groups=8, head_dim=64, ffn=1536, windows=(None,) * 24
        ),
    ),
}
