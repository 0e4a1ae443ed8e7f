"""Layer specs: Megatron's own specs with megasink's core attention."""

import dataclasses
import functools
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder, WrappedTorchNorm
from megatron.core.transformer.transformer_block import (
    LayerNormImpl,
    TransformerBlockSubmodules,
    get_num_layers_to_build,
)
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    get_transformer_layer_offset,
)
from megatron.training.models.gpt import GPTModelConfig, default_layer_spec

from megasink.gate_options import changes_self_attention, trailing_rows
from megasink.layers.block_options import with_block_options
from megasink.layers.core_attention import CoreAttention
from megasink.layers.gate_projection import with_gate_rows
from megasink.layers.gated_self_attention import GatedSelfAttention
from megasink.layers.hybrid import MegasinkHybridStack
from megasink.layers.norm import TorchNorm
from megasink.layers.transformer_config import MegasinkTransformerConfig
from megasink.lora.spec import with_adapters


def block_spec(config: GPTModelConfig, vp_stage: int | None = None) -> TransformerBlockSubmodules:
    """Return the block spec of this pipeline stage, for ``GPTModelConfig.transformer_layer_spec``.

    Megatron chooses the modules (TransformerEngine or local, by ``--transformer-impl``). Every
    self-attention then uses :class:`CoreAttention` (with an explicit gate also
    :class:`GatedSelfAttention` and a linear_qkv with gate rows), and every WrappedTorchNorm becomes
    a norm that supports sequence parallelism. This returns a block, not a layer, because the
    builder overwrites the core attention of a layer under ``--attention-backend local``
    (megatron/training/models/gpt.py:249).
    """
    spec = default_layer_spec(config, vp_stage)
    if isinstance(spec, TransformerBlockSubmodules):
        layers, norm = spec.layer_specs, spec.layer_norm
    else:
        count = get_num_layers_to_build(config.transformer, vp_stage=vp_stage)
        layers, norm = [spec] * count, LayerNormImpl
    first = get_transformer_layer_offset(config.transformer, vp_stage) + 1
    ours = TransformerBlockSubmodules(
        layer_specs=[
            _with_our_modules(layer, config.transformer.get_config_for_layer(number))
            for number, layer in enumerate(layers, first)
        ],
        layer_norm=_with_our_modules(norm, config.transformer),
    )
    return with_adapters(with_block_options(ours, config.transformer), config.transformer)


def prediction_spec(upstream: Any, config: MegasinkTransformerConfig) -> Any:
    """Return the spec of a multi-token prediction block with the layers of :func:`block_spec`.

    Their heads count in no statistic and no balance loss: they are no layers of the model that is
    exported, and their importance would weigh on that of the last layer.

    Args:
        upstream: MultiTokenPredictionBlockSubmodules of Megatron's own layers.
    """
    ours = _with_our_modules(upstream, config)

    def with_options(layer: ModuleSpec) -> ModuleSpec:
        alone = TransformerBlockSubmodules([layer.submodules.mtp_model_layer], LayerNormImpl)
        (inner,) = with_block_options(alone, config).layer_specs
        uncounted = functools.partial(CoreAttention, counted=False)
        attention = _changed(inner.submodules.self_attention, core_attention=uncounted)
        return _changed(layer, mtp_model_layer=_changed(inner, self_attention=attention))

    return dataclasses.replace(ours, layer_specs=[with_options(x) for x in ours.layer_specs])


def hybrid_spec(config: MegasinkTransformerConfig) -> ModuleSpec:
    """Return the spec of a hybrid stack, for ``HybridModelConfig.hybrid_stack_spec``.

    Attention, FFN and experts are the halves of the layers of :func:`block_spec`, so that every
    option of attention and the block means the same as in a GPT model. (Upstream's hybrid spec has
    neither --qk-layernorm nor modules other than TransformerEngine's.)
    """
    dense, norm = _whole_layer(config, None)
    experts, _ = _whole_layer(config, config.num_moe_experts)
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


def _whole_layer(
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
        layer = get_gpt_layer_with_transformer_engine_spec(
            **options, use_te_activation_func=config.use_te_activation_func
        )
    block = TransformerBlockSubmodules(
        layer_specs=[_with_our_modules(layer, config)],
        layer_norm=_with_our_modules(LayerNormImpl, config),
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
        gdn_layer=_changed(
            gdn,
            input_layernorm=norm,
            self_attention=_changed(gdn.submodules.self_attention, **linear, out_norm=norm),
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.in_proj.layer_norm_"},
        ),
        mamba_layer=_changed(
            mamba,
            norm=norm,
            mixer=_changed(mamba.submodules.mixer, **linear),
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )


def _changed(spec: ModuleSpec, **submodules: Any) -> ModuleSpec:
    return dataclasses.replace(spec, submodules=dataclasses.replace(spec.submodules, **submodules))


def _with_our_modules(node: Any, config: Any) -> Any:
    """Return a copy of a spec tree with megasink's modules substituted."""
    if node is WrappedTorchNorm:
        return TorchNorm
    if isinstance(node, list):
        return [_with_our_modules(entry, config) for entry in node]
    if isinstance(node, ModuleSpec):
        gates = node.module is SelfAttention and changes_self_attention(config)
        return dataclasses.replace(
            node,
            module=GatedSelfAttention if gates else node.module,
            submodules=_with_our_modules(node.submodules, config),
        )
    if dataclasses.is_dataclass(node) and not isinstance(node, type):
        changes = {
            f.name: _with_our_modules(getattr(node, f.name), config)
            for f in dataclasses.fields(node)
            if f.init
        }
        if isinstance(node, SelfAttentionSubmodules):
            changes["core_attention"] = CoreAttention
            if trailing_rows(config):
                changes["linear_qkv"] = with_gate_rows(node.linear_qkv)
        return dataclasses.replace(node, **changes)
    return node
