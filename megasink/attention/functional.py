"""The public API: attention with its LSE and gate, on the fastest kernel that is exact.

Shapes: B batch, H query heads, G key/value groups (H a multiple of G), T queries, S keys, D head
dim.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megasink.attention.call import AttentionCall, AttentionOutput, Slot, Slotted, softmax_variant
from megasink.attention.layout import statistics_dtype
from megasink.attention.op import eagerly, packs


def attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    *,
    variant: str = "vanilla",
    sink_H: Tensor | None = None,
    prefix: int = 0,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    distance_bias_HS: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    backend: str = "auto",
    with_gate: bool = True,
) -> AttentionOutput:
    """Compute `reference_attention` with gradients of output, LSE and gate.

    No S x S tensor is allocated. Supports torch.compile and CUDA graph capture, without host syncs.

    Args:
        query_BHTD, key_BGSD, value_BGSD: float16, bfloat16, float32 or float64, any strides:
            Megatron's [s, b, h, d] permuted to [b, h, s, d] needs no copy. The last query is
            aligned with the last key. Values may be narrower than keys, as the output then is.
        variant: "vanilla" (paper P0.1), "sink" (P0.2) or "off-by-one" (a sink fixed at 0).
        sink_H: Sink logits, for "sink" only; float32, or float64 for float64 queries.
        prefix: Keys visible to every token, earlier tokens included (prefix LM, P2.18). Needs
            `causal`; not with a window, documents or a bias.
        window: Tokens visible to a token, including itself (P2.19); None for all.
        cu_seqlens: Boundaries 0, .., S of packed documents, integers on the host. Each document
            attends only to itself, and its first key is key 0. None for one document.
        distance_bias_HS: [H, S or more], entry [h, i - j] is added to the score of key j <= i
            (ALiBi, T5 and others, P2.20 to P2.22); float32, or float64 for float64 queries;
            differentiable. Needs `causal`, and a backend that adds a bias ("eager").
        scale: Factor of the scores; None for D ** -0.5.
        causal: Mask keys after the token's own position.
        backend: A name from `backend_names()`, or "auto".
        with_gate: Return the gate, differentiable. Without it vanilla attention is a single
            kernel call, and float16 can use flash kernels.

    Returns:
        out_BHTD, in the memory order of the query; lse_BHT; gate_BHT or None.

    Raises:
        ConfigError: No backend, or not the requested one, computes this exactly.
        ValueError: Shapes, dtypes, devices or masks are incompatible.
    """
    check_shapes(query_BHTD, key_BGSD, value_BGSD, causal)
    softmax = softmax_variant(variant, sink_H)
    dtype, heads = statistics_dtype(query_BHTD.dtype), query_BHTD.shape[1]
    if sink_H is not None and (
        sink_H.shape != (heads,) or sink_H.dtype is not dtype or sink_H.device != query_BHTD.device
    ):
        raise ValueError(
            f"sink_H must be [{heads}] in {dtype} on {query_BHTD.device}, got "
            f"{list(sink_H.shape)} in {sink_H.dtype} on {sink_H.device}"
        )
    slot, slot_logit = softmax.slot, None
    if slot == Slot.GIVEN:
        if sink_H is None:
            sink_H = query_BHTD.new_zeros(heads, dtype=dtype)
        slot_logit = sink_H if cu_seqlens is None else sink_H.view(1, -1, 1)
    elif not with_gate:
        slot = Slot.NONE
    slotted = Slotted(query_BHTD, key_BGSD, value_BGSD, slot_logit)
    call = _checked(
        *(slotted, with_gate, cu_seqlens, distance_bias_HS, scale),
        *(causal, prefix, window, slot, backend),
    )
    if cu_seqlens is not None:
        return _by_document(slotted, call, with_gate, cu_seqlens)
    out_BHTD, lse_BHT, gate_BHT, _ = op_for(slotted, call)(*slotted, *call)
    return AttentionOutput(out_BHTD, lse_BHT, gate_BHT if with_gate else None)


def slot_attention(
    query_BHTD: Tensor,
    key_BGSD: Tensor,
    value_BGSD: Tensor,
    slot_logit_BHT: Tensor,
    slot_value_BHTD: Tensor | None = None,
    *,
    prefix: int = 0,
    window: int | None = None,
    cu_seqlens: Sequence[int] | None = None,
    distance_bias_HS: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    backend: str = "auto",
) -> AttentionOutput:
    """Compute `reference_slot_attention`: attention with an extra key of given logit and value.

    A sink is a logit [1, H, 1]; a key bias (P2) is the logit scale * q_i . k*, and a key-value bias
    also has a slot value.

    Args:
        slot_logit_BHT: Broadcastable to [B, H, T]; float32, or float64 for float64 queries.
        slot_value_BHTD: Broadcastable to the output; None for 0.

    Other arguments, return value and errors: see `attention`.
    """
    check_shapes(query_BHTD, key_BGSD, value_BGSD, causal)
    dtype = statistics_dtype(query_BHTD.dtype)
    sizes = *query_BHTD.shape[:3], value_BGSD.shape[3]
    _check_slot("slot_logit_BHT", slot_logit_BHT, sizes[:3], query_BHTD, dtype)
    if slot_value_BHTD is not None:
        _check_slot("slot_value_BHTD", slot_value_BHTD, sizes, query_BHTD, None)
        slot_value_BHTD = slot_value_BHTD.expand(*slot_value_BHTD.shape[:3], sizes[3])
    slotted = Slotted(query_BHTD, key_BGSD, value_BGSD, slot_logit_BHT, slot_value_BHTD)
    call = _checked(
        *(slotted, True, cu_seqlens, distance_bias_HS, scale),
        *(causal, prefix, window, Slot.GIVEN, backend),
    )
    if cu_seqlens is not None:
        return _by_document(slotted, call, True, cu_seqlens)
    return AttentionOutput(*op_for(slotted, call)(*slotted, *call)[:3])


def _check_slot(
    name: str, tensor: Tensor, sizes: Sequence[int], query: Tensor, dtype: torch.dtype | None
) -> None:
    """Reject a tensor of a slot that does not broadcast: kernels would read beyond it."""
    fits = len(tensor.shape) == len(sizes) and all(
        n in (1, size) for n, size in zip(tensor.shape, sizes, strict=True)
    )
    if not fits or tensor.dtype is not (dtype or tensor.dtype) or tensor.device != query.device:
        wanted = f"{list(sizes)} {f'in {dtype} ' if dtype else ''}on {query.device}"
        has = f"{list(tensor.shape)} in {tensor.dtype} on {tensor.device}"
        raise ValueError(f"{name} must be {wanted}, or broadcast to it, got {has}")


def op_for(slotted: Slotted, call: AttentionCall) -> Callable[..., Sequence[Tensor]]:
    """Return what runs the op on the fields of `slotted` and `call`.

    It is a custom op for compilers, subclasses of tensors, dispatch modes and functorch.
    """
    tensors = *slotted, call.distance_bias_HS
    if torch.compiler.is_compiling() or not _is_plain(*tensors):
        from megasink.attention.custom_op import op_of

        return op_of(*tensors)
    return eagerly


def _is_plain(*tensors: Tensor | None) -> bool:
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return _PLAIN_TYPES.issuperset(map(type, tensors))


_PLAIN_TYPES = frozenset((Tensor, torch.nn.Parameter, type(None)))


def _by_document(
    slotted: Slotted, call: AttentionCall, with_gate: bool, cu_seqlens: Sequence[int]
) -> AttentionOutput:
    """Call the op on all documents if its kernel packs them, else on each document."""
    from megasink.attention.documents import attend_by_document, in_one_call, with_bias_of

    def run(slotted: Slotted, call: AttentionCall) -> AttentionOutput:
        out_BHTD, lse_BHT, gate_BHT, _ = op_for(slotted, call)(*slotted, *call)
        return AttentionOutput(out_BHTD, lse_BHT, gate_BHT if with_gate else None)

    if packs(slotted, call):
        return run(*in_one_call(slotted, call, cu_seqlens))
    return attend_by_document(
        lambda *own: run(Slotted(*own), with_bias_of(own[1].shape[2], call)), cu_seqlens, *slotted
    )


def _checked(
    slotted: Slotted,
    with_gate: bool,
    cu_seqlens: Sequence[int] | None,
    bias_HS: Tensor | None,
    scale: float | None,
    causal: bool,
    prefix: int,
    window: int | None,
    slot: str,
    backend: str,
) -> AttentionCall:
    """Return the valid call, its prefix clamped and its bias cut to the number of keys."""
    query_BHTD, keys = slotted.query_BHTD, slotted.key_BGSD.shape[2]
    tensors = (*slotted, bias_HS) if with_gate and torch.is_grad_enabled() else ()
    needs = any(tensor is not None and tensor.requires_grad for tensor in tensors)
    if prefix < 0:
        raise ValueError(f"prefix {prefix}: use 0 or more keys")
    if prefix:
        others = {"window": window, "cu_seqlens": cu_seqlens, "distance_bias_HS": bias_HS}
        clashes = [name for name, other in others.items() if other is not None]
        for name in clashes if causal else [*clashes, "causal=False"]:
            raise ValueError(f"a prefix needs causal attention and cannot be combined with {name}")
        # A prefix of one key is the causal mask.
        prefix = 0 if prefix < 2 else min(prefix, keys)
    if cu_seqlens is not None and not causal:
        raise ValueError("cu_seqlens needs causal attention: call attention once for each document")
    if bias_HS is not None:
        from megasink.attention.documents import check_bias

        check_bias(bias_HS, query_BHTD, keys, cu_seqlens)
        if cu_seqlens is None and bias_HS.shape[1] != keys:
            bias_HS = bias_HS[:, :keys]
    scale = query_BHTD.shape[-1] ** -0.5 if scale is None else scale
    if not 0.0 < scale < float("inf"):  # flash kernels would scale the mask, too: NaN
        raise ValueError(f"scale {scale}: use a positive, finite number")
    return AttentionCall(bias_HS, scale, causal, prefix, window, slot, backend, needs)


def check_shapes(query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, causal: bool) -> None:
    """Reject inputs on which kernels silently return wrong results or crash."""
    problem = _shape_problem(query_BHTD, key_BGSD, value_BGSD, causal)
    same_dtype = query_BHTD.dtype is key_BGSD.dtype is value_BGSD.dtype
    if not problem and same_dtype and query_BHTD.device == key_BGSD.device == value_BGSD.device:
        return
    tensors = {"query": query_BHTD, "key": key_BGSD, "value": value_BGSD}
    if problem:
        shapes = ", ".join(f"{name} {list(tensor.shape)}" for name, tensor in tensors.items())
        raise ValueError(f"{problem}, got {shapes}")
    kinds = ", ".join(f"{n} {t.dtype} on {t.device}" for n, t in tensors.items())
    raise ValueError(f"query, key and value must have one dtype and device, got {kinds}")


def _shape_problem(
    query_BHTD: Tensor, key_BGSD: Tensor, value_BGSD: Tensor, causal: bool
) -> str | None:
    sizes, of_keys, of_values = query_BHTD.shape, key_BGSD.shape, value_BGSD.shape
    if not len(sizes) == len(of_keys) == len(of_values) == 4:
        return "query, key and value must be [batch, heads, tokens, head dim]"
    if 0 in sizes or 0 in of_keys:
        return "query, key and value must not be empty"
    (batch, heads, queries, head_dim), (groups, keys) = sizes, of_keys[1:3]
    if heads % groups:
        return f"{heads} query heads are not a multiple of {groups} key/value groups"
    if of_keys != (batch, groups, keys, head_dim) or of_values[:3] != of_keys[:3]:
        return "query, key and value must agree in batch, groups, tokens and head dim"
    if not 0 < of_values[3] <= head_dim:
        return f"the head dim of values must be 1 to {head_dim} (that of the keys)"
    if causal and queries > keys:
        return f"causal attention of {queries} queries needs at least as many keys, not {keys}"
    return None
