"""Destroy Megatron's parallel state, including the threads of its process groups."""

from collections.abc import Collection

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding
from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper


def destroy_groups(kept: Collection[dist.ProcessGroup] = ()) -> None:
    """Destroy Megatron's parallel state and every process group except those in `kept`.

    Upstream only forgets about 20 of them, whose threads poll while a model or torch holds them.
    """
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):  # _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
            setattr(parallel_state, name, None)
    RotaryEmbedding.forward.cache_clear()  # holds modules, and their groups
    YarnRotaryEmbedding.forward.cache_clear()
    MTPLossLoggingHelper.tracker.clear()
    get_moe_metrics_tracker().metrics.clear()
    if not kept and dist.is_initialized():
        dist.destroy_process_group()
    for group in set(dist.distributed_c10d._world.pg_map).difference(kept):
        dist.destroy_process_group(group)
