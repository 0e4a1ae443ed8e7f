"""The interface through which `megasink.analysis.interventions` changes the outputs of heads.

Shapes: B rows, H query heads, Q tokens of this forward pass, D head dim, E hidden size.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megasink.analysis.capture.attention_statistics import AttentionCall
from megasink.analysis.capture.segments import Segment
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
                f"this call continues a cache of {self.rows} rows, but the heads were chosen "
                f"from {len(rows)} sequences in {len(set(rows))} rows: first run the whole "
                "prompts in this context, one per row"
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


class HeadFactors:
    """One factor for each head and sequence of a model whose weights are frozen meanwhile."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self._frozen = [w for w in model.parameters() if w.requires_grad]
        for weight in self._frozen:
            weight.requires_grad_(False)
        self._of_layer: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Drop the factors of the last forward pass, and its graph with them."""
        self._of_layer.clear()

    def close(self) -> None:
        """Restore the weights' gradients."""
        self.clear()
        for weight in self._frozen:
            weight.requires_grad_(True)

    def multiply(
        self, index: int, out_BQHD: Tensor, call: AttentionCall, segments: Sequence[Segment]
    ) -> Tensor:
        """Multiply the heads of one layer by a separate factor in every sequence."""
        read = (call.query_BHTD, call.key_BGTD, call.value_BGTD, out_BQHD)
        # Before the first layer with attention nothing depends on a factor.
        if self._of_layer and not all(tensor.requires_grad for tensor in read):
            raise self._error(f"the attention of layer {index} detaches its inputs or output")
        rows, tokens, heads = out_BQHD.shape[:3]
        dtype = torch.promote_types(out_BQHD.dtype, torch.float32)
        factor_NH = out_BQHD.new_ones(len(segments), heads, dtype=dtype).requires_grad_()
        self._of_layer[index] = factor_NH
        if [segment.row for segment in segments] == list(range(rows)):
            factor_BQH = factor_NH[:, None]  # padding does not enter the loss
        else:
            of_BQ = torch.zeros(rows, tokens, dtype=torch.int64, device=out_BQHD.device)
            for sample, (row, start, stop) in enumerate(segments):
                of_BQ[row, start:stop] = sample
            factor_BQH = factor_NH[of_BQ]
        return (out_BQHD * factor_BQH[..., None]).to(out_BQHD.dtype)

    def gradients(self, loss: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield (sample, layer, gradient [H]) of a loss summed over sequences."""
        factors, self._of_layer = self._of_layer, {}
        try:
            gradients = torch.autograd.grad(loss, list(factors.values()))
        except RuntimeError as error:
            raise self._error(str(error).partition("\n")[0]) from error
        for index, gradient_NH in zip(factors, gradients, strict=True):
            for sample, gradient_H in enumerate(gradient_NH):
                yield sample, index, gradient_H

    def _error(self, reason: str) -> UserError:
        name = type(self.model).__name__
        return UserError(f"cannot compute the gradient of {name}'s heads: {reason}; drop --metrics")
