"""The blocks of a model in this process, a GPTModel or a whole HybridModel."""

from typing import Any, NamedTuple

from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.transformer.attention import Attention
from megatron.core.transformer.identity_op import IdentityOp

from megasink.megatron.hybrid_pattern import blocks_of


class ModelBlock(NamedTuple):
    """The layers with the mixer and the FFN of a block: the same one in a GPTModel.

    None for a part that a block of a HybridModel lacks.
    """

    mixer: Any
    ffn: Any

    @property
    def first(self) -> Any:
        """The layer that reads the state before the block."""
        return self.ffn if self.mixer is None else self.mixer

    @property
    def last(self) -> Any:
        """The layer that returns the state after the block."""
        return self.mixer if self.ffn is None else self.ffn

    @property
    def attention(self) -> Any:
        """The attention; None for another mixer."""
        attention = getattr(self.mixer, "self_attention", None)
        return attention if isinstance(attention, Attention) else None

    @property
    def mlp(self) -> Any:
        """The FFN or the mixture of experts; None if there is neither."""
        mlp = getattr(self.ffn, "mlp", None)
        return None if isinstance(mlp, IdentityOp) else mlp


def blocks_in(model: Any) -> list[ModelBlock]:
    """Return the blocks of a model that is not sharded by pipeline stages."""
    layers = model.decoder.layers
    if not isinstance(model, HybridModel):
        return [ModelBlock(layer, layer) for layer in layers]
    return [
        ModelBlock(*(None if layer is None else layers[layer] for layer in block))
        for block in blocks_of(model.hybrid_layer_pattern)
    ]
