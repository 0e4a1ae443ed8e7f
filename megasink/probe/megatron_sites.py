"""MLP activations and normed states of a Megatron model; fused norms are recomputed.

Shapes: S = T sequence, B batch, F intermediate size, E hidden size.
"""

from typing import Any

from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megasink.probe.geometry import BLOCKS, PRODUCT, UP, Site, Sites, fused_norm


def megatron_sites(model: GPTModel) -> Sites:
    """Return the sites in the first blocks."""
    sites = Sites(context=model.config.prefix_lm_tokens)
    layers: Any = model.decoder.layers
    _add_mlp(sites, layers[0].mlp, model.config)
    for index, layer in enumerate(layers[:BLOCKS]):
        readers = (layer.self_attention.linear_qkv, getattr(layer.mlp, "linear_fc1", None))
        norms = (layer.input_layernorm, layer.pre_mlp_layernorm)
        for half, norm, reader in zip((2 * index, 2 * index + 1), norms, readers, strict=True):
            if not isinstance(norm, IdentityOp):
                sites.found.append(Site(str(half), norm, lambda _, out: _batch_first(out)))
            elif getattr(reader, "layer_norm_weight", None) is not None:
                assert reader is not None
                sites.found.append(Site(str(half), reader, _normed_by(reader)))
            else:
                reason = f"block {index} has no norm before what reads this state"
                sites.missing[f"normed state {half / 2:g}"] = reason
    return sites


def _add_mlp(sites: Sites, mlp: Any, config: Any) -> None:
    down, up = getattr(mlp, "linear_fc2", None), getattr(mlp, "linear_fc1", None)
    if down is None or up is None:
        reason = "block 0 has experts, which have no common activation"
        sites.missing[PRODUCT] = sites.missing[UP] = reason
        return
    sites.found.append(Site(PRODUCT, down, lambda product, _: product.transpose(0, 1)))

    def read_up(_: Tensor, output: tuple[Tensor, Tensor | None]) -> Tensor:
        linear_SBF, bias_F = output
        if bias_F is not None:
            linear_SBF = linear_SBF + bias_F
        if config.gated_linear_unit:  # rows are [gate; up]
            linear_SBF = linear_SBF.chunk(2, -1)[1]
        return linear_SBF.transpose(0, 1)

    sites.found.append(Site(UP, up, read_up))


def _normed_by(linear: Any) -> Any:
    """Recompute the normed state, which TransformerEngine's LayerNormLinear does not expose."""

    def read(state_SBE: Tensor, _: Any) -> Tensor:
        return fused_norm(linear, state_SBE).transpose(0, 1)

    return read


def _batch_first(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor.transpose(0, 1)
