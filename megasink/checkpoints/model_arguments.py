"""Arguments that define a run's model: they must match for a checkpoint to be loaded."""

import dataclasses
from typing import Any

from megasink.config import MODEL_OPTIONS
from megasink.megatron.hybrid_pattern import layers_of
from megasink.options.megatron_flags import having

SHAPE = (*having("shape"), "attention_variant", "attention_variant_layers", "gate_granularity")
"""Arguments that a converted model fixes. Its data and tokenizer may change."""

# These select how to compute and train, not the model.
_NOT_THE_MODEL = {"attention_kernel", "sink_lr_mult", "sink_weight_decay"}
_OPTIONS = tuple(
    entry.name
    for options in MODEL_OPTIONS
    for entry in dataclasses.fields(options)
    if entry.name not in _NOT_THE_MODEL
)

CONTEXT = having("context")
"""Arguments that fine-tuning may change, because the weights still fit (P1.37)."""

MODEL = tuple(dict.fromkeys((*SHAPE, *CONTEXT, *_OPTIONS, *having("model"))))
"""Every argument that defines the model."""


def same(name: str, before: Any, now: Any, *, finetune: bool = False) -> bool:
    """Return whether two values of a `MODEL` argument let a run load another's weights."""
    if name == "hybrid_layer_pattern" and before and now:
        before, now = layers_of(before), layers_of(now)  # stages belong to the layout
    if before == now:
        return True
    if not finetune:
        return False
    return name in CONTEXT or (
        name == "position_embedding_type" and {before, now} <= {"rope", "yarn"}
    )


def plain(value: Any) -> Any:
    """Convert an argument to its JSON form."""
    if isinstance(value, list | tuple):
        return [plain(v) for v in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "name", None) or str(value)
