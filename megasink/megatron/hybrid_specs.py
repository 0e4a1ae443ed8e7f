"""The spec of a hybrid stack: attention, FFN and experts are those of a GPT model."""

import dataclasses
from typing import Any

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import LayerNormBuilder
from megatron.core.transformer.transformer_block import LayerNormImpl
from megatron.core.transformer.transformer_layer import MoETransformerLayer

from megasink.errors import UserError
from megasink.megatron.spec_modules import our_block, with_options, with_our_modules


class MegasinkHybridStack(HybridStack):
    """HybridStack whose final norm comes from the spec, and whose layers count heads.

    Upstream's norm is TransformerEngine's, whatever the spec says
    (megatron/core/models/hybrid/hybrid_block.py:225).
    """

    def __init__(
        self,
        config: Any,
        submodules: HybridStackSubmodules | None = None,
        norm: LayerNormBuilder | None = None,
        **kwargs: Any,
    ):
        if submodules is None:
            spec = stack_spec(config)
            submodules, norm = spec.submodules, spec.params["norm"]
        first, layers = kwargs.get("pp_layer_offset", 0), kwargs["layer_type_list"]
        self._check_count(config, first + len(layers), kwargs.get("post_process", True))
        config.statistics.expected[first] = layers.count("*") + layers.count("+")
        if "G" in layers:
            from megasink.megatron.delta_net import with_states

            submodules = with_states(config, submodules)
        super().__init__(config, submodules, **kwargs | {"post_layer_norm": False})
        self.post_layer_norm = norm is not None
        if self.post_process and norm is not None:
            self.final_norm = norm(
                config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon
            )

    def _check_count(self, config: Any, layers: int, is_last: bool) -> None:
        """Raise UserError unless the config has as many layers as the pattern."""
        if layers > config.num_layers or (is_last and layers < config.num_layers):
            raise UserError(
                f"num_layers is {config.num_layers}, but the pattern of the HybridModel has "
                f"{layers} layers: each FFN counts as a layer"
            )


class StackSpec(ModuleSpec):
    """A function of a config that returns a spec, and itself a spec for stacks that call none.

    Megatron's HybridModelConfig and pretrain_hybrid.py pass the object named by ``--spec`` to the
    HybridModel unchanged; the stack then asks for the spec of its config.
    """

    def __call__(self, config: Any, *_: Any, **__: Any) -> Any:
        """Return the spec of a HybridModel of this config, of halves of ``layer_spec``'s layers."""
        return spec_of_stack(with_options(config, "stack_spec"))


stack_spec = StackSpec(module=MegasinkHybridStack)


def spec_of_stack(config: Any) -> ModuleSpec:
    """Return the spec of a stack whose layers all have the options of this config."""
    dense, norm = _layer_of(config, None)
    experts = _layer_of(config, config.num_moe_experts)[0]
    latent = config.multi_latent_attention
    no_ffn = dict.fromkeys(("pre_mlp_layernorm", "mlp"), IdentityOp) | {"mlp_bda": IdentityFuncOp}
    no_attention = dict.fromkeys(("input_layernorm", "self_attention"), IdentityOp)
    no_attention["self_attn_bda"] = IdentityFuncOp
    recurrent = hybrid_stack_spec.submodules
    if config.transformer_impl == "local":
        recurrent = _local_recurrent(recurrent, norm)
    return ModuleSpec(
        module=MegasinkHybridStack,
        params={"norm": norm},
        submodules=HybridStackSubmodules(
            **{"mla_layer" if latent else "attention_layer": _with(dense, **no_ffn)},
            mlp_layer=_with(dense, MLPLayer, **no_attention),
            moe_layer=_with(experts, MoETransformerLayer, **no_attention),
            mamba_layer=recurrent.mamba_layer,
            gdn_layer=recurrent.gdn_layer,
        ),
    )


def _layer_of(config: Any, experts: int | None) -> tuple[ModuleSpec, LayerNormBuilder | None]:
    """Return a layer of a GPT model with megasink's modules, and the norm after the last layer."""
    options = {
        "num_experts": experts,
        "moe_grouped_gemm": config.moe_grouped_gemm,
        "qk_layernorm": config.qk_layernorm,
        "qk_l2_norm": config.qk_l2_norm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if config.transformer_impl == "local":
        layer = get_gpt_layer_local_spec(**options, normalization=config.normalization)
        if config.multi_latent_attention:
            from megasink.megatron.latent_config import with_checkpoint_names

            layer = with_checkpoint_names(layer, experts)
    else:
        dense = not (experts or config.num_moe_experts)
        layer = get_gpt_layer_with_transformer_engine_spec(
            **options,
            use_te_activation_func=config.use_te_activation_func,
            use_te_op_fuser=dense and config.use_transformer_engine_op_fuser,
            use_grouped_gemm_for_dense_mlp=config.use_grouped_gemm_for_dense_mlp,
        )
    block = our_block([with_our_modules(layer, config)], LayerNormImpl, config)
    return block.layer_specs[0], block.layer_norm


def _with(layer: ModuleSpec, module: Any = None, **submodules: Any) -> ModuleSpec:
    """Return the spec with other submodules, and with this module if one is given."""
    changed = dataclasses.replace(layer.submodules, **submodules)
    return dataclasses.replace(layer, module=module or layer.module, submodules=changed)


def _local_recurrent(
    upstream: HybridStackSubmodules, norm: LayerNormBuilder
) -> HybridStackSubmodules:
    """Return the Mamba and delta-net layers of a spec with Megatron's own linear layers and norms.

    Their checkpoints have the names of TransformerEngine's, which fuses norm and projection.
    """
    linear = {"in_proj": ColumnParallelLinear, "out_proj": RowParallelLinear}
    gdn, mamba = upstream.gdn_layer, upstream.mamba_layer
    return HybridStackSubmodules(
        gdn_layer=_with(
            gdn,
            input_layernorm=norm,
            self_attention=_with(gdn.submodules.self_attention, **linear, out_norm=norm),
            sharded_state_dict_keys_map={"input_layernorm.": "self_attention.in_proj.layer_norm_"},
        ),
        mamba_layer=_with(
            mamba,
            norm=norm,
            mixer=_with(mamba.submodules.mixer, **linear),
            sharded_state_dict_keys_map={"norm.": "mixer.in_proj.layer_norm_"},
        ),
    )
