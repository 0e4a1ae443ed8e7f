"""Factors of 1 on the outputs of heads, and the gradients of a loss with respect to them.

Shapes: B rows, Q tokens, H heads, D head dim, N sequences.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megasink.analysis.capture.segments import Segment
from megasink.analysis.capture.statistics import AttentionCall
from megasink.errors import UserError


class HeadFactors:
    """One factor for each head and sequence of a model whose weights are frozen meanwhile."""

    def __init__(self, model: torch.nn.Module):
        self.model = model
        self._frozen = [w for w in model.parameters() if w.requires_grad]
        self._require_grad(False)
        self._of_layer: dict[int, Tensor] = {}

    def clear(self) -> None:
        """Drop the factors of the last forward pass, and its graph with them."""
        self._of_layer.clear()

    def close(self) -> None:
        """Restore the weights' gradients."""
        self.clear()
        self._require_grad(True)

    def multiply(
        self, index: int, out_BQHD: Tensor, call: AttentionCall, segments: Sequence[Segment]
    ) -> Tensor:
        """Multiply the heads of one layer by a separate factor in every sequence."""
        read = (call.query_BHTD, call.key_BGTD, call.value_BGTD, out_BQHD)
        # Before the first layer with attention nothing depends on a factor.
        if self._of_layer and not all(tensor.requires_grad for tensor in read):
            raise self._error(f"the attention of layer {index} detaches it")
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

    def _require_grad(self, required: bool) -> None:
        for weight in self._frozen:
            weight.requires_grad_(required)

    def _error(self, reason: str) -> UserError:
        name = type(self.model).__name__
        return UserError(f"the gradient of {name}'s heads is unknown: {reason}; drop --metrics")
