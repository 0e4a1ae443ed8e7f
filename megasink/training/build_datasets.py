"""Build Megatron's datasets from arguments, and read a batch on each rank.

Shapes: B microbatch, S sequence, s = S / cp tokens per context-parallel rank; s = S in a packed
batch, which `megasink.training.forward_step` splits.
"""

import contextlib
import functools
from argparse import Namespace
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.utils import get_blend_from_list
from megatron.core.msc_utils import MultiStorageClientFeature
from megatron.core.utils import get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split, is_first_or_last_pipeline_stage
from torch import Tensor

from megasink.data.hf_tokenizer import load_tokenizer
from megasink.data.token_bytes import TokenBytes, token_bytes
from megasink.errors import UserError
from megasink.training.checked_dataset import MockGPTDataset, TextDataset, read_batch, text_targets
from megasink.training.dataset_blends import drawn_validation


def with_sink_token(batch: Mapping[str, Tensor | None], token: int) -> dict[str, Tensor | None]:
    """Prepend the sink: inputs become [sink, x_0 .. x_S-2], and targets [x_0, x_1 .. x_S-1]."""
    # The sink's own target is masked out of the loss. Entries, [B, S], are None where a stage lacks
    # them.
    result = dict(batch)
    if (tokens_BS := batch.get("tokens")) is not None:
        result["tokens"] = _shifted(tokens_BS, torch.full_like(tokens_BS[:, :1], token))
    if (labels_BS := batch.get("labels")) is not None:
        # A pipeline stage without tokens does not have x_0; any id works under a mask of 0.
        result["labels"] = _shifted(labels_BS, labels_BS[:, :1])
    if (mask_BS := batch.get("loss_mask")) is not None:
        result["loss_mask"] = _shifted(mask_BS, torch.zeros_like(mask_BS[:, :1]))
    if (positions_BS := batch.get("position_ids")) is not None:
        result["position_ids"] = _shifted(positions_BS + 1, torch.zeros_like(positions_BS[:, :1]))
    return result


def _shifted(x_BS: Tensor, first_B1: Tensor) -> Tensor:
    return torch.cat((first_B1, x_BS[:, :-1]), dim=1)


_KEYS = ("tokens", "labels", "loss_mask", "position_ids")
# Keys that --dataloader-inter-document-masking adds; every pipeline stage needs them.
_PACKED = ("cu_seqlens", "max_seqlen")
_UNUSED = ("attention_mask", "cu_seqlens_padded", "local_cp_size", "hybrid_cp_group")


def dataset_config(args: Namespace) -> GPTDatasetConfig:
    """Return the options of Megatron's GPTDataset: every field that a flag sets."""
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    split, drawn = args.split, drawn_validation(args.data_path or [])
    if drawn is not None:
        blend, blend_per_split, split = None, [blend, get_blend_from_list(drawn), None], None
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        split=split,
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
        object_storage_cache_path=args.object_storage_cache_path,
        data_parallel_size=args.data_parallel_size,
        context_parallel_size=args.context_parallel_size,
        sequence_parallel_size=args.tensor_model_parallel_size if args.sequence_parallel else 0,
        hybrid_context_parallel=args.hybrid_context_parallel,
    )


def datasets_provider(samples: list[int], vp_stage: int | None = None) -> Any:
    """Build the (train, validation, test) datasets with these numbers of samples."""
    args = get_args()

    def built_here() -> bool:
        return bool(mpu.get_tensor_model_parallel_rank() == 0 and _reads(args, vp_stage))

    kind = MockGPTDataset if args.mock_data else TextDataset
    builder = BlendedMegatronDatasetBuilder(kind, samples, built_here, dataset_config(args))
    with reading_stores(args):
        return builder.build()


@contextlib.contextmanager
def reading_stores(args: Namespace) -> Iterator[None]:
    """Let datasets that are built in the block use multi-storage-client, as --enable-msc asks."""
    # Megatron would also read checkpoints by it (core/dist_checkpointing/strategies/torch.py:905).
    if args.enable_msc:
        MultiStorageClientFeature.enable()
    try:
        yield
    finally:
        MultiStorageClientFeature.disable()


# Megatron reads this: every rank calls the provider, which builds where needed.
datasets_provider.is_distributed = True  # type: ignore[attr-defined]


def get_batch(data_iterator: Iterator[Any] | None, vp_stage: int | None) -> dict[str, Any]:
    """Return this rank's microbatch: tensor-parallel rank 0 reads and broadcasts it.

    tokens, labels, position_ids and loss_mask are [B, s], None on a stage that does not need them;
    targets [] is the sum of the loss mask over all S tokens. The last stage has before_texts []
    and, with --replace-tokens-at, text_targets [B, s] bool. Packed, every stage has max_seqlen [B],
    cu_seqlens [B, S + 1] int32 and, on the rank that read it, host_cu_seqlens.
    """
    args = get_args()
    packed = args.dataloader_inter_document_masking
    ends_here = is_first_or_last_pipeline_stage(vp_stage)
    if not _reads(args, vp_stage):
        return dict.fromkeys((*_KEYS, "targets", "text_targets", "before_texts"))
    batch: dict[str, Any] = dict.fromkeys(_KEYS + _PACKED + _UNUSED)
    targets = host_cu_seqlens = None
    if mpu.get_tensor_model_parallel_rank() == 0:
        assert data_iterator is not None
        read = read_batch(data_iterator)
        # All of it, even if a middle virtual stage needs only the boundaries: Megatron broadcasts
        # by the rank's pipeline stage, not the virtual stage.
        keys = _KEYS + _PACKED if packed else _KEYS
        batch |= {key: read[key].cuda(non_blocking=True) for key in keys}
        host_cu_seqlens = read["cu_seqlens"] if packed else None
        if args.prefix_lm_tokens:
            batch["loss_mask"] = without_prefix(batch["loss_mask"], args.prefix_lm_tokens)
        if args.sink_token:
            batch = with_sink_token(batch, args.sink_token_id)
        targets = batch["loss_mask"].sum()
    tokens = batch["tokens"]
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=False,
        broadcast_src_rank=mpu.get_tensor_model_parallel_src_rank(),
        broadcast_group=mpu.get_tensor_model_parallel_group(),
        cp_size=1,  # a larger one would make the host wait for padded boundaries, which are absent
        tp_rank=mpu.get_tensor_model_parallel_rank(),
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=bool(args.mtp_num_layers) and mpu.is_pipeline_last_stage(),
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=mpu.is_pipeline_first_stage(),
        is_pipeline_last_stage=mpu.is_pipeline_last_stage(),
    )
    batch["text_targets"] = before_texts = None
    if mpu.is_pipeline_last_stage():
        targets = batch["loss_mask"].sum()
        if args.replace_tokens_at:
            batch["text_targets"] = text_targets(
                args.replace_tokens_at,
                batch["loss_mask"],
                batch["cu_seqlens"] if packed else None,
                sink_token=args.sink_token,
            )
        before_texts = _before_texts(tokens, batch)
    elif counts_targets(args):
        targets = _from_first_tensor_parallel_rank(targets)
    if not ends_here:
        batch |= dict.fromkeys(_KEYS)
    if not packed:
        batch = get_batch_on_this_cp_rank(
            batch, is_hybrid_cp=False, cp_group=mpu.get_context_parallel_group()
        )
    batch |= {"targets": targets, "before_texts": before_texts}
    return batch | {"host_cu_seqlens": host_cu_seqlens}


def counts_targets(args: Namespace) -> bool:
    """Return whether every stage needs the number of targets, by which the balance loss scales."""
    return bool(args.calculate_per_token_loss and args.head_balance_coeff)


def _reads(args: Namespace, vp_stage: int | None) -> bool:
    """Return whether a (virtual) pipeline stage reads the data."""
    everywhere = args.dataloader_inter_document_masking or counts_targets(args)
    return bool(everywhere or is_first_or_last_pipeline_stage(vp_stage))


def _from_first_tensor_parallel_rank(number: Tensor | None) -> Tensor:
    """Broadcast a float32 scalar from tensor-parallel rank 0."""
    if number is None:
        number = torch.empty((), device=torch.cuda.current_device())
    group = mpu.get_tensor_model_parallel_group()
    if group.size() > 1:
        source = mpu.get_tensor_model_parallel_src_rank()
        torch.distributed.broadcast(number, source, group=group)
    return number


def without_prefix(loss_mask: Tensor, prefix: int) -> Tensor:
    """Return the [B, S] loss mask of a prefix language model: targets after the prefix (P2.18)."""
    inside = torch.arange(loss_mask.shape[1], device=loss_mask.device) < prefix - 1
    return loss_mask.masked_fill(inside, 0.0)


def bytes_per_token(args: Namespace) -> TokenBytes | None:
    """Return the bytes of text per token id; None if tokens do not stand for bytes."""
    if args.tokenizer_type != "HuggingFaceTokenizer":
        return None
    return _bytes_per_token(args.tokenizer_model, args.rank)


@functools.cache
def _bytes_per_token(folder: str, rank: int) -> TokenBytes | None:
    try:
        return token_bytes(load_tokenizer(folder))
    except UserError as error:
        if rank == 0:
            print(f"megasink: {error}; losses are reported only per token", flush=True)
        return None


def token_byte_table() -> Tensor | None:
    """Return `bytes_per_token` as [V] int64, padded with 0 (P0.18)."""
    args = get_args()
    if (table := bytes_per_token(args)) is None:
        return None
    rows = torch.zeros(args.padded_vocab_size, dtype=torch.long)
    rows[: len(table.lengths)] = torch.from_numpy(table.lengths).long()
    return rows.cuda()


def _before_texts(tokens_BS: Tensor | None, batch: dict[str, Any]) -> Tensor | None:
    """Return the bytes of the targets that the tokenizer put before texts, float32."""
    table = bytes_per_token(get_args())
    if table is None or not table.prefix:
        return None
    number = None
    if tokens_BS is not None:
        starts = torch.tensor([*table.starts], device=tokens_BS.device)
        rows = torch.from_numpy(table.lengths).to(tokens_BS.device)
        text_BS = (batch["loss_mask"] > 0) & (rows[batch["labels"]] > 0)
        if batch["text_targets"] is not None:
            text_BS &= batch["text_targets"]
        number = (torch.isin(tokens_BS, starts) & text_BS).sum().float()
    return _from_first_tensor_parallel_rank(number)
