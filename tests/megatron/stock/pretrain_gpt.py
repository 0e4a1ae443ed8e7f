"""Megatron-LM's ``pretrain_gpt.py`` in short, for its options that the tests use.

The wheel of megatron-core has ``megatron.training`` and not the script. With the variable
MEGASINK_TEST_MEGATRON_LM, a checkout of Megatron-LM, the tests run the script itself instead.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.enums import ModelType
from megatron.core.tokenizers.utils.build_tokenizer import build_tokenizer
from megatron.training import get_args, pretrain
from megatron.training.argument_utils import gpt_config_from_args, pretrain_cfg_container_from_args
from megatron.training.arguments import parse_and_validate_args


def loss_func(loss_mask: torch.Tensor, losses: torch.Tensor) -> Any:
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1))
    tokens = loss_mask.sum().clone().detach().to(torch.int)
    return loss, tokens, {"lm loss": torch.cat([loss.clone().detach().view(1), tokens.view(1)])}


def forward_step(batches: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
    batch = next(batches)
    out = model(batch["tokens"], batch["position_ids"], None, labels=batch["labels"])
    return out, partial(loss_func, batch["loss_mask"])


def datasets(samples: list[int], vp_stage: int | None = None) -> Any:
    args = get_args()
    config = GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        split=args.split,
        tokenizer=build_tokenizer(args),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    build = BlendedMegatronDatasetBuilder(MockGPTDataset, samples, lambda: True, config).build
    return build()


if __name__ == "__main__":
    datasets.is_distributed = True  # type: ignore[attr-defined]
    args = parse_and_validate_args()
    config = pretrain_cfg_container_from_args(args, gpt_config_from_args(args))
    pretrain(config, datasets, ModelType.encoder_or_decoder, forward_step)
