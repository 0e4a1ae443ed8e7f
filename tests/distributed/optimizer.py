"""The optimizer of the tiny GPT."""

from typing import Any

from megatron.core.optimizer import (
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megasink.megatron.model import MegasinkModelConfig
from megasink.training.optimizer_groups import with_end_rates, with_sink_parameters


def optimizer_of(
    config: MegasinkModelConfig,
    models: list[Any],
    distributed: bool,
    embedding_lr: float | None = None,
    output_lr: float | None = None,
    **options: Any,
) -> tuple[Any, OptimizerParamScheduler]:
    """Adam with weight decay and clipping, and a constant learning rate."""
    transformer = config.transformer
    optimizer_config = OptimizerConfig(
        **{
            "optimizer": "adam",
            "lr": 1e-3,
            "weight_decay": 0.1,
            # Entries whose gradient is rounding noise would otherwise move by a whole step.
            "adam_eps": 1e-5,
            "clip_grad": 1.0,
            "bf16": transformer.bf16,
            "fp16": transformer.fp16,
            "params_dtype": transformer.params_dtype,
            "use_distributed_optimizer": distributed,
        }
        | options
    )
    overrides = with_sink_parameters(
        get_standard_config_overrides(optimizer_config),
        optimizer_config,
        transformer.sink_lr_mult,
        transformer.sink_weight_decay,
    )
    overrides = with_end_rates(overrides, optimizer_config, embedding_lr, output_lr)
    optimizer = get_megatron_optimizer(optimizer_config, models, config_overrides=overrides)
    constant = {"init_lr": 1e-3, "max_lr": 1e-3, "min_lr": 1e-3, "lr_decay_style": "constant"}
    decay = {"start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 1, "wd_incr_style": "constant"}
    scheduler = OptimizerParamScheduler(
        optimizer, lr_warmup_steps=0, lr_decay_steps=100, **constant, **decay
    )
    return optimizer, scheduler
