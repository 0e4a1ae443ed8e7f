"""The interface through which `megasink.analysis.interventions` changes the outputs of heads.

Shapes: B rows, H query heads, Q tokens of this forward pass, D head dim, E hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from megasink.analysis.capture.segments import Segment
from megasink.analysis.capture.statistics import AttentionCall
from megasink.errors import UserError


@dataclass(frozen=True)
class ForwardPass:
    """One call of the model."""

    # rows, tokens: B and Q of this call.
    rows: int
    tokens: int
    cached: int  # tokens that each row already has in a key/value cache, padding included
    # The sequences, numbered over cached and new tokens together; whole rows if nobody asked for
    # them (`HeadChange.reads_segments`).
    segments: list[Segment]
    input_ids_BQ: Tensor | None = None  # the new tokens; None if the model was given embeddings

    def check_continues(self, segments: Sequence[Segment]) -> None:
        """Check that a call with a cache continues the call that ran these sequences."""
        rows = [segment.row for segment in segments]
        if rows != list(range(self.rows)):
            raise UserError(
                f"this call continues a cache of {self.rows} rows, but heads were chosen for "
                f"{len(rows)} sequences in {len(set(rows))} rows: run the whole prompts in "
                "this context first, one per row"
            )


@dataclass(frozen=True)
class HeadOutputs:
    """The outputs of one layer's heads, before the output projection."""

    layer: int  # from 0
    out_BQHD: Tensor  # after an explicit gate and earlier changes; do not write into it
    # What attention read and wrote; None unless a change or the listener reads attention.
    call: AttentionCall | None
    output_weight: Callable[[], Tensor]  # returns [H, D, E], the output projection by query head


class HeadChange(ABC):
    """Changes the outputs of heads before the output projection, layer after layer."""

    # Whether `change` needs `HeadOutputs.call`. Without it a model's attention is left alone, so
    # any kernel will do.
    reads_attention: bool = False
    # Whether it needs to know where sequences begin and end; one that reads attention always does.
    reads_segments: bool = False

    def problems(self, heads: Sequence[int]) -> list[str]:
        """Return why this change does not fit a model with these numbers of heads."""
        return []

    def begin(self, forward: ForwardPass) -> None:  # noqa: B027  # few changes need it
        """Start one call of the model."""

    @abstractmethod
    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        """Return the new outputs [B, Q, H, D], or None to leave them as they are."""
