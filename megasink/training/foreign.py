"""Load checkpoints that megasink did not train: Megatron's own, and converted ones.

Megatron's have no head-balance state, and converted ones no TransformerEngine FP8 state. Everything
else has the names and layout of our model (attention_output_gate and softmax_type=learnable
included), so ``--load`` takes them unchanged and the missing state is initialized.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import mapping
from megatron.core.dist_checkpointing.dict_utils import (
    dict_list_map_inplace,
    extract_matching_values,
)

from megasink.checkpoints.torch_metadata import read_metadata
from megasink.json_file import read_object
from megasink.upstream.training import FOREIGN_CHECKPOINTS

_STATE = ".head_counter."


@contextlib.contextmanager
def accepting_megatrons_checkpoints() -> Iterator[None]:
    """Let ``dist_checkpointing.load`` accept the absence of state that only megasink writes.

    Upstream's non-strict load would accept a missing weight too.
    """
    original = dist_checkpointing.load

    def load(sharded_state_dict: dict[str, Any], checkpoint_dir: str, *args: Any, **kw: Any) -> Any:
        wanted = _without_missing_state(sharded_state_dict, checkpoint_dir)
        return original(wanted, checkpoint_dir, *args, **kw)

    with FOREIGN_CHECKPOINTS.replacing(load=load):
        yield


def _without_missing_state(
    sharded_state_dict: dict[str, Any], checkpoint_dir: str
) -> dict[str, Any]:
    def is_ours(value: Any) -> bool:
        return isinstance(value, mapping.ShardedBase) and _STATE in f".{value.key}"

    ours, others = extract_matching_values(sharded_state_dict, is_ours)
    # A megasink run has all of it; skip the index, which every resume would read again.
    config = Path(checkpoint_dir).resolve().parent.parent / "config.json"
    if not ours or (config.is_file() and "converted_from" not in read_object(config)):
        return sharded_state_dict
    known = read_metadata(Path(checkpoint_dir)).state_dict_metadata
    if not any(_STATE in f".{key}" for key in known):
        sharded_state_dict = dict(others)

    def own_where_missing(value: Any) -> Any:
        # TransformerEngine's FP8 state: the model keeps its own.
        is_state = isinstance(value, mapping.ShardedObject) and value.key.endswith("_extra_state")
        if not is_state or value.unique_key in known:
            return value
        return mapping.LocalNonpersistentObject(value.data)

    dict_list_map_inplace(own_where_missing, sharded_state_dict)
    return sharded_state_dict
