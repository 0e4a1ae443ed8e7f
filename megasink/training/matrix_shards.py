"""Buffers laid out for Muon's distributed optimizer: each matrix whole on one replica.

Megatron 0.19 lays out the buffers of a model from a builder for Adam's shards, which cut matrices.
Its get_model (megatron/training/training.py:1635), for models without a builder, lays out those
of Muon. This does the same where the builder's model is wrapped.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from megatron.core.optimizer.layer_wise_optimizer import (
    LayerWiseDistributedOptimizer,
    tag_params_for_buffer_routing,
)
from megatron.training.models import dist_utils

from megasink.upstream.muon import is_table
from megasink.upstream.training import MATRIX_SHARDS


@contextlib.contextmanager
def laying_out_matrices(args: Namespace) -> Iterator[None]:
    """Apply --use-distributed-optimizer under Muon, in Megatron's loop.

    Megatron's validation moves the flag to ``use_layer_wise_distributed_optimizer``.
    """
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
                if is_table(parameter, name):  # they have two axes, but belong to AdamW
                    parameter.is_managed_by_layer_wise_optimizer = False
        return wrap(models, random_init, ddp_config, *rest, **named)

    with MATRIX_SHARDS.replacing(
        _ddp_wrap=ddp_wrap, DistributedOptimizer=LayerWiseDistributedOptimizer
    ):
        yield
