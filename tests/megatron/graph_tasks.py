"""Tasks for the workers: core attention captured once and replayed, as a CUDA graph does it."""

from typing import Any

import torch
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.core_attention import CoreAttention

TOKENS, BATCH, HEADS, HEAD_DIM = 32, 2, 4, 16
MICROBATCHES, COEFF = 4, 10.0


class Graph(TorchDispatchMode):
    """What a CUDA graph keeps: operations, and the memory that they read and write.

    Python runs while it is captured, and never again.
    """

    def __init__(self) -> None:
        super().__init__()
        self._operations: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("the host reads a value, which ends a capture")
        found = func(*args, **(kwargs or {}))
        if any(isinstance(leaf, Tensor) for leaf in tree_leaves(found)):
            self._operations.append((func, args, kwargs or {}, found))
        return found

    @torch.no_grad()
    def replay(self) -> None:
        """Do the operations again, on the same memory."""
        for func, args, kwargs, places in self._operations:
            found = func(*args, **kwargs)
            for place, value in zip(tree_leaves(places), tree_leaves(found), strict=True):
                if isinstance(place, Tensor):
                    place.copy_(value)


class Layer:
    """One layer that trains.

    Args:
        captured: Whether the third microbatch of the first step is captured, and every later one
            is a replay.
    """

    def __init__(self, variant: str, coeff: float = COEFF, captured: bool = False):
        self.config = MegasinkTransformerConfig(
            num_layers=1,
            hidden_size=HEADS * HEAD_DIM,
            num_attention_heads=HEADS,
            attention_dropout=0.0,
            hidden_dropout=0.0,
            use_cpu_initialization=True,
            attention_variant=variant,
            head_balance_coeff=coeff,
            transformer_impl="local",
        )
        self._core = CoreAttention(self.config, 1, AttnMaskType.causal, "self")
        self._graph: Graph | None = None
        self._captured = captured
        shape = (3, TOKENS, BATCH, HEADS, HEAD_DIM)
        self._inputs, self._gradient = torch.zeros(shape, requires_grad=True), torch.zeros(shape)

    def step(self, batches: list[Tensor]) -> dict[str, Any]:
        """Train on the microbatches of a step.

        Returns:
            gradients of queries, keys and values for each microbatch; importance of the step; how
            many of its microbatches were counted.
        """
        balance, gradients = self.config.statistics, []
        for index, batch in enumerate(batches):
            balance.set_loss_scale(torch.ones(1))
            with torch.no_grad():
                self._inputs.copy_(batch)
            if self._graph is not None:
                self._graph.replay()
            elif self._captured and index == len(batches) - 2:
                with Graph() as self._graph:
                    self._run()
            else:
                self._run()
            gradients.append(self._gradient.clone())
        counted = balance.heads._counts.get(0, (0, 0))[1]
        balance.reduce()
        statistics = balance.commit()
        return {
            "gradients": torch.stack(gradients),
            "importance": statistics.importance_LH[0],
            "counted": counted,
        }

    def _run(self) -> None:
        out = self._core(*self._inputs, None)
        (found,) = torch.autograd.grad(out.square().sum(), [self._inputs])
        self._gradient.copy_(found)


def steps(variant: str) -> list[dict[str, dict[str, Any]]]:
    """What `Layer.step` returns for three steps on the same microbatches."""
    torch.manual_seed(0)
    shape = (MICROBATCHES, 3, TOKENS, BATCH, HEADS, HEAD_DIM)
    data = [list(torch.randn(shape)) for _ in range(3)]
    layers = {
        "eager": Layer(variant),
        "no balance loss": Layer(variant, coeff=0.0),
        "replayed": Layer(variant, captured=True),
    }
    return [{name: layer.step(batches) for name, layer in layers.items()} for batches in data]
