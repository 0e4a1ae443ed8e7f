"""Gated delta-net layers of hybrid models, as Megatron builds them, under any layout."""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.hybrid.hybrid_block import HybridStackSubmodules
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.gated_delta_net import GatedDeltaNet
from torch import Tensor
from torch.distributed import ProcessGroup

from megasink.errors import UserError
from megasink.megatron.block_options import changed
from megasink.megatron.hybrid_pattern import heads_apart


class CachedDeltaNet(GatedDeltaNet):
    """GatedDeltaNet that also generates, with a state per layer; upstream's raises an error.

    Shapes: S new tokens, B sequences, H value heads of this rank, K width of a key, V of a value.
    """

    def forward(
        self, hidden_states: Tensor, *args: Any, inference_context: Any = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Return the output and its bias, as upstream; the context holds the state of a layer.

        Raises:
            UserError: the state in the context has another number of tokens.
        """
        if inference_context is None:
            return super().forward(hidden_states, *args, **kwargs)
        length, batch, _ = hidden_states.shape
        projected_BSE = self.in_proj(hidden_states)[0].transpose(0, 1)
        qkv_BSC, gate, beta, alpha = projected_BSE.split(self.feat_dim_split, dim=-1)
        states, name = inference_context.key_value_memory_dict, f"delta-net {self.layer_number}"
        before_BSC = qkv_BSC.new_zeros(batch, self.conv_kernel_dim - 1, qkv_BSC.shape[-1])
        before_BSC, state_BHKV, tokens = states.get(name, (before_BSC, None, 0))
        if tokens != (start := inference_context.sequence_len_offset):
            raise UserError(
                f"the delta-net state of layer {self.layer_number} has {tokens} tokens, but "
                f"{start} precede the next one: generate from the first token"
            )
        inputs_BSC = torch.cat((before_BSC, qkv_BSC), dim=1)
        weight, bias = self.conv1d.weight, self.conv1d.bias
        mixed_BCS = F.conv1d(inputs_BSC.transpose(1, 2), weight, bias, groups=len(weight))
        query, key, value, gate, beta, alpha = self._prepare_input_for_gated_delta_rule(
            self.act_fn(mixed_BCS).transpose(1, 2),
            gate.unflatten(-1, (-1, self.value_head_dim)),
            batch,
            length,
            beta,
            alpha,
        )
        decay_BSH, beta_BSH = self._compute_g_and_beta(self.A_log, self.dt_bias, alpha, beta)
        if state_BHKV is not None and length == 1:
            out, state_BHKV = _step(query, key, value, decay_BSH, beta_BSH, state_BHKV)
        else:
            out, state_BHKV = self.gated_delta_rule(
                query,
                key,
                value,
                g=decay_BSH,
                beta=beta_BSH,
                initial_state=state_BHKV,
                output_final_state=True,
            )
        states[name] = (inputs_BSC[:, length:], state_BHKV, tokens + length)
        return self.out_proj(self._gated_norm_and_a2a(out, gate, None, batch, length))


def _step(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state_BHKV: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output [B, 1, H, V] of one more token, and the state after it."""
    q_BHK, k_BHK, v_BHV, g_BH, b_BH = (x[:, 0].float() for x in (query, key, value, decay, beta))
    kept_BHKV = state_BHKV * g_BH.exp()[..., None, None]
    known_BHV = torch.einsum("bhkv,bhk->bhv", kept_BHKV, k_BHK)
    new_BHV = b_BH[..., None] * (v_BHV - known_BHV)
    state_BHKV = kept_BHKV + k_BHK[..., None] * new_BHV[..., None, :]
    out_BHV = torch.einsum("bhkv,bhk->bhv", state_BHKV, q_BHK) * q_BHK.shape[-1] ** -0.5
    return out_BHV[:, None].to(value.dtype), state_BHKV


def with_states(config: Any, submodules: HybridStackSubmodules) -> HybridStackSubmodules:
    """Return the spec of a stack whose delta-net layers generate.

    Raises:
        UserError: the ranks cannot share its heads.
    """
    heads = config.linear_num_key_heads, config.linear_num_value_heads
    sizes = config.tensor_model_parallel_size, config.context_parallel_size
    if problem := heads_apart(*heads, *sizes):
        raise UserError(problem)
    layer = submodules.gdn_layer
    mixer = replace(layer.submodules.self_attention, module=CachedDeltaNet)
    return replace(submodules, gdn_layer=changed(layer, self_attention=mixer))


def prepare_delta_net(model: HybridModel) -> None:
    """Make weights and gradients of gated delta-net independent of the tensor-parallel layout.

    The separately sharded parts of a weight get names, which `named_parts` yields.

    The norm of the heads' outputs is on every rank, and sees that rank's heads. Without sequence
    parallelism Megatron does not sum its gradients over the ranks
    (megatron/core/distributed/finalize_model_grads.py:452), and the copies would drift apart.
    """
    for layer in (m for m in model.modules() if isinstance(m, GatedDeltaNet)):
        names, sizes = layer.in_proj_split_names, layer.in_proj_split_sections
        layer.in_proj.weight.sections = dict(zip(names, sizes, strict=True))
        layer.conv1d.weight.sections = dict(zip(names[:3], sizes[:3], strict=True))
        if layer.tp_size > 1 and not model.config.sequence_parallel:
            for parameter in layer.out_norm.parameters():
                parameter.register_hook(partial(_summed, layer.tp_group))


def _summed(group: ProcessGroup, gradient: Tensor) -> Tensor:
    total = gradient.clone()
    torch.distributed.all_reduce(total, group=group)
    return total
