"""The interface of gate kernels, which run after an attention kernel and before its backward.

Shapes: B batch, H query heads, G key/value groups, T queries, S keys, D head dim; 1 for a dimension
that broadcasts. Statistics are float32, or float64 for float64.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from torch import Tensor

from megasink.attention.call import Arriving, AttentionCall, Results
from megasink.attention.kernels import AttentionRequest


class FirstKey(NamedTuple):
    """Key 0 as the slot."""

    query_BHTD: Tensor  # all queries
    key_BG1D: Tensor  # like the value, of packed documents all keys, [B, G, S, D]
    value_BG1D: Tensor
    keys: int
    alone: int  # leading rows that see only key 0 and are not the kernel's
    skipped: int = 1  # leading keys that are not the kernel's
    # Boundaries 0, .., S of packed documents, whose first rows see only their key 0.
    documents: Sequence[int] | None = None


class BeforeBackward(NamedTuple):
    """What the backward of an attention kernel takes, and the gradients of the slot."""

    grad_out_BHTD: Tensor  # dO', like O' of the next one, if the gradient of the LSE is injected
    out_BHTD: Tensor
    lse_grad_BHT: Tensor | None  # for a kernel that takes it
    logit_grad: Tensor | None = None  # in the shape of the logit, [B, H, T] for the first key
    value_grad: Tensor | None = None
    # For the first key: writes dq [B, H, T, D] from the kernel's gradient of the rows from
    # `first.alone` on (or None), which may be in the memory of dq.
    add_to_query: Callable[[Tensor | None, Tensor], None] | None = None
    # For the first key: writes the rows 0 of dk and dv, [B, G, S, D].
    fill_first_rows: Callable[[Tensor, Tensor], None] | None = None


# x_BHTD, score_BHTC, activation, operation -> gated tensor, mean gate [B, H, T].
GateRows = Callable[[Tensor, Tensor, str, str], tuple[Tensor, Tensor]]


class GateKernels(ABC):
    """Kernels for the slot of attention and for explicit gates.

    `PlainGateKernels` is the definition; others compute the same within rounding, and the injected
    rows to the bit.
    """

    name: str  # by which users select them
    # Whether the backwards write the injected rows into the incoming gradient and `out_BHTD` until
    # they exit; no other tensor may have their memory.
    borrows: bool = False
    # Applies an explicit gate (`explicit.gate_rows`); None where the layer's own operations do.
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
        """Add the slot (no value is 0) to attention over the keys, which may be overwritten."""

    @abstractmethod
    def shares(self, lse_BHT: Tensor, slot_logit: Tensor) -> tuple[Tensor, Tensor]:
        """Return G and p, [B, H, T], from an LSE' that includes the slot.

        Their error is absolute: that of the LSE', 4e-7 per unit of rounding at logits of 40.
        """

    @abstractmethod
    def first_key_forward(
        self, first: FirstKey, rows: tuple[Tensor, Tensor] | None, call: AttentionCall
    ) -> Results:
        """Add key 0 to out and LSE of the other keys, for the `rows` from `first.alone` on."""

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
        """Take the gradients of the slot and prepare those of the keys, for a kernel's backward.

        Until the exit `arriving` and `results` may hold the injected rows.

        Args:
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
