"""LoRA in Megatron's layer specs."""

import dataclasses
import functools
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megasink.lora.linear import with_adapter
from megasink.lora.targets import FC1, FC2, LINEARS, PROJ, QKV, targets_of
from megasink.megatron.config import MegasinkTransformerConfig


def with_adapters(
    block: TransformerBlockSubmodules, config: MegasinkTransformerConfig
) -> TransformerBlockSubmodules:
    """Return the block spec with LoRA on the layers that ``config.lora_targets`` names.

    Args:
        block: specs of Megatron's own (local) TransformerLayer, dense.
    """
    if not config.lora_rank:
        return block
    targets = set(targets_of(config, gated_unit=config.gated_linear_unit))
    linears = {linear for linear, names in LINEARS.items() if targets & set(names)}
    if "gates" in (config.lora_train or ()):
        linears.add(QKV)
    layers = [_adapted(layer, linears) for layer in block.layer_specs]
    return dataclasses.replace(block, layer_specs=layers)


def _adapted(layer: ModuleSpec, linears: set[str]) -> ModuleSpec:
    attention, mlp = layer.submodules.self_attention, layer.submodules.mlp
    of_attention = _changed(attention.submodules, linears & {QKV, PROJ})
    of_mlp = _changed(mlp.keywords["submodules"], linears & {FC1, FC2})
    submodules = dataclasses.replace(
        layer.submodules,
        self_attention=dataclasses.replace(attention, submodules=of_attention),
        mlp=functools.partial(mlp.func, **mlp.keywords | {"submodules": of_mlp}),
    )
    return dataclasses.replace(layer, submodules=submodules)


def _changed(submodules: Any, linears: set[str]) -> Any:
    fields = {linear: linear.rpartition(".")[2] for linear in linears}
    changes = {
        field: with_adapter(getattr(submodules, field), linear) for linear, field in fields.items()
    }
    return dataclasses.replace(submodules, **changes)
