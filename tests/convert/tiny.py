"""What the tiny models of `models.py` share."""

from megasink.convert.architecture import Architecture, DeltaNet, Latent, Yarn
from megasink.convert.megasink_model import MegasinkOptions

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


NANOCHAT = {"norm_without_gain": True, "embedding_norm": True, "qk_l2_norm": True}
NANOCHAT |= {"gated_unit": False, "logit_softcap": 9.0}


def latent(queries=24, **options):
    """Keys of 24 with 8 rotated channels, values of 12, and latents of queries and keys."""
    widths = Latent(queries=queries, keys=32, plain=16, rotated=8, values=12)
    return {"latent": widths, "groups": 4, "head_dim": 8, "qk_norm": True, **options}


def deepseek(latent=None, factor=2.5, rotated=1.0, **options) -> Architecture:
    """With DeepSeek-V3's experts: one dense layer, and groups of two experts, one chosen."""
    router = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
    router |= {"moe_router_topk_scaling_factor": factor}
    if latent:
        options = {"norm_eps": 1e-6, **latent, **options}
    given = {
        **{"qk_norm": True, "shared_ffn": 40},
        **{"dense_layers": 1, "dense_ffn": 56, "experts": 4, "topk": 2, "expert_groups": (2, 1)},
        "options": MegasinkOptions(**router, rotary_percent=rotated),
    }
    return model(**given | options)


# {name: (target, model)}

YARN = Yarn(factor=4.0, original=24)
HEADS = {"head_dim": 12}  # of families whose heads share the hidden size
UNGATED = {"activation": "relu2"}
MUP = {"use_mup": True, "mup_embedding_mult": 12.0, "mup_output_mult": 1.5}
MUP |= {"mup_base_head_dim": 4.0}


def having(**options):
    return {"options": MegasinkOptions(**options)}


DELTA_NET = DeltaNet(
    linear_conv_kernel_dim=3,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)


def qwen(*linear, **options):
    """A model with gated delta-net in these layers, and a quarter of each head rotated."""
    sizes = {"layers": len(linear), "windows": (None,) * len(linear)}
    mixers = {"delta_net": DELTA_NET, "linear_layers": linear} if any(linear) else {}
    heads = {"attention": "elementwise", "qk_norm": True, **having(rotary_percent=0.25)}
    return model(**sizes | mixers | heads | options)


SHARED = {**MOE, "shared_ffn": 24, "shared_gate": True}

# With room for the tokens of a tokenizer of bytes.
TEXT = {"vocabulary": 400, "padded": 512}
OTHERS = {
    "sink-text": ("granite_swa", model(attention="sink", **TEXT)),
    "plain-text": ("llama", model(**TEXT)),
    "gated-text": ("megasink", model(attention="headwise", **TEXT)),
    "biased-text": ("qwen2", model(qkv_bias=True, **TEXT)),
    # 24 layers of 12 MB.
    "large": (
        "llama",
        model(
            layers=24, hidden=512, heads=8, groups=8, head_dim=64, ffn=1536, windows=(None,) * 24
        ),
    ),
}
