"""Apply the fixes that matter on every platform; imports Megatron."""

import torch
from megatron.core import optimizer
from megatron.core.optimizer import clip_grads
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import ChainedOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.moe.router import TopKRouter

from megasink.upstream import epoch_shuffle, fixes, muon_patch, needless_copies
from megasink.upstream.adam import GroupStepAdam


def fix_upstream() -> None:
    """Apply the patches of `fixes` once, in every process that uses Megatron."""
    if fixes.DATASET_HELPERS.is_active:
        return
    fixes.DATASET_HELPERS.apply(compile_helpers=fixes.check_dataset_helpers)
    if optimizer.USING_PYTORCH_OPTIMIZER:
        fixes.ADAM.apply(Adam=GroupStepAdam, USING_PYTORCH_OPTIMIZER=False)
        fixes.ADAM_CHECKPOINTS.apply(HAVE_APEX_OR_TE=True)
    load = fixes.with_own_settings(ChainedOptimizer.load_state_dict)
    fixes.CHAINED_STATES.apply(load_state_dict=load)
    load_shards = torch.no_grad()(DistributedOptimizer.load_parameter_state_from_dp_reshardable)
    fixes.SHARDED_STATES.apply(load_parameter_state_from_dp_reshardable=load_shards)
    fixes.SAVED_SCHEDULE.apply(
        load_state_dict=fixes.refusing_other_rates(OptimizerParamScheduler.load_state_dict)
    )
    if clip_grads.l2_norm_impl.__name__ == "local_multi_tensor_l2_norm":
        fixes.GRADIENT_NORM.apply(l2_norm_impl=fixes.norm_on_the_device)
    attach = fixes.of_all_ranks(TopKRouter.attach_and_log_load_balancing_loss)
    fixes.GLOBAL_LOSS.apply(attach_and_log_load_balancing_loss=attach)
    needless_copies.apply()
    epoch_shuffle.apply()
    muon_patch.apply()
