"""Statistics of one model during training and evaluation."""

from typing import TYPE_CHECKING, Any, cast

from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.balance.step import LossStep, StepOptions

if TYPE_CHECKING:
    from megasink.megatron.sink_rate import SinkRate


class ModelStatistics(LossStep):
    """The statistics of one model: ``config.statistics`` of its config.

    They are on the config because Megatron identifies a model by it: every layer, virtual pipeline
    stage and recomputed block holds it, ``get_model_config`` returns it for a wrapped model, and it
    already holds the per-model callbacks (``grad_scale_func``, ``no_sync_func``,
    ``finalize_model_grads_func``). Models that train in the same process therefore need separate
    configs; :meth:`HeadSums.record` rejects two that share one.

    Copies of a config share the statistics, because layers may hold one
    (core/transformer/attention.py:378 makes a deep copy if there are fewer groups than
    tensor-parallel ranks). A new config, also from ``dataclasses.replace``, has new statistics; a
    pickled config has empty ones. They are never in a checkpoint: see ``MegatronLayerBalance``.

    Args:
        layers: Layers of the whole model.
        heads: Query heads of a layer.
        options, group: See :class:`LossStep`.

    Attributes:
        sinks: Sink rates of the evaluation that runs; None if it counts none.
    """

    def __init__(
        self, layers: int, heads: int, options: StepOptions, group: ProcessGroup | None = None
    ):
        super().__init__(layers, heads, options, group)
        self.sinks: SinkRate | None = None

    def count_sinks(self) -> None:
        """Count attention sinks until `sink_rates`: an evaluation runs."""
        from megasink.megatron.sink_rate import SinkRate

        self.sinks = SinkRate(self.heads.layers, self.heads.heads)

    def sink_rates(self) -> tuple[Tensor, Tensor]:
        """Return what was counted: see `SinkRate.finish`; every rank calls it."""
        assert self.sinks is not None
        counted, self.sinks = self.sinks, None
        return counted.finish()

    def set_loss_scale(self, scale: Tensor | float) -> None:
        """Implement Megatron's ``config.experimental_attention_variant_loss_scale_func``.

        Megatron calls it for every microbatch on every pipeline stage (schedules.py:376).
        """
        self.balance.set_loss_scale(scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelStatistics":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.heads.group is not None:
            raise TypeError("a HeadBalance with a process group cannot be pickled")
        # The options are the config, which may be what is pickled: they follow as state.
        state = {"_options": self._options}
        return _empty, (type(self), self.heads.layers, self.heads.heads), state


def _empty(kind: type[ModelStatistics], layers: int, heads: int) -> ModelStatistics:
    statistics = kind.__new__(kind)
    ModelStatistics.__init__(statistics, layers, heads, cast(StepOptions, None))
    return statistics
