"""MLP activations and normed states of a Megatron model; fused norms are recomputed.

Shapes: S = T sequence, B batch, F intermediate size, E hidden size.
"""

from typing import Any

from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megasink.analysis.capture.sites import BLOCKS, PRODUCT, UP, Site, Sites, fused_norm, tensor_of
from megasink.megatron.blocks import blocks_in


def megatron_sites(model: LanguageModule) -> Sites:
    """Return the sites in the first blocks."""
    sites = Sites(context=model.config.prefix_lm_tokens)
    blocks = blocks_in(model)
    _add_mlp(sites, blocks[0].mlp, model.config)
    for index, block in enumerate(blocks[:BLOCKS]):
        for half, layer, norm_name, linear in (
            (2 * index, block.mixer, "input_layernorm", ("self_attention", "linear_qkv")),
            (2 * index + 1, block.ffn, "pre_mlp_layernorm", ("mlp", "linear_fc1")),
        ):
            norm = getattr(layer, norm_name, None)
            reader = getattr(getattr(layer, linear[0], None), linear[1], None)
            if not isinstance(norm, IdentityOp | None):
                sites.available.append(Site(str(half), norm, lambda _, out: batch_first(out)))
            elif getattr(reader, "layer_norm_weight", None) is not None:
                assert reader is not None
                sites.available.append(Site(str(half), reader, _normed_by(reader)))
            else:
                sites.lacks_norm(half)
    return sites


def _add_mlp(sites: Sites, mlp: Any, config: Any) -> None:
    down, up = getattr(mlp, "linear_fc2", None), getattr(mlp, "linear_fc1", None)
    if down is None or up is None:
        reason = "block 0 has experts, which have no common activation"
        if mlp is None:
            reason = "block 0 has no FFN"
        sites.missing[PRODUCT] = sites.missing[UP] = reason
        return
    sites.available.append(Site(PRODUCT, down, lambda product, _: batch_first(product)))

    def read_up(_: Tensor, output: tuple[Tensor, Tensor | None]) -> Tensor:
        linear_SBF = with_bias(output)
        if config.gated_linear_unit:  # rows are [gate; up]
            linear_SBF = linear_SBF.chunk(2, -1)[1]
        return batch_first(linear_SBF)

    sites.available.append(Site(UP, up, read_up))


def _normed_by(linear: Any) -> Any:
    """Recompute the normed state, which TransformerEngine's LayerNormLinear does not expose."""
    return lambda state_SBE, _: batch_first(fused_norm(linear, state_SBE))


def batch_first(output: Any) -> Tensor:
    """Return the output of a Megatron module, [S, B, ...], as [B, S, ...]."""
    return tensor_of(output).transpose(0, 1)


def with_bias(output: tuple[Tensor, Tensor | None]) -> Tensor:
    """Return the output of a Megatron linear, which leaves its bias to be added."""
    return output[0] if output[1] is None else output[0] + output[1]
