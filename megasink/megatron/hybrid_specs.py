"""The spec of a hybrid stack: attention, FFN and experts are those of a GPT model."""

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_block import LayerNormImpl, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import MoETransformerLayer

from megasink.megatron.block_options import with_block_options
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.hybrid import MegasinkHybridStack
from megasink.megatron.specs import changed, with_our_modules


def hybrid_spec(config: MegasinkTransformerConfig) -> ModuleSpec:
    """Return the spec of a hybrid stack, for ``HybridModelConfig.hybrid_stack_spec``.

    Attention, FFN and experts are the halves of the layers of ``layer_spec``, so that every
    option of attention and the block means the same as in a GPT model. (Upstream's hybrid spec has
    neither --qk-layernorm nor modules other than TransformerEngine's.)
    """
    dense, norm = _layer_of(config, None)
    experts, _ = _layer_of(config, config.num_moe_experts)
    no_ffn = {"pre_mlp_layernorm": IdentityOp, "mlp": IdentityOp, "mlp_bda": IdentityFuncOp}
    no_attention = {
        "input_layernorm": IdentityOp,
        "self_attention": IdentityOp,
        "self_attn_bda": IdentityFuncOp,
    }
    recurrent = hybrid_stack_spec.submodules
    if config.transformer_impl == "local":
        recurrent = _local_recurrent(recurrent, norm)
    return ModuleSpec(
        module=MegasinkHybridStack,
        params={"norm": norm},
        submodules=HybridStackSubmodules(
            attention_layer=_half(dense, dense.module, no_ffn),
            mlp_layer=_half(dense, MLPLayer, no_attention),
            moe_layer=_half(experts, MoETransformerLayer, no_attention),
            mamba_layer=recurrent.mamba_layer,
            gdn_layer=recurrent.gdn_layer,
        ),
    )


def _layer_of(
    config: MegasinkTransformerConfig, experts: int | None
) -> tuple[ModuleSpec, LayerNormBuilder | None]:
    """Return a layer of a GPT model with megasink's modules, and the norm after the last layer."""
    options = {
        "num_experts": experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "qk_l2_norm": config.qk_l2_norm,
    }
    if config.transformer_impl == "local":
        layer = get_gpt_layer_local_spec(**options, normalization=config.normalization)
    else:
        dense = not (experts or config.num_moe_experts)
        layer = get_gpt_layer_with_transformer_engine_spec(
            **options,
            use_te_activation_func=config.use_te_activation_func,
            use_te_op_fuser=dense and config.use_transformer_engine_op_fuser,
            use_grouped_gemm_for_dense_mlp=config.use_grouped_gemm_for_dense_mlp,
        )
    block = TransformerBlockSubmodules(
        layer_specs=[with_our_modules(layer, config)],
        layer_norm=with_our_modules(LayerNormImpl, config),
    )
    block = with_block_options(block, config)
    return block.layer_specs[0], block.layer_norm


def _half(layer: ModuleSpec, module: type, without: dict[str, Any]) -> ModuleSpec:
    return ModuleSpec(module=module, submodules=dataclasses.replace(layer.submodules, **without))


def _local_recurrent(
    upstream: HybridStackSubmodules, norm: LayerNormBuilder
) -> HybridStackSubmodules:
    """Return the Mamba and delta-net layers of a spec with Megatron's own linear layers and norms.

    Their checkpoints have the names of TransformerEngine's, which fuses norm and projection.
    """
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    gdn, mamba = upstream.gdn_layer, upstream.mamba_layer
    return HybridStackSubmodules(
        gdn_layer=changed(
            gdn,
            input_layernorm=norm,
            self_attention=changed(gdn.submodules.self_attention, **linear, out_norm=norm),
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.in_proj.layer_norm_"},
        ),
        mamba_layer=changed(
            mamba,
            norm=norm,
            mixer=changed(mamba.submodules.mixer, **linear),
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )
