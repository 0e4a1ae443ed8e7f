"""Tasks for the workers: biases by distance, sinusoids and packed documents inside the layers.

Shapes: S sequence, T tokens of a pack, B batch, H query heads, D head dim.
"""

from itertools import pairwise
from typing import Any
from unittest import mock

import torch
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.models.common.embeddings.relative_pos_embedding import RelativePositionEmbedding
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.utils import unwrap_model
from torch import Tensor

from megasink.megatron import microbatch_documents
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.model import MegasinkModelBuilder
from megasink.megatron.position_biases import alibi_slopes, bucket_of_distance, build_position_bias
from megasink.megatron.sinusoid import sinusoidal_table
from megasink.training.forward_step import pack
from tests.distributed import tiny_gpt
from tests.said import said


def formulas() -> dict[str, Any]:
    """Slopes, buckets (ours and Megatron's own) and sinusoids."""
    upstream = RelativePositionEmbedding._relative_position_bucket
    buckets = {}
    for count, distance in ((32, 128), (8, 20), (16, 1000), (2, 64)):
        ours = bucket_of_distance(600, count, distance)
        theirs = upstream(None, -torch.arange(600), False, count, distance)
        buckets[count, distance] = (ours, theirs)
    return {
        "slopes": {heads: alibi_slopes(heads) for heads in (1, 6, 8, 12)},
        "buckets": buckets,
        "sinusoids": sinusoidal_table(2000, 64),
        "sinusoids in bf16": sinusoidal_table(2000, 64).bfloat16().float(),
    }


def core_attention(**options: Any) -> CoreAttention:
    """The first layer's, in training."""
    config = tiny_gpt.model_config(position_embedding_type="none", **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    (model,) = tiny_gpt.skew_sinks([MegasinkModelBuilder(config).build_model(groups)])
    layer: CoreAttention = next(m for m in model.modules() if isinstance(m, CoreAttention))
    return layer.train()


def qkv(tokens: int, batch: int = 1) -> list[Tensor]:
    """Megatron's [S, B, heads, D], of the heads of all ranks."""
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(tokens, batch, heads, 16, generator=generator) for heads in (4, 2, 2)]


def alibi_by_definition() -> float:
    """Largest difference of core attention on this rank from softmax(q k^T / sqrt d - m (i - j)).

    The slopes are those of the global heads: rank r of two has the heads 2 r and 2 r + 1.
    """
    layer = core_attention(attention_variant="vanilla", attention_bias_type="alibi")
    size, rank = layer.tp_group.size(), layer.tp_group.rank()
    query, key, value = (x.chunk(size, 2)[rank] for x in qkv(23, batch=2))
    found = layer(query, key, value, None).unflatten(-1, (-1, 16))
    worst = 0.0
    for own in range(4 // size):
        head = rank * (4 // size) + own
        group = own // 2
        for sample in range(2):
            q, k, v = query[:, sample, own], key[:, sample, group], value[:, sample, group]
            scores = torch.empty(23, 23).fill_(-torch.inf)
            for i in range(23):
                for j in range(i + 1):
                    scores[i, j] = q[i] @ k[j] / 4 - 2.0 ** (-2 * (head + 1)) * (i - j)
            difference = found[:, sample, own] - scores.softmax(-1) @ v
            worst = max(worst, difference.abs().max().item())
    return worst


def repeated_tokens(kind: str) -> dict[str, Any]:
    """Importance of a model whose input repeats one token (P2.45)."""
    config = tiny_gpt.model_config(
        position_embedding_type="none", attention_variant="vanilla", attention_bias_type=kind
    )
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkModelBuilder(config).build_model(groups).train()
    tokens = torch.full((1, tiny_gpt.SEQUENCE), 7)
    model(tokens, torch.arange(tiny_gpt.SEQUENCE)[None], None, labels=tokens).mean().backward()
    table = tiny_gpt.recorded(config.transformer)
    assert table is not None
    return {"sums": table[:, :4]}


def padded_pack() -> dict[str, Any]:
    """A pack with padding after each document and at its end, and the same without padding."""
    layer = core_attention(attention_variant="vanilla")
    lengths, padded = (5, 1, 7), (0, 8, 10, 17)  # and 3 tokens after the last
    starts = padded[:-1]
    real = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, lengths, strict=True)])
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    dense = [x[:13, 0] for x in qkv(20)]
    spread = [torch.full((20, *x.shape[1:]), torch.nan) for x in dense]
    for x, y in zip(spread, dense, strict=True):
        x[:] = 50.0  # of padding: whatever it is, it must not matter
        x[real] = y
    found = {}
    for name, tensors, offsets in (
        ("dense", dense, None),
        ("padded", spread, torch.tensor(padded, dtype=torch.int32)),
    ):
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            cu_seqlens_q_padded=offsets,
            cu_seqlens_kv_padded=offsets,
        )
        leaves = [x.clone().requires_grad_() for x in tensors]
        out = layer(*leaves, None, packed_seq_params=params)
        keep = slice(None) if offsets is None else real
        out[keep].square().sum().backward()
        table = tiny_gpt.recorded(layer.config)
        assert table is not None
        found[name] = {"out": out[keep], "sums": table[0, :4], "tokens": table[0, -3]}
        found[name]["grad"] = leaves[0].grad[keep]
        found[name]["pads"] = microbatch_documents.documents_of(params, len(leaves[0])).cu_seqlens
    return found


def host_reads() -> dict[str, int]:
    """How often the boundaries are read from the device, for two layers and two passes."""
    config = tiny_gpt.model_config(position_embedding_type="none")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkModelBuilder(config).build_model(groups).train()
    found = {}
    for name in ("from the data loader", "from elsewhere"):
        data: dict[str, Any] = tiny_gpt.batch(0, 0)
        rows = [[0, 5, 32] + [32] * 30, [0, 9, 11, 32] + [32] * 29]
        data["cu_seqlens"] = torch.tensor(rows, dtype=torch.int32)
        params = pack(data)
        if name == "from elsewhere":
            bounds = params.cu_seqlens_q
            params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
        with mock.patch.object(
            microbatch_documents, "_read", wraps=microbatch_documents._read
        ) as read:
            for _ in range(2):
                model(
                    data["tokens"],
                    data["position_ids"],
                    None,
                    labels=data["labels"],
                    packed_seq_params=params,
                )
        tiny_gpt.recorded(config.transformer)
        found[name] = read.call_count
    return found


def t5_facts(bf16: bool) -> dict[str, Any]:
    """The table of T5's biases after a step: dtype, attributes, checkpoint key."""
    options = {"attention_bias_type": "t5", "bf16": bf16, "position_embedding_type": "none"}
    config = tiny_gpt.model_config(**options)
    models = tiny_gpt.build(config)
    optimizer, scheduler = tiny_gpt.optimizer_of(config, models, False)
    config.transformer.grad_scale_func = optimizer.scale_loss
    (model,) = unwrap_model(models)
    layer = next(m for m in model.modules() if isinstance(m, CoreAttention))
    table = layer.relative_bias.weight
    before = table.detach().clone()
    tiny_gpt.run_step(models, optimizer, 0)
    optimizer.step()
    scheduler.step(1)
    sharded = [
        value
        for key, value in model.sharded_state_dict().items()
        if key.endswith("relative_bias.weight") and isinstance(value, ShardedTensor)
    ]
    return {
        "dtype": str(table.dtype),
        "moved": float((table - before).abs().max()),
        "partition": (table.tensor_model_parallel, table.partition_dim),
        "keys": sorted({s.key for s in sharded}),
        "global_shapes": sorted({tuple(s.global_shape) for s in sharded}),
        "heads": sorted({s.global_offset[-1] for s in sharded}),
    }


def biases(tokens: int) -> dict[str, Tensor]:
    """What each kind adds to the scores of this rank's heads."""
    found = {}
    for kind in ("alibi", "bucket"):
        config = tiny_gpt.model_config(attention_bias_type=kind).transformer
        groups = ProcessGroupCollection.use_mpu_process_groups()
        bias = build_position_bias(config, groups.tp).bfloat16()  # as Float16Module does
        found[kind] = bias(tokens, torch.device("cpu"))
    return found


def refused_packs() -> dict[str, str]:
    """The message of every pack that core attention does not take."""
    layer = core_attention()
    query, key, value = (x[:, 0] for x in qkv(8))
    bounds, other = torch.tensor([0, 3, 8]), torch.tensor([0, 4, 8])
    packs = {
        "format": PackedSeqParams(qkv_format="bshd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds),
        "decode": PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=other),
    }
    found = {
        name: said(layer, query, key, value, None, packed_seq_params=params)
        for name, params in packs.items()
    }
    lengths = [stop - start for start, stop in pairwise(bounds.tolist())]
    assert lengths == [3, 5]
    return found
