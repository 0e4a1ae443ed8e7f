"""What each attention variant adds to softmax attention: its parameters, its slot, its gate.

A new variant is its definition in ``attention/reference.py``, a name in ``config.Variant``, an
entry of ``VARIANTS`` here and a test; core attention does not know one variant from another.

Shapes: B batch, H query heads and G key/value groups of this tensor-parallel rank, T queries,
S keys, D head dim.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megasink.attention import AttentionOutput, attention, biased_attention
from megasink.attention.layout import repeat_groups

if TYPE_CHECKING:
    from megasink.layers.transformer_config import MegasinkTransformerConfig

Parameters = Mapping[str, Tensor]
Attend = Callable[..., AttentionOutput]
# Every parameter of a variant, by its name in core attention. They stay float32 in a bf16 model,
# and the optimizer gives them the learning rate and weight decay of --sink-lr-mult and
# --sink-weight-decay.
SOFTMAX_OFFSET, KEY_BIAS, VALUE_BIAS = "softmax_offset", "key_bias", "value_bias"
SINK_PARAMETERS = (SOFTMAX_OFFSET, KEY_BIAS, VALUE_BIAS)


@dataclass(frozen=True)
class SlotVariant:
    """One attention variant.

    Attributes:
        attend: (config, parameters, query_BHTD, key_BGSD, value_BGSD, *, with_gate, and the options
            of `megasink.attention.attention`: window, scale, backend) -> AttentionOutput. The gate
            may be None where `with_gate` is False.
        parameters: names, of `SINK_PARAMETERS`.
        always_gated: the gate is returned, and costs nothing, whether asked for or not.
        softmax_type: Megatron's name for the variant, by which its inference and converters decide.
            "vanilla" for what it has no name for: there Megatron's dynamic inference engine would
            leave the slot out without a word, so it must be refused for every variant but the three
            that core attention shares with Megatron (vanilla, sink, off-by-one).
    """

    attend: Attend
    parameters: tuple[str, ...] = ()
    always_gated: bool = False
    softmax_type: str = "vanilla"


def _vanilla(
    config: "MegasinkTransformerConfig", parameters: Parameters, *tensors: Tensor, **options: Any
) -> AttentionOutput:
    return attention(*tensors, **options)


def _sink(
    config: "MegasinkTransformerConfig", parameters: Parameters, *tensors: Tensor, **options: Any
) -> AttentionOutput:
    return attention(*tensors, variant="sink", sink_H=parameters[SOFTMAX_OFFSET], **options)


def _off_by_one(
    config: "MegasinkTransformerConfig", parameters: Parameters, *tensors: Tensor, **options: Any
) -> AttentionOutput:
    return attention(*tensors, variant="off-by-one", **options)


def _biased(
    config: "MegasinkTransformerConfig", parameters: Parameters, *tensors: Tensor, **options: Any
) -> AttentionOutput:
    shape = (tensors[0].shape[1], tensors[0].shape[-1])
    key_bias, value_bias = parameters.get(KEY_BIAS), parameters.get(VALUE_BIAS)
    if key_bias is not None and value_bias is None:
        value_bias = fixed_value(config, key_bias)
    return biased_attention(
        *tensors,
        # A bias that all heads of the layer share is [D].
        key_bias_HD=None if key_bias is None else key_bias.expand(shape),
        value_bias_HD=None if value_bias is None else value_bias.expand(shape),
        **options,
    )


def fixed_value(config: "MegasinkTransformerConfig", like: Tensor) -> Tensor | None:
    """v* of --bias-fixed-value (P2.28), [D] in the dtype and on the device of `like` [..., D]."""
    kind, norm = config.bias_fixed_value, config.bias_fixed_value_norm
    if kind == "none":
        return None
    head_dim = like.shape[-1]
    if kind == "uniform":
        return like.new_full((head_dim,), norm * head_dim**-0.5)
    value_D = like.new_zeros(head_dim)
    value_D[0] = norm
    return value_D


def slot_value(
    config: "MegasinkTransformerConfig",
    parameters: Parameters,
    value_BGSD: Tensor,
    heads: int,
    cu_seqlens: Sequence[int] | None = None,
) -> Tensor | None:
    """What a head gives out where its gate is closed (u in docs/maths.md).

    Args:
        value_BGSD: as given to attention.
        cu_seqlens: of packed documents.

    Returns:
        [1 or B, H, 1 or T, D], without gradient; None for 0.
    """
    value_bias, shape = parameters.get(VALUE_BIAS), (1, heads, 1, value_BGSD.shape[-1])
    if value_bias is not None:
        value_bias = value_bias.detach().unsqueeze(-2).expand(shape)
    if VARIANTS[config.attention_variant].always_gated:  # the slot is not a key of the sequence
        if KEY_BIAS in parameters and value_bias is None:
            value_bias = fixed_value(config, parameters[KEY_BIAS])
        return None if value_bias is None else value_bias.expand(shape)
    first_T = torch.zeros(1, dtype=torch.int64)
    if cu_seqlens is not None:
        bounds = torch.tensor(cu_seqlens)
        first_T = bounds[:-1].repeat_interleave(bounds.diff())
    first_BGTD = value_BGSD.detach()[:, :, first_T.to(value_BGSD.device)]
    first_BHTD = repeat_groups(first_BGTD, heads)
    return first_BHTD if value_bias is None else first_BHTD + value_bias


VARIANTS: dict[str, SlotVariant] = {
    "vanilla": SlotVariant(_vanilla),
    "sink": SlotVariant(_sink, (SOFTMAX_OFFSET,), True, "learnable"),
    "off-by-one": SlotVariant(_off_by_one, (), True, "off-by-one"),
    "gated": SlotVariant(_vanilla),  # the gate is in layers/gated_self_attention.py
    "k-bias": SlotVariant(_biased, (KEY_BIAS,), True),
    "kv-bias": SlotVariant(_biased, (KEY_BIAS, VALUE_BIAS), True),
    "v-bias": SlotVariant(_biased, (VALUE_BIAS,)),
}


def new_parameter(
    name: str,
    config: "MegasinkTransformerConfig",
    heads: int,
    head_dim: int,
    device: torch.device | int | None,
) -> tuple[Tensor, bool]:
    """The initial value of a parameter on this rank, and whether it is sharded by heads.

    Sinks are [heads] and start at --softmax-offset-init. Biases are [heads, D], per **query** head
    under GQA too (with fewer groups than tensor-parallel ranks a group is copied, and a bias per
    group would be shared by ranks), or [D] for all heads of the layer under --bias-shared-heads;
    they are zero until layers/init.py draws them from N(0, 0.02).
    """
    if name == SOFTMAX_OFFSET:
        return torch.full((heads,), config.softmax_offset_init, device=device).float(), True
    shape = (head_dim,) if config.bias_shared_heads else (heads, head_dim)
    return torch.zeros(shape, device=device, dtype=torch.float32), not config.bias_shared_heads
