"""Load checkpoints of GPT models into HybridModels: upstream's translation of keys, completed.

Layers that differ have numbered keys, and multi-token prediction the name of a transformer layer.
"""

import re
from collections.abc import Collection
from typing import Any

from megatron.core.dist_checkpointing import gpt_checkpoint_interop as upstream
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_inplace
from megatron.core.dist_checkpointing.mapping import LocalNonpersistentObject, ShardedBase

from megasink.checkpoints.layer_keys import LAST_NORM, LAYERS, is_stacked
from megasink.errors import UserError
from megasink.megatron.hybrid_pattern import ATTENTION, DELTA_NET, EXPERTS, FFN, LATENT, layers_of

_LAYER = re.compile(r"\bdecoder\.layers\.(\d+)\.")
_PREDICTION = re.compile(r"\b(mtp\.layers\.\d+)\.mtp_model_layer\.layers\.\d+\.")
_OMITTED = "output_layer._extra_state"  # empty, and missing from GPT models
# Before a patch replaces it while a run trains.
_layer_maps = upstream.gpt_compatible_layer_maps
_retarget = upstream.retarget_sharded_state_dict_to_gpt_checkpoint


def layer_maps(pattern: str) -> upstream.GPTCompatLayerMaps:
    """Return upstream's maps of layers, for any pattern; empty ones with gated delta-net."""
    layers = layers_of(pattern)
    if DELTA_NET in layers:
        return upstream.GPTCompatLayerMaps({}, {}, frozenset(), 0)
    return _layer_maps(layers.replace(EXPERTS, FFN).replace(LATENT, ATTENTION))


def point_at_gpt_keys(
    state: dict[str, Any], maps: upstream.GPTCompatLayerMaps, stored: Collection[str]
) -> None:
    """Point the sharded state dict of a HybridModel at the keys of a GPT model, in place."""
    if not maps.num_gpt_layers:
        raise UserError(
            "the checkpoint is from a GPT model, which has no gated delta-net: drop G from "
            "--hybrid-layer-pattern, or load a checkpoint of a hybrid model"
        )
    numbers = {**maps.attention_to_gpt, **maps.mlp_to_gpt}

    def renamed(entry: Any) -> Any:
        if isinstance(entry, ShardedBase):
            entry.key = _PREDICTION.sub(r"\1.transformer_layer.", entry.key)
        return entry

    def numbered(entry: Any) -> Any:
        if not isinstance(entry, ShardedBase):
            return entry
        layer = _LAYER.search(entry.key)
        if entry.key.endswith(_OMITTED) or (layer and int(layer[1]) in maps.fresh_init):
            return LocalNonpersistentObject(entry.data)
        if layer:
            entry.key = entry.key.replace(layer[0], f"{LAYERS}{numbers[int(layer[1])]}.", 1)
        entry.key = entry.key.replace(*LAST_NORM)
        return entry

    dict_list_map_inplace(renamed, state)
    if is_stacked(stored):
        _retarget(state, maps)
    else:
        dict_list_map_inplace(numbered, state)
