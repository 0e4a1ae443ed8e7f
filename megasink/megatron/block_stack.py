"""A hybrid stack whose layers are numbered by block, as the layers of a GPT model are.

Everything that Megatron or megasink chooses by the number of a layer (its window, its rotary
angles, its attention variant, its row of statistics, its experts' losses, its precision) is then
the same for ``*-*-`` as for a GPT model of two layers. Checkpoints have upstream's names, with an
index for each layer of the pattern.
"""

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from megatron.core import tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_layer_specs
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    get_mtp_layer_spec,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from torch import Tensor

from megasink.attention.variants.variant_layers import layers_with_variant
from megasink.megatron.block_options import changed, with_block_options
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.hybrid_pattern import EXPERTS, block_of_layer, gpt_blocks, layers_of
from megasink.megatron.hybrid_specs import MegasinkHybridStack, spec_of_stack, stack_spec
from megasink.megatron.latent_config import with_checkpoint_names
from megasink.megatron.multi_token_prediction import counted_once
from megasink.megatron.spec_modules import with_our_modules


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """{layer: its block}, from 0, and attention in blocks with and without the variant."""

    numbers: Mapping[int, int]
    varied: Any
    plain: Any


def block_stack_spec(config: MegasinkTransformerConfig, pattern: str) -> ModuleSpec:
    """Return the spec of a pattern of ``config.num_layers`` blocks, for ``hybrid_stack_spec``."""
    spec = stack_spec(config)
    kind = "mla_layer" if config.multi_latent_attention else "attention_layer"
    varied = plain = getattr(spec.submodules, kind).submodules
    has_variant = layers_with_variant(config)
    if not all(has_variant):
        without = config.get_config_for_layer(has_variant.index(False) + 1)
        plain = getattr(spec_of_stack(without).submodules, kind).submodules
    blocks = _Blocks(block_of_layer(pattern), varied, plain)
    by_block = {
        name: dataclasses.replace(
            layer, module=_by_block(layer.module), params=layer.params | {"blocks": blocks}
        )
        for name, layer in vars(spec.submodules).items()
        if isinstance(layer, ModuleSpec)
    }
    if config.mtp_num_layers:
        by_block["mtp_block_spec"] = prediction_spec(config)
    pairs = 2 * config.num_layers == len(layers_of(pattern))
    return dataclasses.replace(
        spec,
        module=BlockStack,
        params=spec.params | {"layers_per_block": 2 if pairs else 1},
        submodules=dataclasses.replace(spec.submodules, **by_block),
    )


@functools.cache
def _by_block(kind: Any) -> type:
    """Return a subclass of a layer class that is built with the number and config of its block."""

    def __init__(
        self: Any, config: Any, submodules: Any, layer_number: int, *, blocks: _Blocks, **more: Any
    ) -> None:
        number = blocks.numbers[layer_number - 1] + 1
        of_block = config.get_config_for_layer(number)
        if of_block is not config and submodules is blocks.varied:
            submodules = blocks.plain
        kind.__init__(self, of_block, submodules, layer_number=number, **more)

    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), names | {"__init__": __init__})


class BlockStack(MegasinkHybridStack):
    """MegasinkHybridStack with the work of Megatron's TransformerBlock around its layers.

    `layers_per_block` layers of the pattern count as one of --recompute-num-layers.
    """

    config: Any

    def __init__(
        self, *args: Any, layers_per_block: int = 1, pp_layer_offset: int = 0, **kwargs: Any
    ):
        super().__init__(*args, pp_layer_offset=pp_layer_offset, **kwargs)
        self._first = pp_layer_offset
        if self.config.recompute_num_layers:
            self.config = copy.copy(self.config)
            self.config.recompute_num_layers *= layers_per_block
        for layer in self.layers:
            if isinstance(getattr(layer, "mlp", None), IdentityOp):
                layer.recompute_mlp = False

    def _check_count(self, config: Any, layers: int, is_last: bool) -> None:
        """Accept a number of blocks, which is checked with the arguments."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run the layers, with random numbers of this rank where the sequence is sharded."""
        # As TransformerBlock does: other ranks would otherwise drop the same channels.
        forked = tensor_parallel.get_cuda_rng_tracker().fork
        with forked() if self.config.sequence_parallel else contextlib.nullcontext():
            hidden: Tensor = super().forward(*args, **kwargs)
        # The schedule frees what a stage returns, but not what it was given.
        return hidden.clone() if hidden is self.input_tensor else hidden

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Return the state dict of upstream's HybridStack, which names layers by their numbers."""
        numbers = [layer.layer_number for layer in self.layers]
        for index, layer in enumerate(self.layers, self._first + 1):
            layer.layer_number = index
        try:
            return super().sharded_state_dict(*args, **kwargs)
        finally:
            for layer, number in zip(self.layers, numbers, strict=True):
                layer.layer_number = number


class PredictionLayer(MultiTokenPredictionLayer):
    """A layer of multi-token prediction with one layer of a GPT model, not with a pattern of them.

    Its inner layer then has the same names, numbers and losses as in a GPT model.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        kwargs |= {"mtp_layer_pattern": None, "hybrid_submodules": None}
        super().__init__(*args, **kwargs)


def prediction_spec(config: Any) -> MultiTokenPredictionBlockSubmodules:
    """Return the spec of a multi-token prediction block, whose layers are as the model's last."""
    engine = config.transformer_impl == "transformer_engine"
    last = get_gpt_decoder_layer_specs(
        config,
        use_transformer_engine=engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
    )[-1]
    if config.multi_latent_attention and not engine:
        experts = config.num_moe_experts
        blocks = gpt_blocks(config.num_layers, experts, config.moe_layer_freq)
        last = with_checkpoint_names(last, experts if EXPERTS in blocks[-1] else None)
    layer = with_our_modules(get_mtp_layer_spec(last, engine), config)
    alone = TransformerBlockSubmodules([layer.submodules.mtp_model_layer], LayerNormImpl)
    (inner,) = with_block_options(alone, config).layer_specs
    layer = changed(layer, mtp_model_layer=counted_once(inner))
    layer = dataclasses.replace(layer, module=PredictionLayer)
    return MultiTokenPredictionBlockSubmodules(layer_specs=[layer])
