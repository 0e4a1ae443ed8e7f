"""The record that defines an attention variant for the rest of megasink.

This module does not import torch, because command-line checks read records before torch is loaded.
The functions of a record operate on the tensors they receive and import what they need when called.

Shapes: B batch, H query heads and G key/value groups of this rank, T queries, S keys, D head dim.
`config` is any object with megasink's options and Megatron's ``num_attention_heads``,
``num_query_groups`` and ``kv_channels``: a transformer config, validated arguments, or the model
description used by conversion. `parameters` maps names to the variant's parameters on this rank.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from megasink.attention import AttentionOutput

Parameters = Mapping[str, "Tensor"]
Attend = Callable[..., "AttentionOutput"]
SlotLogit = Callable[[Any, Parameters, "Tensor", float], "Tensor | None"]
SlotValue = Callable[[Any, Parameters, Callable[[], "Tensor"]], "Tensor | None"]
# How to turn a model with plain softmax attention into a variant: see `Export.start`.
ZERO_GATES, SINK_WEIGHT = "zero gates", "sink weight"


def no_slot(config: Any, parameters: Parameters, query_BHTD: "Tensor", scale: float) -> None:
    """Return the slot logit of a variant without a slot, whose gate is 1 - A_i0 (P0.6)."""


def zero_value(config: Any, parameters: Parameters, first_value: Callable[[], "Tensor"]) -> None:
    """Return the slot value of a sink: a head with a closed gate outputs 0."""


def first_value(
    config: Any, parameters: Parameters, first_value: Callable[[], "Tensor"]
) -> "Tensor":
    """Return the slot value of a variant without a slot: the value of the first key."""
    return first_value()


def always(config: Any) -> bool:
    """Return True for any options."""
    return True


def never(config: Any) -> bool:
    """Return False: the default of a record."""
    return False


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter that a variant adds to the core attention of a layer.

    It has the model's dtype, enters the mathematics in float32 and trains with --sink-lr-mult and
    --sink-weight-decay.

    Attributes:
        name: Name in core attention and, after "core_attention.", in checkpoints.
        shape: (config) -> shape over all tensor-parallel ranks.
        sharded: (config) -> whether axis 0 (heads or key/value groups) is sharded over the
            tensor-parallel ranks; otherwise every rank holds the whole parameter.
        initial: (config) -> initial value of every element.
        std: If not 0, elements are drawn from N(0, std) instead, independently of the layout.
    """

    name: str
    shape: Callable[[Any], tuple[int, ...]]
    sharded: Callable[[Any], bool] = always
    initial: Callable[[Any], float] = lambda _: 0.0
    std: float = 0.0

    def local_shape(self, config: Any, ranks: int) -> tuple[int, ...]:
        """Return the shape on each of `ranks` tensor-parallel ranks, which must divide it."""
        first, *others = self.shape(config)
        if not self.sharded(config):
            return (first, *others)
        if first % ranks:
            raise ValueError(
                f"the {first} rows of {self.name} are not divisible by {ranks} tensor-parallel "
                "ranks"
            )
        return (first // ranks, *others)


@dataclass(frozen=True, kw_only=True)
class Export:
    """How a variant converts to and from Hugging Face format.

    Attributes:
        kinds: Names of the variant in `Target.attention`; defaults to its name.
        kind_option: The option whose value is the kind, if there are several.
        sink_tensor: Whether the slot is one logit per head with value 0, which targets store as a
            sink tensor: the variant's only parameter, or zeros.
        modelling_file: Whether megasink's own modeling file implements it.
        tensors: {parameter name: name in that file}, in addition to the sink tensor.
        start: How to start from a model with plain softmax attention (`megasink convert-from-hf`):
            ZERO_GATES, or SINK_WEIGHT for a mean attention weight per sink; None if not supported.
    """

    kinds: tuple[str, ...] = ()
    kind_option: str | None = None
    sink_tensor: bool = False
    modelling_file: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    start: str | None = None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One attention variant. A feature left at None or False is rejected, never guessed.

    Attributes:
        name: Value of --attention-variant.
        description: One line, with the paper row or another source.
        slot_logit: (config, parameters, query_BHTD, scale) -> logit of the slot in float32 (float64
            for float64 queries), broadcastable to [B, H, T]; `no_slot` for a variant without a
            slot. None: such models cannot be analyzed.
        slot_value: (config, parameters, first_value) -> output of a head with a closed gate (u in
            docs/maths.md), broadcastable to [B, H, T, D]; None for 0. `first_value()` is the value
            of the first key, [B, H, 1 or T, D]. The gradient of the head-balance loss is measured
            against the slot value, so a record without it has no such loss.
        attend: A call other than `megasink.attention.slot_attention` with that slot (`attention`
            without one): (config, parameters, query_BHTD, key_BGSD, value_BGSD, *, with_gate, and
            the options of `attention`: masks, scale, backend) -> AttentionOutput. The gate may be
            None if `with_gate` is False and there is no slot.
        parameters: In the order of core attention.
        logs_slot_logit: Whether the slot logit is one query-independent parameter per head, which
            training logs as ``softmax_offset``.
        explicit_gate: Whether the layers have the gate of P0.3 and P1
        (`megasink.attention.variants.gate_options`).
        softmax_type: Megatron's name for the variant, read by its inference; "vanilla" if none.
        dynamic_inference: Whether Megatron's dynamic inference supports it, by `softmax_type`.
        similarity: Whether another similarity may replace the softmax (P2.30).
        norm_keeps_gate: (config) -> whether the gate survives RMSNorm of the SDPA output (P1.16),
            which cancels a gate that scales the whole output of a head.
        options: Options specific to this variant; several variants may name the same option.
        export: None: such models cannot be converted.
    """

    name: str
    description: str
    slot_logit: SlotLogit | None = None
    slot_value: SlotValue | None = None
    attend: Attend | None = None
    parameters: tuple[Parameter, ...] = ()
    logs_slot_logit: bool = False
    explicit_gate: bool = False
    softmax_type: str = "vanilla"
    dynamic_inference: bool = False
    similarity: bool = False
    norm_keeps_gate: Callable[[Any], bool] = never
    options: frozenset[str] = frozenset()
    export: Export | None = None

    def __post_init__(self) -> None:
        if self.attend is None and None in (self.slot_logit, self.slot_value):
            raise ValueError(
                f"attention variant {self.name!r}: define either attend, or slot_logit and "
                "slot_value"
            )

    @property
    def always_gated(self) -> bool:
        """Whether the gate is always returned, which is free with a slot."""
        return self.slot_logit is not no_slot

    @property
    def slot_learns(self) -> bool:
        """Whether its own gradient needs the log-sum-exp of the kernel, even without the loss."""
        return self.always_gated and bool(self.parameters)

    @property
    def is_plain(self) -> bool:
        """Whether the variant is unmodified softmax attention."""
        return not (self.always_gated or self.parameters or self.explicit_gate)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Names of the variant in the declarations of conversion targets."""
        return (self.export and self.export.kinds) or (self.name,)

    def kind(self, options: Mapping[str, Any]) -> Any:
        """Return the kind that these options describe; invalid values pass through."""
        option = self.export and self.export.kind_option
        return options.get(option, self.kinds[0]) if option else self.kinds[0]
