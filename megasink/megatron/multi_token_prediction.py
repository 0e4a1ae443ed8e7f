"""Multi-token prediction: its layers have megasink's attention, but their heads are not counted.

They are not exported, and Megatron numbers them from 1 again: their gates would be added to those
of the model's first layers, or be lost on another pipeline stage.
"""

import dataclasses
import functools
import inspect
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer

from megasink.errors import UserError
from megasink.megatron.block_options import changed
from megasink.megatron.core_attention import CoreAttention

_TELLS = "is_mtp_layer"


def counted_once(layer: ModuleSpec) -> ModuleSpec:
    """Return the spec of a model's last layer, from which stacks also make prediction layers.

    Megatron-Core's ``get_gpt_mtp_block_spec`` does so for slime, Megatron-Bridge and others
    (models/gpt/gpt_layer_specs.py:767).
    """
    return dataclasses.replace(layer, module=_layer_class(layer.module))


@functools.cache
def _layer_class(kind: Any) -> type:
    """Return a subclass of `kind` whose prediction layers do not count heads."""
    if _TELLS not in inspect.signature(TransformerLayer.__init__).parameters:
        raise UserError(
            f"mtp_num_layers: this Megatron-Core's TransformerLayer has no {_TELLS}, so the heads "
            "of multi-token prediction would count as those of the first layers: use 0.19 or later"
        )

    def __init__(self: Any, config: Any, submodules: Any, *args: Any, **kwargs: Any) -> None:
        if kwargs.get(_TELLS):
            submodules = _uncounted(submodules)
        kind.__init__(self, config, submodules, *args, **kwargs)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names | {"__init__": __init__})


def _uncounted(layer: Any) -> Any:
    attention = changed(layer.self_attention, core_attention=_UncountedAttention)
    return dataclasses.replace(layer, self_attention=attention)


class _UncountedAttention(CoreAttention):
    """CoreAttention whose heads are not counted: a class, for latent attention builds no other."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs | {"counted": False})
