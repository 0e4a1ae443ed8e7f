"""The op as a custom op, for compilers, subclasses of tensors, dispatch modes and functorch.

A custom op takes only tensors and scalars, so callers unpack `AttentionCall` and the other records
into arguments (`*call`), and the op rebuilds them.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd.forward_ad import unpack_dual

from megasink.attention.call import Arriving, AttentionCall, Results, Slot, Slotted, from_op
from megasink.attention.layout import empty_in_order_of, statistics_dtype

# It imports this module when it needs it, while a compiler traces it.
_op = import_module("megasink.attention.op")

# How the types of a record's fields are written in the schema of a custom op.
_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    str: "str",
    bool: "bool",
    int: "SymInt",
    int | None: "SymInt?",
    float: "float",
    Sequence[int] | None: "int[]?",
}


def _schema(*records: type[NamedTuple], outputs: int) -> str:
    """Return the schema of an op that takes the fields of these records in order."""
    fields = [
        f"{_SCHEMA_TYPES[kind]} {name}"
        for record in records
        for name, kind in record.__annotations__.items()
    ]
    return f"({', '.join(fields)}) -> ({', '.join(['Tensor'] * outputs)})"


@torch.library.custom_op(
    "megasink::slot_attention",
    mutates_args=(),
    schema=_schema(Slotted, AttentionCall, outputs=len(Results._fields)),
)
def slot_attention_op(*arguments: Any) -> Results:
    """Run the forward of the op on the fields of `Slotted` and `AttentionCall`."""
    results: Results = _op.run_forward(None, *arguments)
    return results


@torch.library.custom_op(
    "megasink::slot_attention_backward",
    mutates_args=(),
    schema=_schema(Arriving, Slotted, Results, AttentionCall, outputs=6),
)
def slot_attention_backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """Run the backward of the op on fields of `Arriving`, `Slotted`, `Results` and `AttentionCall`.

    The slot is None if neither of its gradients is needed. Returns gradients of query, key, value,
    slot_logit, slot_value and distance_bias_HS; each of the last three is empty if its input is
    None.
    """
    records = from_op(arguments, Arriving, Slotted, Results, AttentionCall)
    grads = _op.run_backward(*records, lends=False)
    like = (*grads[:3], records[2].lse_BHT, records[1].query_BHTD, records[2].lse_BHT)
    pairs = zip(grads, like, strict=True)
    return tuple(each.new_empty(0) if grad is None else grad for grad, each in pairs)


@slot_attention_op.register_fake
def _(query_BHTD: Tensor, *arguments: Any) -> Results:
    call = AttentionCall._make(arguments[4:])
    shape = query_BHTD.shape[:3]
    lse_BHT = query_BHTD.new_empty(shape, dtype=statistics_dtype(query_BHTD.dtype))
    gates = [lse_BHT.new_empty(0 if call.slot == Slot.NONE else shape) for _ in range(2)]
    out_BHTD = empty_in_order_of(query_BHTD, arguments[1].shape[-1])
    return Results(out_BHTD, lse_BHT, *gates)


@slot_attention_backward_op.register_fake
def _(*arguments: Any) -> tuple[Tensor, ...]:
    _, slotted, results, call = from_op(arguments, Arriving, Slotted, Results, AttentionCall)
    lse_BHT, bias_HS = results.lse_BHT, call.distance_bias_HS

    def given(tensor: Tensor | None, like: Tensor) -> Tensor:
        return like.new_empty(0) if tensor is None else tensor.new_empty(tensor.shape)

    return (
        *(empty_in_order_of(tensor) for tensor in slotted[:3]),
        given(slotted.slot_logit, lse_BHT),
        given(slotted.slot_value, slotted.query_BHTD),
        given(bias_HS, lse_BHT),
    )


slot_attention_op.register_autograd(_op.slot_backward, setup_context=_op.set_up_context)


class _BackwardTransformed(torch.autograd.Function):
    """The backward for functorch, which does not support the derivative of a custom op."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: slot_attention_backward_op(*arguments))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> NoReturn:
        raise NotImplementedError(
            "attention has no second derivative: use reference_attention, which has"
        )


class _Transformed(torch.autograd.Function):
    """The op, likewise."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *arguments: slot_attention_op(*arguments))
    setup_context = staticmethod(_op.set_up_context)
    backward = staticmethod(_op.slot_backward)


def backward_op() -> Callable[..., tuple[Tensor | None, ...]]:
    """Return what runs the backward of the op."""
    if torch.compiler.is_compiling() or not torch._C._are_functorch_transforms_active():
        return slot_attention_backward_op
    transformed: Callable[..., tuple[Tensor | None, ...]] = _BackwardTransformed.apply
    return transformed


def op_of(*tensors: Tensor | None) -> Callable[..., Sequence[Tensor]]:
    """Return what runs the op on these tensors; refuse forward-mode derivatives."""
    if torch.compiler.is_compiling():
        return slot_attention_op
    if torch._C._are_functorch_transforms_active():
        transformed: Callable[..., Sequence[Tensor]] = _Transformed.apply
        return transformed
    # A custom op would drop the tangents.
    if any(unpack_dual(t).tangent is not None for t in tensors if t is not None):
        raise NotImplementedError(
            "attention has no forward-mode derivative: use reverse mode, or reference_attention"
        )
    return slot_attention_op
