"""Megatron-LM's ``pretrain_hybrid.py`` in short: as its ``pretrain_gpt.py``, of a HybridModel."""

from megatron.core.enums import ModelType
from megatron.training import pretrain
from megatron.training.argument_utils import (
    hybrid_config_from_args,
    pretrain_cfg_container_from_args,
)
from megatron.training.arguments import parse_and_validate_args
from pretrain_gpt import datasets, forward_step

if __name__ == "__main__":
    datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, hybrid_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
