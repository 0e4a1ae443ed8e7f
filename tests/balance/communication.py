"""Model of the collectives of the head-balance loss, for any parallel layout.

Bytes are the size of the tensor that a rank passes to a collective. A ring all-reduce over n ranks
sends 2 (n - 1) / n times as many from each rank, in 2 (n - 1) sequential messages.
"""

from dataclasses import dataclass

from megasink.config import Scope

_FP32, _FP64 = 4, 8
_SERIES = 4  # extra means per head on an observed step, each as a sum and its weight


@dataclass(frozen=True)
class AllReduces:
    """All-reduces of one kind that a rank joins in one step.

    Attributes:
        what: the summed quantity.
        ranks: group size; groups of one rank send nothing and are left out.
        count: number of all-reduces.
        bytes_each: tensor size of one all-reduce.
        awaited: where the rank waits for the result: "next step" after the optimizer step, or
            "backward" in the backward pass of the layer whose forward pass started it.
    """

    what: str
    ranks: int
    count: int
    bytes_each: int
    awaited: str

    @property
    def bytes(self) -> int:
        """Total bytes of all of them."""
        return self.count * self.bytes_each

    def ring_bytes(self) -> float:
        """Bytes that a ring algorithm sends from each rank, in total."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes

    def ring_seconds(self, bandwidth: float, latency: float) -> float:
        """Return the total time of a ring algorithm, one all-reduce after another.

        Args:
            bandwidth: of a rank's link in one direction, bytes per second.
            latency: per message, seconds.
        """
        return self.ring_bytes() / bandwidth + self.count * 2 * (self.ranks - 1) * latency

    def tree_seconds(self, bandwidth: float, latency: float) -> float:
        """Return the same for a double binary tree, which NCCL uses for small tensors.

        Reduction to a root and broadcast from it take 2 log2(ranks) sequential messages.
        """
        depth = (self.ranks - 1).bit_length()
        return 2 * self.bytes / bandwidth + self.count * 2 * depth * latency


def balance_collectives(
    scope: Scope,
    *,
    layers: int,
    heads: int,
    microbatches: int,
    tensor: int = 1,
    pipeline: int = 1,
    data: int = 1,
    context: int = 1,
    observed: bool = False,
    layers_here: int | None = None,
) -> list[AllReduces]:
    """Return the collectives of the loss and its statistics on one rank in one step.

    The scope `global` needs one, for any number of layers, stages and microbatches. The other two
    add one per microbatch and layer of the stage, over the ranks that share their loss's tokens.

    Args:
        layers: L of the whole model.
        heads: H, query heads per layer.
        microbatches: per replica and step.
        tensor, pipeline, data, context: parallel sizes.
        observed: whether gates and gradients are observed in the step (docs/observing.md); other
            steps send less.

    Raises:
        ValueError: unknown scope, or layers not divisible by the stages.
    """
    if layers_here is None and layers % pipeline:
        raise ValueError(f"{layers} layers cannot be shared equally by {pipeline} stages")
    here = layers // pipeline if layers_here is None else layers_here
    ranks = {
        "global": 1,
        "data-parallel": tensor * context * data,
        "microbatch": tensor * context,
    }
    if scope not in ranks:
        raise ValueError(f"scope {scope!r} is unknown: choose {', '.join(ranks)}")
    columns = 2 * heads + 3 + (2 * heads * _SERIES if observed else 0)
    statistics = AllReduces(
        f"gates, tokens and loss of a step, [L, {columns}] float64",
        tensor * pipeline * data * context,
        1,
        _FP64 * layers * columns,
        "next step",
    )
    by_microbatch = AllReduces(
        "gates, tokens and targets of a layer in a microbatch, [H + 2] float32",
        ranks[scope],
        microbatches * here,
        _FP32 * (heads + 2),
        "backward",
    )
    return [found for found in (statistics, by_microbatch) if found.ranks > 1]
