"""Call an attention implementation of transformers as a model does, for `attention.conformance`."""

from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations.hub_kernels import is_kernel
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.llama import modeling_llama

import megasink.transformers  # noqa: F401  registers the attention
from megasink.attention.conformance import Attend, Case


def names() -> list[str]:
    """Return the implementations that are registered here."""
    return ["eager", *ALL_ATTENTION_FUNCTIONS.valid_keys()]


def implementation(name: str) -> Attend | None:
    """Return the calls of an implementation; None if transformers has none of this name.

    eager is that of Llama, with sinks that of GPT-OSS, and with a softcap that of Gemma 2.
    """
    if name not in names() and not is_kernel(name):
        return None

    def attend(
        case: Case, query: Tensor, key: Tensor, value: Tensor, sink_H: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        heads, groups, width = query.shape[1], key.shape[1], query.shape[-1]
        shape: dict[str, Any] = {"intermediate_size": 1, "vocab_size": 1, "num_hidden_layers": 1}
        shape |= {"num_attention_heads": heads, "num_key_value_heads": groups, "head_dim": width}
        shape |= {"hidden_size": heads, "bos_token_id": None, "eos_token_id": None}
        config = LlamaConfig(**shape)
        model: Any = LlamaForCausalLM(config)
        model = model.to(query.device, query.dtype)
        model.set_attn_implementation(name)
        layer: Any = model.model.layers[0].self_attn.train()
        options: dict[str, Any] = {"position_ids": case.positions_BT.to(query.device)}
        make_mask = create_causal_mask
        if case.window is not None:
            make_mask = create_sliding_window_causal_mask
            config.sliding_window = options["sliding_window"] = case.window
        eager: Any = modeling_llama.eager_attention_forward
        if case.softcap is not None:
            options["softcap"] = case.softcap
            eager = modeling_gemma2.eager_attention_forward
        if sink_H is not None:
            layer.sinks = options["s_aux"] = sink_H
            eager = modeling_gpt_oss.eager_attention_forward
        function = ALL_ATTENTION_FUNCTIONS.get_interface(config._attn_implementation, eager)
        real_BT = case.real_BT
        mask = make_mask(
            config=config,
            inputs_embeds=query.new_empty(case.rows, query.shape[2], 1),
            attention_mask=None if real_BT is None else real_BT.to(query.device),
            past_key_values=None,
            position_ids=options["position_ids"],
        )
        options |= {"dropout": case.dropout, "scaling": case.scale or width**-0.5}
        # On a CPU flex_attention refuses gradients, after compiling each case.
        with torch.compiler.set_stance("default" if query.is_cuda else "force_eager"):
            out_BTHV, lse = function(layer, query, key, value, mask, **options)
        # Others return weights, or nothing.
        is_lse = isinstance(lse, Tensor) and lse.shape == query.shape[:3]
        return out_BTHV.transpose(1, 2), lse if is_lse else None

    return attend
