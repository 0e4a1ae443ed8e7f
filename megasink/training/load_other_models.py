"""Load checkpoints of other models: Megatron's own, converted ones, and GPT models in hybrids.

They lack head-balance state or TransformerEngine's FP8 state, which is initialized.
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

from megasink.checkpoints.gpt_as_hybrid import layer_maps, point_at_gpt_keys
from megasink.checkpoints.hf_entries import ADOPTED
from megasink.checkpoints.layer_keys import HEAD_STATE, pattern_in
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.files.json_file import read_object
from megasink.upstream.training_patches import FOREIGN_CHECKPOINTS, GPT_CHECKPOINTS


@contextlib.contextmanager
def accepting_megatrons_checkpoints() -> Iterator[None]:
    """Let ``dist_checkpointing.load`` accept the absence of state that only megasink writes."""
    # Upstream's non-strict load would accept a missing weight too.
    original = dist_checkpointing.load
    maps: list[Any] = []

    def load(sharded_state_dict: dict[str, Any], checkpoint_dir: str, *args: Any, **kw: Any) -> Any:
        if maps:
            known = read_metadata(Path(checkpoint_dir)).state_dict_metadata
            if pattern_in(known) is None:  # upstream looks at the arguments alone
                point_at_gpt_keys(sharded_state_dict, maps[0], known)
            maps.clear()
        wanted = _without_missing_state(sharded_state_dict, checkpoint_dir)
        return original(wanted, checkpoint_dir, *args, **kw)

    def retarget(_: dict[str, Any], layer_maps: Any) -> None:
        maps[:] = [layer_maps]  # for the whole state at once, once the keys are known

    with (
        FOREIGN_CHECKPOINTS.replacing(load=load),
        GPT_CHECKPOINTS.replacing(
            gpt_compatible_layer_maps=layer_maps,
            retarget_sharded_state_dict_to_gpt_checkpoint=retarget,
        ),
    ):
        yield


def _without_missing_state(
    sharded_state_dict: dict[str, Any], checkpoint_dir: str
) -> dict[str, Any]:
    def is_ours(value: Any) -> bool:
        return isinstance(value, mapping.ShardedBase) and HEAD_STATE in f".{value.key}"

    _, others = extract_matching_values(sharded_state_dict, is_ours)
    # A megasink run has all of it; skip the index, which every resume would read again.
    config = Path(checkpoint_dir).resolve().parent.parent / "config.json"
    theirs = {"converted_from", ADOPTED}
    if config.is_file() and not theirs & read_object(config).keys():
        return sharded_state_dict
    known = read_metadata(Path(checkpoint_dir)).state_dict_metadata
    if not any(HEAD_STATE in f".{key}" for key in known):
        sharded_state_dict = dict(others)

    def own_where_missing(value: Any) -> Any:
        # TransformerEngine's FP8 state: the model keeps its own.
        is_state = isinstance(value, mapping.ShardedObject) and value.key.endswith("_extra_state")
        if not is_state or value.unique_key in known:
            return value
        return mapping.LocalNonpersistentObject(value.data)

    dict_list_map_inplace(own_where_missing, sharded_state_dict)
    return sharded_state_dict
