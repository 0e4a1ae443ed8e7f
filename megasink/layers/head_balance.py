"""The head-balance loss in a training loop of Megatron, by the hooks that Megatron has.

``HeadBalance(config)`` is all that a loop needs, if it leaves three things in place:

- ``config.experimental_attention_variant_loss_scale_func``, which Megatron's schedules call for
  every microbatch (megatron/core/pipeline_parallel/schedules.py:376);
- ``config.finalize_model_grads_func``, which they call after the last backward pass
  (schedules.py:839): it starts the all-reduce, then calls what was there before;
- an optimizer of torch.optim at the bottom, as Megatron's are: its step commits the step.

What a loop does not do this way it does by the calls of :class:`LossStep`.
"""

import weakref
from typing import Any

from megatron.core.distributed import finalize_model_grads
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine

from megasink.balance.step import follow_optimizers
from megasink.errors import UserError
from megasink.layers.model_options import give_options, has_options
from megasink.layers.statistics import ModelStatistics

# Of a step that was not run yet, and of the first run of one.
_FIRST_RUN = (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)


class HeadBalance(ModelStatistics):
    """Gives a config the options of megasink, and adds the head-balance loss to its model.

    It is ``config.statistics``, where the layers of :func:`megasink.megatron.layer_spec` find it.

    Args:
        config: TransformerConfig of the model, before the model is built. One model a config.
        options: Options of megasink by their names (docs/options.md), such as
            ``attention_variant="sink"``, ``head_balance_coeff=1e-4``. What is not given has its
            default. Not for a MegasinkTransformerConfig, whose fields they are.

    Attributes:
        last: Statistics of the last step (:class:`HeadStatistics`), on the device.

    Raises:
        UserError: The config has a HeadBalance already, or an option is unknown or impossible.
    """

    def __init__(self, config: Any, **options: Any):
        if isinstance(vars(config).get("statistics"), HeadBalance):
            raise UserError(
                "HeadBalance is attached to this config already: config.statistics is the one to "
                "use, and a second model needs a config of its own"
            )
        if options or not has_options(config):
            give_options(config, options)
        super().__init__(config.num_layers, config.num_attention_heads, config)
        self._config = config
        self._finalize_before = _own(config.finalize_model_grads_func) or finalize_model_grads
        config.statistics = self
        if config.head_balance_coeff:
            config.experimental_attention_variant_loss_scale_func = self.set_loss_scale
        config.finalize_model_grads_func = self.finalize_model_grads
        # A process may build and drop many models: the hook of one must not keep it.
        this = weakref.ref(self)
        weakref.finalize(self, follow_optimizers(lambda: _stepped(this())))

    def finalize_model_grads(self, model: list[Any], *args: Any, **kwargs: Any) -> None:
        """Implement Megatron's ``config.finalize_model_grads_func``, with the same arguments.

        The all-reduce of the gate sums starts first, so it overlaps with the gradient reduction and
        the optimizer step.
        """
        self.reduce()
        self._finalize_before(model, *args, **kwargs)

    def runs_again(self) -> bool:
        """Whether Megatron's rerun machine repeats the step, here or after a checkpoint."""
        return get_rerun_state_machine().state not in _FIRST_RUN

    def may_skip(self) -> bool:
        """fp16's loss scale skips steps whose gradients overflow."""
        return bool(self._config.fp16)

    def __reduce__(self) -> tuple[Any, ...]:
        make, args, state = super().__reduce__()
        kept = {"_finalize_before": self._finalize_before, "_config": self._config}
        return make, args, state | kept


def _own(finalize: Any) -> Any:
    """Return a host's function; None for that of the HeadBalance of the config copied from."""
    return None if isinstance(getattr(finalize, "__self__", None), HeadBalance) else finalize


def _stepped(balance: HeadBalance | None) -> None:
    if balance is not None:
        balance.optimizer_stepped()
