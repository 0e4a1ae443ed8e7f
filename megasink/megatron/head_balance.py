"""The head-balance loss of a Megatron model: one object, with explicit calls or installed hooks.

A loop calls ``begin``, ``reduce`` and ``commit`` (:class:`megasink.balance.step.LossStep`), or
``install()`` once, which uses what Megatron's schedules call on the config of their model:

- ``experimental_attention_variant_loss_scale_func``, for every microbatch on every stage
  (megatron/core/pipeline_parallel/schedules.py:376);
- ``finalize_model_grads_func``, after the last backward pass (schedules.py:839). Some loops set it
  late, so every step wraps the current function. None stays None.
"""

import types
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.rerun_state_machine import RerunState, get_rerun_state_machine
from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_model_config
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.balance.step import LossStep, Phase
from megasink.errors import UserError
from megasink.megatron.model_options import give_options, has_options, refuse_late

# Of a step that has not run, and of the first run of one.
_FIRST_RUN = (RerunState.NOT_RUNNING_YET, RerunState.INITIAL_RUN)


class _Hook:
    """A function of the host, after one of the loss. Not a dataclass: `asdict` would open it."""

    def __init__(self, balance: "HeadBalance", host: Any, before: Callable[..., None]):
        self.balance, self.host, self.before = balance, host, before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.before(*args)
        return None if self.host is None else self.host(*args, **kwargs)

    def to_cfg_dict(self) -> Any:
        """Return the host's function for a saved config (training/config/container.py:170)."""
        return self.host


class HeadBalance(LossStep):
    """Adds the options of megasink to a config, and the head-balance loss to its model.

    It is ``config.statistics``: Megatron identifies a model by its config. Copies of the config
    share it; a config by ``dataclasses.replace`` has none; that of a pickled config is empty.

    Args:
        config: TransformerConfig of the model, before the model is built. One model per config.
        group: All ranks of the model, if not the default group; its ``pg_collection`` has these.
        options: Options of megasink by their names (docs/options.md), such as
            ``attention_variant="sink"``. A MegasinkTransformerConfig has them as fields instead.

    Raises:
        UserError: The config has a HeadBalance already, or an option is unknown or impossible.
    """

    _foreign = _checked = False  # whether Megatron's class has the options; whether layers are ours
    _of_layers: tuple[Any, ...] = ()

    def __init__(self, config: Any, *, group: ProcessGroup | None = None, **options: Any):
        if isinstance(vars(config).get("statistics"), HeadBalance):
            raise UserError(
                "HeadBalance is already attached to this config: use config.statistics, or give "
                "a second model its own config"
            )
        self._foreign = bool(options) or not has_options(config)
        if self._foreign:
            give_options(config, options)
        super().__init__(config.num_layers, config.num_attention_heads, config, group)
        config.statistics = self
        self.may_pad = self._foreign
        if hasattr(config, _SCALE):
            self._hook(_SCALE, self._watch)

    def add(self, config: Any, **options: Any) -> None:
        """Give the config of some layers its own options; their heads count in this loss."""
        main = self._options
        loss = {name: getattr(main, name) for name in ("head_balance_coeff", "head_balance_scope")}
        for name, default in (("softmax_type", "vanilla"), ("attention_output_gate", False)):
            if getattr(config, name) == getattr(main, name):  # that of `main`, by a copy
                setattr(config, name, default)
        give_options(config, loss | options)
        config.statistics = self
        self._of_layers = (*self._of_layers, config)

    def follow(self, config: Any) -> None:
        """Accept a copy of the config as the model's: a spec is made for it."""
        if not any(config is known for known in (self._options, *self._of_layers)):
            self._options = config
            if self.installed:
                self.install()

    def install(self, optimizer: Any = None) -> "HeadBalance":
        """Have Megatron's schedules, and one optimizer, end the steps; return this object.

        The schedules set the loss scale and call `reduce`. The first gates after a step, a
        checkpoint and `last` commit it. In a loop of your own, the optimizer does both.

        Args:
            optimizer: Of this model: one of Megatron's, of torch.optim, or any with a method
                ``step``. Not needed with Megatron's schedules.
        """
        config, self.installed = self._options, True
        # Without this hook, the gates of every step call `_wrap`.
        used = config.head_balance_coeff or config.pipeline_model_parallel_size > 1
        self._hook(_SCALE, self._of_schedule if used else None)
        self._wrap()
        if optimizer is not None:
            self._attach_to(optimizer)
        return self

    def _hook(self, name: str, before: Callable[..., None] | None) -> None:
        """Call `before` in front of the host's function in the config; None: no more."""
        host = getattr(self._options, name, None)
        if isinstance(host, _Hook):  # of the config from which this one was made, too
            if (host.balance, host.before) == (self, before):
                return
            host = host.host
        setattr(self._options, name, host if before is None else _Hook(self, host, before))

    def _watch(self, _: Tensor) -> None:
        """Warn if a schedule runs a model of this config that has none of our layers."""
        if not self.expected:
            warnings.warn(_OTHER_SPEC, stacklevel=2)
            self._hook(_SCALE, None)

    def _of_schedule(self, scale: Tensor) -> None:
        self.factors.set_loss_scale(scale, by_schedule=True)
        self._wrap()

    def _wrap(self) -> None:
        """Start the reduction in front of the function that the host has set by now."""
        if self._options.finalize_model_grads_func is not None:
            self._hook(_FINALIZE, self._reduce_of)

    def _reduce_of(self, model: list[Any], *_: Any) -> None:
        # Another model may have the hook, by a config that was made of the fields of this one.
        if vars(get_model_config(model[0])).get("statistics") is self:
            self.check_layers(model)
            self.reduce()

    def _attach_to(self, optimizer: Any) -> None:
        # An optimizer may outlive its model.
        this = weakref.ref(self)

        def before(*_: object) -> None:
            if balance := this():
                if balance.phase is not Phase.REDUCED:
                    balance.reduce()
                balance._broken = True  # unless the step returns

        def after(*_: object) -> None:
            if balance := this():
                balance._broken = False
                balance.commit()

        if isinstance(optimizer, torch.optim.Optimizer):
            optimizer.register_step_pre_hook(before)
            optimizer.register_step_post_hook(after)
        else:
            step = optimizer.step

            def stepping(_: Any, *args: Any, **kwargs: Any) -> Any:
                before()
                result = step(*args, **kwargs)
                after()
                return result

            optimizer.step = types.MethodType(stepping, optimizer)
        self._drop_with(optimizer, "zero_grad")

    def _drop_with(self, holder: Any, name: str) -> None:
        """Discard a step that was not reduced where a method of the host drops its gradients."""
        this = weakref.ref(self)
        drop: Any = getattr(holder, name, None)

        def dropping(*args: Any, **kwargs: Any) -> Any:
            balance = this()
            if balance and balance.phase is Phase.RUNNING and balance.heads.ran_backward:
                balance.discard()
            return drop(*args, **kwargs)

        if drop is not None:
            setattr(holder, name, dropping)

    def begin(self, number: int, *, observe: bool = False, share: float = 1.0) -> None:
        """See :meth:`LossStep.begin`."""
        if self._foreign:
            refuse_late(self._options)
        super().begin(number, observe=observe, share=share)
        if self.installed:
            self._wrap()

    def reduce(self) -> None:
        """See :meth:`LossStep.reduce`."""
        # Stages of a pipeline may have no layers, and hybrid stacks no attention.
        no_attention = getattr(self._options, "is_hybrid_model", False) and self.expected
        if not (self.built or self._options.pipeline_model_parallel_size > 1 or no_attention):
            raise RuntimeError(_OTHER_SPEC)
        super().reduce()

    def check_layers(self, model: list[Any]) -> None:
        """Raise RuntimeError where this stage has attention of another spec than ours."""
        if self._checked:
            return
        self._checked = True
        for chunk in model:  # what DDP drops does not count: a step may be repeated
            self._drop_with(chunk, "zero_grad_buffer")
        # Layers of multi-token prediction never count.
        other = [
            name
            for chunk in model
            for name, module in chunk.named_modules()
            if isinstance(module, Attention)
            and not hasattr(getattr(module, "core_attention", None), "head_counter")
            and "mtp" not in name.split(".")
        ]
        if other:
            raise RuntimeError(f"{_OTHER_SPEC}; layers with another attention: {', '.join(other)}")

    def runs_again(self) -> bool:
        """Return whether Megatron's rerun machine repeats the step, here or after a checkpoint."""
        return get_rerun_state_machine().state not in _FIRST_RUN

    def __deepcopy__(self, memo: dict[int, Any]) -> "HeadBalance":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        if self.heads.group is not None:
            raise TypeError("a HeadBalance with a process group cannot be pickled")
        # The options are in the config, which may itself be pickled: they follow as state.
        state = {"_options": self._options, "installed": self.installed}
        return _empty, (self.heads.layers, self.heads.heads), state


_SCALE = "experimental_attention_variant_loss_scale_func"
_FINALIZE = "finalize_model_grads_func"
_OTHER_SPEC = (
    "a HeadBalance is attached to the config, but some layers are not from its spec, so their loss "
    "would be 0: call HeadBalance(config) first, then HybridModel(config, stack_spec(config), ...) "
    "or GPTModel(config, layer_spec(config), ...)"
)


def _empty(layers: int, heads: int) -> HeadBalance:
    balance = HeadBalance.__new__(HeadBalance)
    LossStep.__init__(balance, layers, heads, None)
    return balance
