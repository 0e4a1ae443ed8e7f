"""Learning rates and weight decay of sinks, embedding and output in Megatron's groups.

``get_megatron_optimizer_config`` is wrapped: the loop has no other hook for ``config_overrides``.
For Muon's distributed optimizer, buffers are laid out with each matrix whole on one replica, as
Megatron does for models without a builder (training/training.py:1635).
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer import OptimizerConfig, ParamKey
from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate
from megatron.core.optimizer_param_scheduler import ParamGroupOverride
from megatron.training import training
from megatron.training.models import dist_utils
from torch.nn import Parameter

from megasink.attention.variants import parameter_names
from megasink.upstream.muon_patch import is_table
from megasink.upstream.training_patches import MATRIX_SHARDS, OPTIMIZER_GROUPS

Overrides = dict[ParamKey, ParamGroupOverride]
# Vectors in get_standard_config_overrides (megatron/core/optimizer/__init__.py:118)
_EXEMPT = ParamGroupOverride(wd_mult=0.0)


def with_sink_parameters(
    overrides: Overrides,
    config: OptimizerConfig,
    lr_mult: float,
    weight_decay: float,
    *,
    decay_all: bool = False,
) -> Overrides:
    """Return the overrides with a separate group for the sink parameters."""
    # `lr_mult` applies to ``lr`` and ``min_lr``; `weight_decay` is absolute. With `decay_all`, the
    # vectors that Megatron exempts decay like matrices (P2.17).
    if decay_all:
        overrides = {k: v for k, v in overrides.items() if v != _EXEMPT}
    # Two values for wd_mult would conflict: the standard keys must not match sink parameters.
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


def with_end_rates(
    overrides: Overrides, config: OptimizerConfig, embedding: float | None, output: float | None
) -> Overrides:
    """Return the overrides with maximum rates for `embedding` and `output`, None for the common."""
    # They keep the ratio of ``lr`` and ``min_lr``; P0 has rates 50 times apart.
    rates = dict(overrides)
    lowest = (config.min_lr or 0.0) / config.lr if config.lr else 0.0
    for name, rate in (("embedding.word_embeddings", embedding), ("output_layer", output)):
        if rate is not None:
            key = ParamKey(with_name_predicate=_weight_of(name))
            rates[key] = ParamGroupOverride(max_lr=rate, min_lr=rate * lowest)
    return rates


def _weight_of(module: str) -> ParamWithNamePredicate:
    """Match the weight of a module of the model, wrapped or not."""

    def matches(_: Parameter, name: str) -> bool:
        return f".{name}".endswith(f".{module}.weight")

    return ParamWithNamePredicate(name=f"rate-of-{module}", fn=matches)


def _key(name: str, inner: ParamKey | None) -> ParamKey:
    """Match the sink parameters, or all other parameters that `inner` matches."""
    endings = tuple(f"core_attention.{name}" for name in parameter_names())

    def matches(parameter: Parameter, parameter_name: str) -> bool:
        if inner is None:
            return parameter_name.endswith(endings)
        return inner.matches(parameter, parameter_name) and not parameter_name.endswith(endings)

    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=name, fn=matches))


@contextlib.contextmanager
def grouping_sink_parameters() -> Iterator[None]:
    """Apply the flags about parameter groups in Megatron's loop."""
    original = training.get_megatron_optimizer_config

    def get_megatron_optimizer_config(args: Namespace) -> tuple[OptimizerConfig, Any]:
        config, overrides = original(args)
        overrides = with_sink_parameters(
            overrides,
            config,
            args.sink_lr_mult,
            args.sink_weight_decay,
            decay_all=args.decay_all_parameters,
        )
        return config, with_end_rates(overrides, config, args.embedding_lr, args.output_lr)

    with OPTIMIZER_GROUPS.replacing(get_megatron_optimizer_config=get_megatron_optimizer_config):
        yield


@contextlib.contextmanager
def laying_out_matrices(args: Namespace) -> Iterator[None]:
    """Apply --use-distributed-optimizer under Muon, in Megatron's loop; `args` are validated."""
    if not args.use_layer_wise_distributed_optimizer:
        yield
        return
    wrap = dist_utils._ddp_wrap

    def ddp_wrap(
        models: list[Any], random_init: bool, ddp_config: Any, *rest: Any, **named: Any
    ) -> Any:
        ddp_config.use_distributed_optimizer = True  # gradients are scattered
        tag_params_for_buffer_routing(models)
        for model in models:
            for name, parameter in model.named_parameters():
                if is_table(parameter, name):  # of two axes, but AdamW's
                    parameter.is_managed_by_layer_wise_optimizer = False
        return wrap(models, random_init, ddp_config, *rest, **named)

    with MATRIX_SHARDS.replacing(
        _ddp_wrap=ddp_wrap, DistributedOptimizer=LayerWiseDistributedOptimizer
    ):
        yield
