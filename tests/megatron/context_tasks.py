"""Task for the workers: attention over a sequence that is divided over context-parallel ranks.

Shapes: s tokens of this rank, B batch, N heads or groups, S sequence, D head dim.
"""

from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor

from megasink.attention import attention
from megasink.megatron.context_parallel import attend_to_gathered_keys, attend_with_scattered_heads
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.microbatch_documents import PackedRow, row_of_documents
from megasink.megatron.model import MegasinkModelBuilder
from megasink.megatron.ring_attention import Ring
from tests.distributed import tiny_gpt
from tests.megatron.context_case import case_of
from tests.said import said

WAYS = {"all_gather": attend_to_gathered_keys, "a2a": attend_with_scattered_heads}


def own_tokens(x_BNSD: Tensor) -> Tensor:
    """[s, B, N, D]: the chunks r and 2 cp - 1 - r of this rank."""
    size = parallel_state.get_context_parallel_world_size()
    rank = parallel_state.get_context_parallel_rank()
    chunks = x_BNSD.chunk(2 * size, dim=2)
    own = torch.cat((chunks[rank], chunks[2 * size - 1 - rank]), dim=2)
    return own.permute(2, 0, 1, 3).contiguous()


Ends = tuple[int, ...] | None


def attend_over_ranks(cases: list[tuple[str, str, str, float, int | None, Ends]]) -> list[Any]:
    """Outputs and gradients of this rank for each (kind, variant, dtype, sink, window, ends)."""
    group = parallel_state.get_context_parallel_group()
    return [_attend(group, *case) for case in cases]


def _attend(
    group: Any,
    kind: str,
    variant: str,
    dtype_name: str,
    sink: float,
    window: int | None,
    ends: Ends,
) -> dict[str, Tensor]:
    dtype = getattr(torch, dtype_name)
    case = case_of(dtype, sink, group.size())
    leaves = [own_tokens(t).to(dtype).requires_grad_() for t in (case.query, case.key, case.value)]
    named = dict(zip(("query", "key", "value"), leaves, strict=True))
    sink_H = None
    if variant == "sink":
        named["sink"] = sink_H = case.sink.float().requires_grad_()
        if kind == "a2a":
            sink_H = sink_H.chunk(group.size())[group.rank()]

    row = None if ends is None else row_of_documents((0, *ends), device=torch.device("cpu"))

    def attend(*tensors: Tensor) -> tuple[Tensor, Tensor | None]:
        bounds = None if row is None else row.until(tensors[1].shape[2])
        mask = {"window": window, "cu_seqlens": bounds}
        out, _, gate = attention(*tensors, variant=variant, sink_H=sink_H, **mask)
        return out, gate

    if kind == "p2p":
        out_sBHD, gate_BHs = _in_ring(group, variant, sink_H, *leaves)
    else:
        out_sBHD, gate_BHs = WAYS[kind](attend, *leaves, group)
    assert case.grad_out is not None
    assert case.grad_gate is not None
    grad_gate_BHs = own_tokens(case.grad_gate[..., None])[..., 0].permute(1, 2, 0)
    arriving = (own_tokens(case.grad_out).to(dtype), grad_gate_BHs.to(gate_BHs.dtype))
    grads = torch.autograd.grad((out_sBHD, gate_BHs), list(named.values()), arriving)
    found = {"out": out_sBHD.permute(1, 2, 0, 3), "gate": gate_BHs}
    for name, grad in zip(named, grads, strict=True):
        found[f"d {name}"] = grad if name == "sink" else grad.permute(1, 2, 0, 3)
    return {name: tensor.detach().double() for name, tensor in found.items()}


def _in_ring(
    group: Any, variant: str, sink_H: Tensor | None, *leaves_sBND: Tensor
) -> tuple[Tensor, Tensor]:
    """Output [s, B, H, D] and gate of a ring, as core attention calls it."""
    ring, options = Ring(group, tiny_gpt.model_config().transformer), {"scale": None}
    tensors = [leaf.permute(1, 2, 0, 3) for leaf in leaves_sBND]
    if variant == "vanilla":
        out, _, gate = ring.attention(*tensors, with_gate=True, backend="auto", **options)
    else:
        logit = torch.zeros(1, 1, 1) if sink_H is None else sink_H[None, :, None]
        out, _, gate = ring.slot_attention(*tensors, logit, None, backend="auto", **options)
    return out.permute(2, 0, 1, 3), gate


def saved_bytes(tokens: int) -> dict[str, Any]:
    """What core attention saves for the backward of a sequence, and what its gradients are."""
    ranks = parallel_state.get_context_parallel_world_size()
    # A second backward pass leaves out the balance loss.
    options = {"head_balance_scope": "microbatch", "head_balance_coeff": 0.0}
    config = tiny_gpt.model_config(**options).transformer
    layer = CoreAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type="all_gather")
    config.statistics.set_loss_scale(torch.ones(1))
    generator, saved = torch.Generator().manual_seed(1), []
    shape = (1, 2 * tiny_gpt.HEADS, tokens, 16)
    own = own_tokens(torch.randn(shape, generator=generator))
    heads = [tiny_gpt.HEADS, tiny_gpt.HEADS // 2, tiny_gpt.HEADS // 2]
    leaves = [t.contiguous().requires_grad_() for t in own.split(heads, dim=2)]

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor.untyped_storage())
        # The node keeps this function: with a tensor of its graph it would be a cycle.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = layer(*leaves, None)
    storages = {storage._cdata: storage.nbytes() for storage in saved}
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2 + ranks))
    first, again = (torch.autograd.grad(out, leaves, grad, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, again))
    return {"bytes": sum(storages.values()), "gradients": first}


def uncalled(**options: Any) -> list[str]:
    """Modules of a model that hold parameters and are not called in a forward pass."""
    config = tiny_gpt.model_config(num_layers=1, **options)
    model = MegasinkModelBuilder(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups()
    )
    waiting = {n: m for n, m in model.named_modules() if list(m.parameters(recurse=False))}
    for name, module in waiting.copy().items():
        module.register_forward_pre_hook(lambda *_, name=name: waiting.pop(name, None) and None)
    text = torch.zeros(1, 8, dtype=torch.long)
    model(text, torch.arange(8)[None], None)
    return sorted(waiting)


def refusals() -> dict[str, str]:
    """{what is asked for: the message of the refusal, or "" where there is none}."""

    def layer(kind: str | None, **options: Any) -> CoreAttention:
        config = tiny_gpt.model_config(**options).transformer
        return CoreAttention(config, 1, AttnMaskType.causal, "self", cp_comm_type=kind)

    def in_ring() -> None:
        group = parallel_state.get_context_parallel_group()
        ring, tensors = (
            Ring(group, tiny_gpt.model_config().transformer),
            [torch.zeros(1, 2, 4, 8)] * 3,
        )
        ring.attention(*tensors, with_gate=False, cu_seqlens=(0, 3, 8))

    def packed(params: PackedSeqParams) -> None:
        query, key = torch.zeros(8, tiny_gpt.HEADS, 16), torch.zeros(8, 2, 16)
        layer(None)(query, key, key, None, packed_seq_params=params)

    bounds = torch.tensor([0, 8], dtype=torch.int32)
    thd = PackedSeqParams(qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds)
    whole_row = PackedRow(documents=row_of_documents((0, 12), device=torch.device("cpu")))

    calls = {
        "p2p": lambda: layer("a2a+p2p"),
        "ring": lambda: layer(
            "p2p", window_size=(3, 0), attention_bias_type="alibi", attention_variant="v-bias"
        ),
        "documents in a ring": in_ring,
        "prefix": lambda: layer("all_gather", prefix_lm_tokens=3),
        "documents": lambda: packed(thd),
        "row": lambda: packed(whole_row),
        "prefix with a2a": lambda: layer("a2a", prefix_lm_tokens=3),
    }
    return {name: text for name, call in calls.items() if (text := said(call))}
