"""Megatron's data sets from arguments, and one batch from them on each rank.

Shapes: B microbatch, S sequence.
"""

from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.utils import get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megasink.train.sink_token import with_sink_token

_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
# What --dataloader-inter-document-masking adds: every pipeline stage needs it.
_PACKED = ("cu_seqlens", "max_seqlen")
_UNUSED = ("attention_mask", "cu_seqlens_padded", "local_cp_size", "hybrid_cp_group")


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """The options of Megatron's GPTDataset; attention masks are left to the kernels."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=args.split,
        multiple_validation_sets=args.multiple_validation_sets,
        full_validation=args.full_validation,
        num_dataset_builder_threads=args.num_dataset_builder_threads,
        path_to_cache=args.data_cache_path,
        mmap_bin_files=args.mmap_bin_files,
        tokenizer=get_tokenizer(),
        reset_position_ids=args.reset_position_ids,
        reset_attention_mask=args.reset_attention_mask,
        eod_mask_loss=args.eod_mask_loss,
        create_attention_mask=False,
        inter_document_masking=args.dataloader_inter_document_masking,
        mid_level_dataset_surplus=args.mid_level_dataset_surplus,
        allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
    )


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """(train, validation, test) for Megatron's ``pretrain``.

    Args:
        samples: how many of each.
        vp_stage: the virtual pipeline stage.
    """
    args = get_args()

    def built_here() -> bool:
        reads = args.dataloader_inter_document_masking or is_first_or_last_pipeline_stage(vp_stage)
        return bool(mpu.get_tensor_model_parallel_rank() == 0 and reads)

    kind = MockGPTDataset if args.mock_data else GPTDataset
    builder = BlendedMegatronDatasetBuilder(kind, samples, built_here, dataset_config(args))
    return builder.build()


# Megatron asks for it: every rank calls the provider, which builds where it is needed.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None) -> dict[str, Any]:
    """The microbatch on this rank: tensor-parallel rank 0 reads it and broadcasts.

    Returns:
        tokens, labels, position_ids [B, S] int64 and loss_mask [B, S] float32; None for what this
        pipeline stage does not need. With --dataloader-inter-document-masking also cu_seqlens
        [B, S + 1] and max_seqlen [B] int32, on every stage.
    """
    args = get_args()
    packed = args.dataloader_inter_document_masking
    ends_here = is_first_or_last_pipeline_stage(vp_stage)
    if not packed and not ends_here:
        return dict.fromkeys(_KEYS)
    batch: dict[str, Tensor | None] = dict.fromkeys(_KEYS + _PACKED + _UNUSED)
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        read = next(data_iterator)
        # All of it even where a virtual stage in the middle needs the boundaries alone: Megatron
        # broadcasts by the rank's place in the pipeline, not by that of the virtual stage.
        keys = _KEYS + _PACKED if packed else _KEYS
        batch |= {key: read[key].cuda(non_blocking=True) for key in keys}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=False,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    if not ends_here:
        batch |= dict.fromkeys(_KEYS)
    if batch["loss_mask"] is not None and args.prefix_lm_tokens:
        batch["loss_mask"] = without_prefix(batch["loss_mask"], args.prefix_lm_tokens)
    return with_sink_token(batch, args.sink_token_id) if args.sink_token else batch


def without_prefix(loss_mask: Tensor, prefix: int) -> Tensor:
    """[B, S] loss mask of a prefix language model: targets from the first after the prefix on.

    P2.18: the target of position i is token i + 1 (0-based), so positions before prefix - 1 do not
    count. All sums of the loss are taken over this mask, bits per byte included.
    """
    inside = torch.arange(loss_mask.shape[1], device=loss_mask.device) < prefix - 1
    return loss_mask.masked_fill(inside, 0.0)


def token_byte_table() -> Tensor | None:
    """[V] int64 bytes of text per token id, or None for a tokenizer without text (P0.18)."""
    args = get_args()
    if args.tokenizer_type != "HuggingFaceTokenizer":
        return None
    from megasink.data.token_bytes import token_bytes
    from megasink.data.tokenizer import load_tokenizer

    table = torch.from_numpy(token_bytes(load_tokenizer(args.tokenizer_model))).long()
    rows = torch.zeros(args.padded_vocab_size, dtype=torch.long)
    rows[: len(table)] = table
    return rows.cuda()
