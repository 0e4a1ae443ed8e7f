"""The configuration of a model with latent attention."""

import copy
from argparse import Namespace
from dataclasses import dataclass

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.training.argument_utils import core_transformer_config_from_args

from megasink.megatron.block_options import changed
from megasink.megatron.config import MegasinkTransformerConfig

# Fields of Megatron's latent attention without a flag: the flags of YaRN in other attention.
_YARN = {
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}


@dataclass(kw_only=True)
class LatentTransformerConfig(MegasinkTransformerConfig, MLATransformerConfig):
    """MLATransformerConfig with megasink's options."""

    q_lora_rank: int | None = None  # upstream's code reads None, too

    def __post_init__(self) -> None:
        self.multi_latent_attention = True
        super().__post_init__()


def latent_config(args: Namespace) -> LatentTransformerConfig:
    """Return the configuration of arguments with --multi-latent-attention."""
    args = copy.copy(args)
    # Megatron would take its own class (megatron/training/argument_utils.py:291), and its fused
    # rotation has no test here.
    args.multi_latent_attention = args.apply_rope_fusion = False
    args.rope_type = None if args.rope_type == "yarn" else args.rope_type  # the default
    for name, flag in _YARN.items():
        if (value := getattr(args, flag)) is not None:
            setattr(args, name, value)
    config: LatentTransformerConfig = core_transformer_config_from_args(
        args, LatentTransformerConfig
    )
    return config


def with_checkpoint_names(layer: ModuleSpec, experts: int | None) -> ModuleSpec:
    """Return the spec of a local layer whose norms TransformerEngine names in checkpoints."""
    names = {
        f"self_attention.{x}_layernorm.": f"self_attention.linear_{x}_up_proj.layer_norm_"
        for x in ("q", "kv")
    }
    if not experts:
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return changed(layer, sharded_state_dict_keys_map=names)
