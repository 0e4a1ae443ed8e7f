"""What the head-balance loss sends: a model of its collectives, for any layout.

Bytes are those of the tensor that a rank hands to a collective. On the wire a ring all-reduce over
n ranks sends 2 (n - 1) / n times as many from each, in 2 (n - 1) messages one after the other.
"""

from dataclasses import dataclass

from megasink.config import Scope

_FP32, _FP64 = 4, 8
_SERIES = 4  # further means per head on a step that is observed, each as a sum and its weight


@dataclass(frozen=True)
class AllReduces:
    """All-reduces of one kind that a rank takes part in, in one step.

    Attributes:
        what: what is summed.
        ranks: size of the group; a group of one rank sends nothing and is left out.
        count: how many.
        bytes_each: of the tensor of one of them.
        awaited: where the rank waits for the result: "next step" when the optimizer has stepped,
            "backward" in the backward pass of the layer whose forward pass started it.
    """

    what: str
    ranks: int
    count: int
    bytes_each: int
    awaited: str

    @property
    def bytes(self) -> int:
        """Of all of them together."""
        return self.count * self.bytes_each

    def ring_bytes(self) -> float:
        """What a ring algorithm sends from each rank, for all of them."""
        return 2 * (self.ranks - 1) / self.ranks * self.bytes

    def ring_seconds(self, bandwidth: float, latency: float) -> float:
        """How long they take one after the other by a ring.

        Args:
            bandwidth: of a rank's link in one direction, bytes per second.
            latency: of a message, seconds.
        """
        return self.ring_bytes() / bandwidth + self.count * 2 * (self.ranks - 1) * latency

    def tree_seconds(self, bandwidth: float, latency: float) -> float:
        """The same by a double binary tree, which is what NCCL takes for small tensors.

        Reduction to a root and broadcast from it: 2 log2(ranks) messages one after the other.
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
) -> list[AllReduces]:
    """The collectives of the loss and its statistics on a rank in one step.

    The scope `global` has one, whatever the layers, stages and microbatches. The other two add one
    per microbatch and layer of the stage, over the ranks that share the tokens of their loss.

    Args:
        layers: L, of the whole model; the stages have equally many.
        heads: H, query heads of a layer.
        microbatches: of a replica in one step.
        tensor, pipeline, data, context: parallel sizes.
        observed: a step whose gates and gradients are observed (docs/observing.md); the others of a
            run send less.

    Raises:
        ValueError: an unknown scope, or layers that stages cannot share equally.
    """
    if layers % pipeline:
        raise ValueError(f"{layers} layers cannot be shared equally by {pipeline} pipeline stages")
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
        microbatches * layers // pipeline,
        _FP32 * (heads + 2),
        "backward",
    )
    return [found for found in (statistics, by_microbatch) if found.ranks > 1]
