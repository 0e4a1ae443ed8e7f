"""The head-balance loss in a training loop of Megatron, by the hooks that Megatron has.

``HeadBalance(config)`` is all that a loop needs, if it uses three things that Megatron has:

- ``config.experimental_attention_variant_loss_scale_func``, which Megatron's schedules call for
  every microbatch (megatron/core/pipeline_parallel/schedules.py:376);
- ``config.finalize_model_grads_func``, which they call after the last backward pass
  (schedules.py:839). Loops set it after the model is built (Megatron-Bridge's, slime's), so it is
  a property here: whatever they set is called behind the start of the all-reduce. None stays None,
  since a loop that leaves it so reduces its gradients itself;
- an optimizer of torch.optim at the bottom, as Megatron's are: its step commits the step. Once one
  has stepped, a step that the loop skips (fp16 overflows, slime drops a bad gradient) is committed
  by what comes next, a forward pass or a checkpoint.

What a loop does not do this way it does by the calls of :class:`LossStep`.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_model_config
from torch.distributed import ProcessGroup
from torch.optim.optimizer import register_optimizer_step_post_hook

from megasink.errors import UserError
from megasink.megatron.model_options import give_options, has_options
from megasink.megatron.statistics import ModelStatistics

# Of a step that was not run yet, and of the first run of one.
_FIRST_RUN = (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)


class _Finalize:
    """The function that the host has set as ``config.finalize_model_grads_func``.

    The all-reduce of the gate sums starts first, so it overlaps with the gradient reduction and
    the optimizer step. No dataclass: ``dataclasses.asdict`` of a config would make it a dict.
    """

    def __init__(self, balance: "HeadBalance", host: Callable[..., None]):
        self.balance, self.host = balance, host

    def __call__(self, model: list[Any], *args: Any, **kwargs: Any) -> None:
        # Another model may have it, by a config that was made of the fields of this one.
        if vars(get_model_config(model[0])).get("statistics") is self.balance:
            self.balance.check_layers(model)
            self.balance.reduce()
            # A stage whose parameters are all frozen has no optimizer that could step.
            trained = (p.requires_grad for chunk in model for p in chunk.parameters())
            self.balance.may_skip |= not any(trained)
        self.host(model, *args, **kwargs)


class Finalizing:
    """A config whose ``finalize_model_grads_func`` also starts the reduction of its HeadBalance."""

    @property
    def finalize_model_grads_func(self) -> Callable[..., None] | None:
        """The host's function, called after the start of the reduction."""
        host, balance = vars(self).get(_FINALIZE), vars(self).get("statistics")
        return host if host is None or balance is None else _Finalize(balance, host)

    @finalize_model_grads_func.setter
    def finalize_model_grads_func(self, host: Callable[..., None] | None) -> None:
        # dataclasses.replace hands over the one of the config that it copies.
        vars(self)[_FINALIZE] = host.host if isinstance(host, _Finalize) else host


_FINALIZE = "finalize_model_grads_func"
_OTHER_SPEC = (
    "a HeadBalance is attached to the config, and no layer of the model is of layer_spec(config), "
    "so its loss would be 0: GPTModel(config, layer_spec(config), ...), after HeadBalance(config)"
)


@functools.cache
def _finalizing(kind: type) -> type:
    """Return a subclass of `kind` with that property."""

    def reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
        return _empty_config, (kind,), dict(vars(self))

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (Finalizing, kind), names | {"__reduce_ex__": reduce})


def _empty_config(kind: type) -> Any:
    return object.__new__(_finalizing(kind))


class HeadBalance(ModelStatistics):
    """Gives a config the options of megasink, and adds the head-balance loss to its model.

    It is ``config.statistics``, where the layers of :func:`megasink.megatron.layer_spec` find it.

    Args:
        config: TransformerConfig of the model, before the model is built. One model a config.
        group: All ranks of the model, where they are not all of the default group. Build the model
            with a ``pg_collection`` of these ranks then.
        options: Options of megasink by their names (docs/options.md), such as
            ``attention_variant="sink"``, ``head_balance_coeff=1e-4``. What is not given has its
            default. Not for a MegasinkTransformerConfig, whose fields they are.

    Attributes:
        last: Statistics of the last step (:class:`HeadStatistics`), on the device.

    Raises:
        UserError: The config has a HeadBalance already, or an option is unknown or impossible.
    """

    def __init__(self, config: Any, *, group: ProcessGroup | None = None, **options: Any):
        if isinstance(vars(config).get("statistics"), HeadBalance):
            raise UserError(
                "HeadBalance is already attached to this config: use config.statistics, or give "
                "a second model its own config"
            )
        if options or not has_options(config):
            give_options(config, options)
        super().__init__(config.num_layers, config.num_attention_heads, config, group)
        if not isinstance(config, Finalizing):
            kind: Any = type(config)
            config.__class__ = _finalizing(kind)
        config.statistics = self
        if config.head_balance_coeff:
            config.experimental_attention_variant_loss_scale_func = self.set_loss_scale
        self._follow()

    def _follow(self) -> None:
        # A process may build and drop many models: the hook of one must not keep it.
        this = weakref.ref(self)

        # After a step of any of torch's optimizers, which Megatron's (FusedAdam, Muon) wrap.
        def stepped(*_: object) -> None:
            if (balance := this()) is not None:
                balance.optimizer_stepped()

        weakref.finalize(self, register_optimizer_step_post_hook(stepped).remove)

    def check_layers(self, model: list[Any]) -> None:
        """Raise RuntimeError where this stage has layers of another spec than ours."""
        if self.has_layers:
            return
        modules = (module for chunk in model for module in chunk.modules())
        blocks = (module for module in modules if isinstance(module, TransformerBlock))
        if any(len(b.layers) and vars(b.config).get("statistics") is self for b in blocks):
            raise RuntimeError(_OTHER_SPEC)

    def reduce(self) -> None:
        """Start the all-reduce of the step, as :meth:`LossStep.reduce`."""
        config: Any = self._options
        staged = config.pipeline_model_parallel_size > 1  # some stages have no layers
        if not (self.has_layers or staged or getattr(config, "is_hybrid_model", False)):
            raise RuntimeError(_OTHER_SPEC)
        super().reduce()

    def runs_again(self) -> bool:
        """Whether Megatron's rerun machine repeats the step, here or after a checkpoint."""
        return get_rerun_state_machine().state not in _FIRST_RUN

    def scales_loss(self) -> bool:
        """Return whether the loss is scaled and overflowing steps are skipped, as under fp16."""
        config: Any = self._options
        return bool(config.fp16)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._follow()
