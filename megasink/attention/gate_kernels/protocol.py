"""The interface of gate kernels, which run around an attention kernel.

Nothing runs before its forward; after it the slot joins the softmax, and before the backward
the gradients of slot, gate and LSE are taken. Shapes: B batch, H query heads, G key/value groups, T
queries, S keys, D head dim; 1 for a dimension that broadcasts. Statistics are float32, or float64
for float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor

from megasink.attention.call import Arriving, AttentionCall, Results
from megasink.attention.kernels import AttentionRequest


class FirstKey(NamedTuple):
    """Key 0 as the slot.

    Attributes:
        query_BHTD: All queries.
        key_BG1D, value_BG1D: Key 0 and its value; of packed documents all keys, [B, G, S, D].
        keys: S.
        alone: The number of leading rows that see only key 0 and are not the kernel's.
        skipped: The number of leading keys that are not the kernel's.
        documents: Boundaries 0, .., S of packed documents, whose first rows see only their key 0.
    """

    query_BHTD: Tensor
    key_BG1D: Tensor
    value_BG1D: Tensor
    keys: int
    alone: int
    skipped: int = 1
    documents: Sequence[int] | None = None


class BeforeBackward(NamedTuple):
    """What the backward of an attention kernel takes, and the gradients of the slot.

    Attributes:
        grad_out_BHTD, out_BHTD: dO' and O' if the gradient of the LSE is injected, else dO and O.
        lse_grad_BHT: Gradient of the LSE for a kernel that takes it; else None.
        logit_grad: Gradient of the slot logit, in its shape ([B, H, T] for the first key); None if
            not wanted.
        value_grad: Gradient of the slot value, in its shape; None if not wanted.
        add_to_query: For the first key, writes dq [B, H, T, D] from the kernel's gradient of the
            rows from `first.alone` on (or None), which may be in the memory of dq.
        fill_first_rows: For the first key, writes the rows 0 of dk and dv, [B, G, S, D].
    """

    grad_out_BHTD: Tensor
    out_BHTD: Tensor
    lse_grad_BHT: Tensor | None
    logit_grad: Tensor | None = None
    value_grad: Tensor | None = None
    add_to_query: Callable[[Tensor | None, Tensor], None] | None = None
    fill_first_rows: Callable[[Tensor, Tensor], None] | None = None


# x_BHTD, score_BHTC, activation, operation -> gated tensor, mean gate [B, H, T].
GateRows = Callable[[Tensor, Tensor, str, str], tuple[Tensor, Tensor]]


class GateKernels(ABC):
    """Kernels for the slot of attention and for explicit gates.

    `PlainGateKernels` is the definition; others compute the same within rounding, and the injected
    rows to the bit.

    Attributes:
        name: Name by which users select them.
        borrows: Whether `slot_backward` and `first_key_backward` write the injected rows into the
            incoming gradient and `out_BHTD` until they exit; no other tensor may have their memory.
        gate_rows: Applies an explicit gate (explicit_gate_launch.py); None where the layer's own
            operations do.
    """

    name: str
    borrows: bool = False
    gate_rows: GateRows | None = None

    @abstractmethod
    def supports(self, request: AttentionRequest) -> str | None:
        """Return None if they run for this request, else the reason as a clause."""

    @abstractmethod
    def slot_forward(
        self,
        query_BHTD: Tensor,
        out_BHTD: Tensor,
        lse_BHT: Tensor,
        slot_logit: Tensor,
        slot_value: Tensor | None,
    ) -> Results:
        """Add the slot to attention over the real keys.

        Args:
            out_BHTD, lse_BHT: Of the attention kernel; may be overwritten.
            slot_logit, slot_value: Broadcastable to [B, H, T] and [B, H, T, D]; no value is 0.
        """

    @abstractmethod
    def shares(self, lse_BHT: Tensor, slot_logit: Tensor) -> tuple[Tensor, Tensor]:
        """Return G and p, [B, H, T], from an LSE' that includes the slot.

        Their error is absolute: that of the LSE', 4e-7 per unit of rounding at logits of 40.
        """

    @abstractmethod
    def first_key_forward(
        self, first: FirstKey, rows: tuple[Tensor, Tensor] | None, call: AttentionCall
    ) -> Results:
        """Add key 0 to attention over the other keys.

        Args:
            rows: out and LSE of the attention kernel, for the rows from `first.alone` on; None if
                there are none.
        """

    @abstractmethod
    def slot_backward(
        self,
        arriving: Arriving,
        results: Results,
        slot_logit: Tensor | None,
        slot_value: Tensor | None,
        *,
        inject: bool,
        own_sink: bool = False,
    ) -> AbstractContextManager[BeforeBackward]:
        """Take the gradients of the slot and prepare those of the keys.

        On exit, after the attention kernel's backward, `arriving` and `results` are as they were;
        inside they may hold the injected rows.

        Args:
            arriving: With a gradient of out.
            slot_logit: None if no gradient of the slot is wanted, or there is no slot.
            inject: Whether the kernel takes no gradient of the LSE.
            own_sink: Whether the kernel itself returns sum p (p dG + e - dY . Y) for the slot: the
                gradient of its logit is then what that lacks, -sum p dG; None for 0.
        """

    @abstractmethod
    def first_key_backward(
        self,
        arriving: Arriving,
        results: Results,
        first: FirstKey,
        scale: float,
        *,
        inject: bool,
    ) -> AbstractContextManager[BeforeBackward]:
        """Do the same as `slot_backward`, for key 0."""
