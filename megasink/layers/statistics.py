"""What one model records while it trains and is evaluated."""

from typing import Any

from torch import Tensor

from megasink.balance.attach import HeadBalanceScale
from megasink.balance.tracker import HeadTracker
from megasink.layers.sink_rate import SinkRate


class ModelStatistics:
    """The statistics of one model: ``config.statistics`` of its MegasinkTransformerConfig.

    The config carries them because it is Megatron's own identity of a model: every layer, virtual
    pipeline stage and recomputed block holds it, ``get_model_config`` finds it from a wrapped
    model, and what is called for one model hangs on it already (``grad_scale_func``,
    ``no_sync_func``, ``finalize_model_grads_func``). So models that train in one process need a
    config each; :meth:`HeadTracker.record` refuses two that share one.

    Copies of a config share them, for layers may hold one (core/transformer/attention.py:378 makes
    a deep copy where there are fewer groups than tensor-parallel ranks). A config made anew, also
    by ``dataclasses.replace``, has its own, and a pickled one empty ones. No dataclass field,
    module or buffer holds them, so no checkpoint does: training state is in ``HeadCounter``.

    Args:
        layers: of the whole model.
        heads: query heads of a layer.

    Attributes:
        heads: importance and all else that is known of a step.
        balance: what the gradient of the head-balance loss is multiplied by.
        sinks: sink rates of an evaluation.
    """

    def __init__(self, layers: int, heads: int):
        self.heads = HeadTracker(layers, heads)
        self.balance = HeadBalanceScale()
        self.sinks = SinkRate(layers, heads)

    def set_loss_scale(self, scale: Tensor) -> None:
        """Megatron's ``config.experimental_attention_variant_loss_scale_func``.

        It is called for every microbatch on every pipeline stage (schedules.py:376).
        """
        self.balance.set_loss_scale(scale)

    def __deepcopy__(self, memo: dict[int, Any]) -> "ModelStatistics":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return ModelStatistics, (self.heads.layers, self.heads.heads)
