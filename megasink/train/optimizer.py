"""Learning rate and weight decay of the sink parameters, in Megatron's parameter groups.

Megatron 0.19 has the seam, ``config_overrides`` of ``get_megatron_optimizer``, but its training
loop offers no hook to fill it: it asks ``get_megatron_optimizer_config`` for them
(megatron/training/training.py:2117), which says that users may add to what it returns. So that
function is wrapped, and not changed.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer import OptimizerConfig, ParamKey
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.training import training
from torch.nn import Parameter

from megasink.variants import parameter_names

Overrides = dict[ParamKey, ParamGroupOverride]


def with_sink_parameters(
    overrides: Overrides, config: OptimizerConfig, lr_mult: float, weight_decay: float
) -> Overrides:
    """The overrides, with the sink parameters in a group of their own.

    Without a multiplier and without weight decay that is the group of the other vectors.

    Args:
        overrides: Megatron's standard ones, by which vectors take no weight decay.
        config: with ``lr`` and ``min_lr``.
        lr_mult: factor on both.
        weight_decay: absolute, constant.
    """
    # A second value for wd_mult would be a conflict: the standard keys must not match ours.
    others: Overrides = {
        _key(f"{index}-but-sinks", key): value
        for index, (key, value) in enumerate(overrides.items())
    }
    ours = ParamGroupOverride(wd_mult=0.0)
    if weight_decay:
        ours = ParamGroupOverride(wd_mult=1.0, start_wd=weight_decay, end_wd=weight_decay)
    if lr_mult != 1.0:
        ours["max_lr"] = config.lr * lr_mult
        ours["min_lr"] = (config.min_lr or 0.0) * lr_mult
    return {**others, _key("sinks", None): ours}


def _key(name: str, inner: ParamKey | None) -> ParamKey:
    """The sink parameters, or what `inner` matches without them."""
    endings = tuple(f"core_attention.{name}" for name in parameter_names())

    def matches(parameter: Parameter, parameter_name: str) -> bool:
        if inner is None:
            return parameter_name.endswith(endings)
        return inner.matches(parameter, parameter_name) and not parameter_name.endswith(endings)

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=matches))


@contextlib.contextmanager
def grouping_sink_parameters() -> Iterator[None]:
    """Let Megatron's training loop build its optimizer with --sink-lr-mult and its sibling."""
    original = training.get_megatron_optimizer_config

    def get_megatron_optimizer_config(args: Namespace) -> tuple[OptimizerConfig, Any]:
        config, overrides = original(args)
        return config, with_sink_parameters(
            overrides, config, args.sink_lr_mult, args.sink_weight_decay
        )

    training.get_megatron_optimizer_config = get_megatron_optimizer_config
    try:
        yield
    finally:
        training.get_megatron_optimizer_config = original
