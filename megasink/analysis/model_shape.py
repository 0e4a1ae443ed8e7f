"""Read the size of a model from its config.json, before any slow import."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megasink.checkpoints.find import find_checkpoint, is_run
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.files.json_file import read_object
from megasink.megatron.hybrid_pattern import blocks_of, with_heads

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_HEADS = ("num_attention_heads", "n_head")
_POSITIONS = ("max_position_embeddings", "n_positions")


class ModelShape(NamedTuple):
    """The sizes in a config.json; None for missing ones."""

    heads: list[int] | None  # most query heads in each layer
    positions: int | None  # most tokens of a sequence


def shape_of(folder: Path) -> ModelShape:
    """Return the shape of a Hugging Face model, or of the newest checkpoint of a run."""
    if is_run(folder):
        config: Mapping[str, Any] = read_arguments(find_checkpoint(folder).config)
        if pattern := config.get("hybrid_layer_pattern"):
            own, heads = with_heads(pattern), config["num_attention_heads"]
            by_block = [heads if block in own else 0 for block in range(len(blocks_of(pattern)))]
            return ModelShape(by_block, _number(config, _POSITIONS))
    else:
        config = read_object(folder / "config.json")
        text = config.get("text_config")
        config = text if isinstance(text, dict) else config
    layers, heads = _number(config, _LAYERS), _number(config, _HEADS)
    known = [heads] * layers if heads and layers and layers < 10_000 else None
    return ModelShape(known, _number(config, _POSITIONS))


def _number(config: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((n for name in names if type(n := config.get(name)) is int and n > 0), None)
