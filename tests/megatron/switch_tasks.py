"""Tasks for the workers: one layer of switch heads against its definition, written out plainly.

Shapes: S sequence, B batch, M hidden size, G groups, Q query heads of a group, E experts, D head
dim, X = D, or 2 * D for keys and values, R rows of a group.
"""

from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from torch import Tensor
from torch.nn.functional import linear

from megasink.attention import reference_attention, reference_switch
from megasink.megatron.checkpoint_parts import named_parts
from tests.distributed import tiny_gpt
from tests.megatron.gate_tasks import loss_and_gradients
from tests.said import said

TOKENS = 23


def model(**options: Any) -> Any:
    """A model in training mode."""
    config = tiny_gpt.model_config(head_balance_coeff=0.0, **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return config.get_builder_cls()(config).build_model(groups)


def against_definition(**options: Any) -> dict[str, float]:
    """Relative errors of a layer's output and of all its gradients, and what the experts matter.

    The definition is computed in float64.
    """
    attention = model(**options).decoder.layers[0].self_attention
    if attention.linear_qkv.bias is not None:
        torch.nn.init.normal_(attention.linear_qkv.bias, generator=torch.Generator().manual_seed(4))
    generator = torch.Generator().manual_seed(3)
    dtype = attention.linear_qkv.weight.dtype
    hidden_SBM = torch.randn(TOKENS, 2, tiny_gpt.HIDDEN, generator=generator).to(dtype)
    grad_SBM = torch.randn(hidden_SBM.shape, generator=generator).to(dtype)
    parameters = dict(attention.named_parameters())

    def results(out_SBM: Tensor, hidden_SBM: Tensor) -> dict[str, Tensor]:
        inputs = (hidden_SBM, *parameters.values())
        found = torch.autograd.grad(out_SBM, inputs, grad_SBM.to(out_SBM.dtype))
        return {"output": out_SBM, **dict(zip(("hidden", *parameters), found, strict=True))}

    hidden_SBM.requires_grad_()
    output, bias = attention(hidden_SBM, None)
    found = results(output if bias is None else output + bias, hidden_SBM)
    wide_SBM = hidden_SBM.detach().double().requires_grad_()
    top_k = attention.config.switch_top_k
    wanted = results(definition(attention, wide_SBM, top_k), wide_SBM)
    other = definition(attention, wide_SBM, top_k % attention.config.switch_experts + 1)
    errors = {name: _error(found[name], wanted[name]) for name in wanted}
    return errors | {"with another top k": _error(other, wanted["output"])}


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


def definition(attention: Any, hidden_SBM: Tensor, top_k: int) -> Tensor:
    """Output [S, B, M] of the layer; one process, no RoPE."""
    config, projection = attention.config, attention.linear_qkv
    parts: dict[str, Tensor] = {}
    for kind in ("weight", "bias"):
        parameter = getattr(projection, kind)
        if parameter is not None:  # slices of the parameter itself, for its gradient
            names = [name for name, _ in named_parts(f"linear_qkv.{kind}", parameter)]
            parts |= zip(names, parameter.double().split(projection.row_split), strict=False)
    mixed_SBGR, rows_SBGR = (
        linear(hidden_SBM, parts[f"{name}.weight"], parts.get(f"{name}.bias")).unflatten(
            -1, (config.num_query_groups, -1)
        )
        for name in ("linear_qkv", "linear_switch")
    )
    head_dim, experts = config.kv_channels, config.switch_experts
    query_SBGR, key_SBGD, value_SBGD = mixed_SBGR.split(
        [mixed_SBGR.shape[-1] - 2 * head_dim, head_dim, head_dim], -1
    )
    both = config.switch_heads == "key-value"
    own_SBGX = torch.cat((key_SBGD, value_SBGD), -1) if both else value_SBGD
    width = own_SBGX.shape[-1]
    every = [own_SBGX, *rows_SBGR[..., :-experts].split(width, -1)[: experts - 1]]
    sum_SBGX = reference_switch(torch.stack(every, -2), rows_SBGR[..., -experts:], top_k=top_k)
    key_SBGD, value_SBGD = sum_SBGX.chunk(2, -1) if both else (key_SBGD, sum_SBGX)
    query_SBHD = query_SBGR.unflatten(-1, (-1, head_dim)).flatten(2, 3)
    out_BHSD, _, _ = reference_attention(
        *(x.permute(1, 2, 0, 3) for x in (query_SBHD, key_SBGD, value_SBGD)),
        variant=config.attention_variant,
        sink_H=attention.core_attention.softmax_offset.double(),
    )
    out_SBX = out_BHSD.permute(2, 0, 1, 3).flatten(2)
    bias = attention.linear_proj.bias
    return linear(
        out_SBX, attention.linear_proj.weight.double(), None if bias is None else bias.double()
    )


def against_value_gate(**options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Loss and gradients of one expert, and of the headwise value gate with the same weights."""
    switch = model(attention_variant="vanilla", switch_heads="value", **options)
    gated = model(attention_variant="gated", gate_position="value", **options)
    gated.load_state_dict(switch.state_dict(), strict=True)
    return loss_and_gradients(switch), loss_and_gradients(gated)


def refused(**options: Any) -> str:
    """The message of the model that cannot be built; "" if it can."""
    return said(model, **options)
