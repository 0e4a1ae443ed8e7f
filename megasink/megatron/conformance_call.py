"""Call a core attention of Megatron as a layer does, for `attention.conformance`.

Shapes: B rows, T tokens, H query heads, D head dim.
"""

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megasink.attention.conformance import Attend, Case
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.model_options import refuse_late


def core_attention(kind: type[Any]) -> Attend:
    """Return the calls of a class, in the process groups of one rank.

    Padding is a mask of the type "arbitrary", packed rows are one row in the format thd.
    """

    def attend(
        case: Case, query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None
    ) -> tuple[Tensor, None]:
        if case.softcap is not None:
            raise ValueError("a core attention of Megatron has no softcap")
        module = _built(kind, case, query, sink_H)
        inputs = [tensor.permute(2, 0, 1, 3).contiguous() for tensor in (query, key, value)]
        square = torch.ones(case.tokens, case.tokens, dtype=torch.bool, device=query.device)
        mask = square.triu(1)[None, None]
        options: dict[str, Any] = {"attn_mask_type": AttnMaskType.causal}
        if (real_BT := case.real_BT) is not None:
            mask = mask | ~real_BT.to(query.device)[:, None, None]
            options["attn_mask_type"] = AttnMaskType.arbitrary
        if case.packed:
            inputs = [x.transpose(0, 1).flatten(0, 1).contiguous() for x in inputs]
            ends = torch.tensor(case.boundaries, dtype=torch.int32, device=query.device)
            longest = int(ends.diff().max())
            packed: dict[str, Any] = {"cu_seqlens_q": ends, "cu_seqlens_kv": ends}
            packed |= {"max_seqlen_q": longest, "max_seqlen_kv": longest}
            options["packed_seq_params"] = PackedSeqParams("thd", **packed)
        out = module(*inputs, None if case.packed else mask, **options)
        heads = query.shape[1]
        if case.packed:
            return out.view(case.rows, case.tokens, heads, -1).transpose(1, 2), None
        return out.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3), None

    return attend


def _built(kind: type[Any], case: Case, query: Tensor, sink_H: Tensor | None) -> Any:
    """Build a module for a case, whose softmax offset is the sinks."""
    ours = issubclass(kind, CoreAttention)
    options: dict[str, Any] = {"softmax_type": "vanilla" if sink_H is None else "learnable"}
    if ours:
        options = {"attention_variant": "vanilla" if sink_H is None else "sink"}
    config = (MegasinkTransformerConfig if ours else TransformerConfig)(
        num_layers=1,
        hidden_size=query.shape[1] * query.shape[3],
        num_attention_heads=query.shape[1],
        num_query_groups=case.groups,
        kv_channels=query.shape[3],
        attention_dropout=case.dropout,
        window_size=None if case.window is None else (case.window - 1, 0),
        params_dtype=query.dtype,
        bf16=query.dtype is torch.bfloat16,
        use_cpu_initialization=query.device.type == "cpu",
        **options,
    )
    if ours:
        refuse_late(config)
    width = query.shape[3]
    given: dict[str, Any] = {"k_channels": width, "v_channels": width // 2} if case.narrow else {}
    if case.scale is not None:
        given["softmax_scale"] = case.scale
    mask = AttnMaskType.causal if case.real_BT is None else AttnMaskType.arbitrary
    module = kind(
        config=config, layer_number=1, attn_mask_type=mask, attention_type="self", **given
    ).to(query.device)
    if sink_H is not None:
        del module.softmax_offset
        module.softmax_offset = sink_H
    return module
