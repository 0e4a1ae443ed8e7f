"""End Megatron's parallel state together with its process groups.

`parallel_state.destroy_model_parallel` forgets its groups, but torch's registry keeps them. Each
has three threads under gloo, which poll until the process ends: about 60 for one parallel state.
"""

from collections.abc import Collection

import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding


def process_groups() -> set[dist.ProcessGroup]:
    """Return the process groups of this process."""
    return set(dist.distributed_c10d._world.pg_map)


def destroy_groups(kept: Collection[dist.ProcessGroup] = ()) -> None:
    """Destroy Megatron's parallel state, and every process group except those in `kept`.

    A group's threads end with its last reference: drop the models first.
    """
    parallel_state.destroy_model_parallel()
    for name, value in list(vars(parallel_state).items()):
        if isinstance(value, dist.ProcessGroup):  # _INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP
            setattr(parallel_state, name, None)
    for rotary in (RotaryEmbedding, YarnRotaryEmbedding):
        rotary.forward.cache_clear()  # holds modules, and their groups
    if not kept and dist.is_initialized():
        dist.destroy_process_group()
    for group in process_groups().difference(kept):
        dist.destroy_process_group(group)
