"""What an attention variant is: one record, which everything else of megasink reads.

Nothing here imports torch: the checks of a command line read records before torch is there. The
functions of a record work on the tensors that they are given, and import what they need when they
are called.

Shapes: B batch, H query heads and G key/value groups of this rank, T queries, S keys, D head dim.
`config` is anything with the options of megasink and Megatron's ``num_attention_heads``,
``num_query_groups`` and ``kv_channels``: a transformer config, validated arguments, or what
conversion knows of a model. `parameters` are the variant's own by name, those of this rank's heads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

    from megasink.attention import AttentionOutput

Parameters = Mapping[str, "Tensor"]
Attend = Callable[..., "AttentionOutput"]
SlotLogit = Callable[[Any, Parameters, "Tensor", float], "Tensor | None"]
SlotValue = Callable[[Any, Parameters, Callable[[], "Tensor"]], "Tensor | None"]
OpVariant = Literal["vanilla", "sink", "off-by-one"]
# How a model with plain softmax attention becomes one of a variant: see `Export.start`.
ZERO_GATES, SINK_WEIGHT = "zero gates", "sink weight"


def no_slot(config: Any, parameters: Parameters, query_BHTD: "Tensor", scale: float) -> None:
    """The slot logit of a variant without a slot: its gate is 1 - A_i0 (P0.6)."""


def zero_value(config: Any, parameters: Parameters, first_value: Callable[[], "Tensor"]) -> None:
    """The slot value of a sink: a head whose gate is closed gives 0."""


def first_value(
    config: Any, parameters: Parameters, first_value: Callable[[], "Tensor"]
) -> "Tensor":
    """The slot value of a variant without a slot: the value of the first key."""
    return first_value()


def always(config: Any) -> bool:
    """Whatever the options are."""
    return True


def never(config: Any) -> bool:
    """The answer of a record that does not say."""
    return False


def zero(config: Any) -> float:
    """The initial value 0."""
    return 0.0


@dataclass(frozen=True, kw_only=True)
class Parameter:
    """A parameter that a variant adds to the core attention of a layer.

    It stays float32 in a model of any dtype, and trains under --sink-lr-mult and
    --sink-weight-decay.

    Attributes:
        name: in core attention and, behind "core_attention.", in checkpoints.
        shape: (config) -> shape in the whole layer, over all tensor-parallel ranks.
        sharded: (config) -> whether its first axis counts heads, or key/value groups, of which
            each tensor-parallel rank has its own; else every rank has all of it.
        initial: (config) -> the value that every element starts with.
        std: where not 0, elements are drawn from N(0, std) instead, whatever the layout.
    """

    name: str
    shape: Callable[[Any], tuple[int, ...]]
    sharded: Callable[[Any], bool] = always
    initial: Callable[[Any], float] = zero
    std: float = 0.0

    def local_shape(self, config: Any, ranks: int) -> tuple[int, ...]:
        """The shape on one of so many tensor-parallel ranks.

        Raises:
            ValueError: its heads or groups cannot be divided among them.
        """
        first, *others = self.shape(config)
        if not self.sharded(config):
            return (first, *others)
        if first % ranks:
            raise ValueError(
                f"{self.name} has {first} rows, which {ranks} tensor-parallel ranks do not divide"
            )
        return (first // ranks, *others)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a variant asks of an attention kernel.

    Attributes:
        variant: which of the op's variants its call comes to: a slot of any logit is "sink".
        gate_gradient: its own gradient needs the kernel's log-sum-exp to be exact, with or without
            a head-balance loss.
    """

    variant: OpVariant
    gate_gradient: bool


@dataclass(frozen=True, kw_only=True)
class Export:
    """What conversion to and from Hugging Face format may do with a variant.

    Attributes:
        kinds: its names in the declarations of targets (`Target.attention`); by default its name.
        kind_option: the option whose value is the kind, where there are several.
        sink_tensor: its slot is one logit per head of value 0, which targets hold in a tensor of
            their own: its only parameter, or zeros.
        modelling_file: megasink's own modelling file computes it.
        tensors: {name of a parameter: its name in that file}, beside the sink tensor.
        start: how a model with plain softmax attention becomes one (`megasink convert-from-hf`):
            ZERO_GATES, or SINK_WEIGHT for a mean attention weight of each sink; None: it cannot.
    """

    kinds: tuple[str, ...] = ()
    kind_option: str | None = None
    sink_tensor: bool = False
    modelling_file: bool = False
    tensors: Mapping[str, str] = field(default_factory=dict)
    start: str | None = None


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One attention variant. What a record leaves at None or False is refused, never guessed.

    Attributes:
        name: of --attention-variant.
        description: one line, with the paper row or another source.
        attend: (config, parameters, query_BHTD, key_BGSD, value_BGSD, *, with_gate, and the options
            of `megasink.attention.attention`: masks, scale, backend) -> AttentionOutput. The gate
            may be None where `with_gate` is False and there is no slot.
        kernel: what that asks of a kernel.
        slot_logit: (config, parameters, query_BHTD, scale) -> the logit of the key beside the
            sequence's, in float32 (float64 for such queries), broadcastable to [B, H, T]; `no_slot`
            for a variant without one. None: such models cannot be analyzed.
        slot_value: (config, parameters, first_value) -> what a head gives out where its gate is
            closed (u in docs/maths.md), broadcastable to [B, H, T, D]; None for 0.
            `first_value()` is the value of the first key, [B, H, 1 or T, D]. A record without one
            has no head-balance loss, whose gradient is measured against it.
        parameters: in the order of core attention.
        logs_slot_logit: the slot logit is one parameter per head that no query changes: training
            logs it as ``softmax_offset``.
        explicit_gate: the layers have the gate of P0.3 and P1 (`megasink.gate_options`).
        softmax_type: Megatron's name for it, by which Megatron's inference decides; "vanilla" where
            it has none.
        dynamic_inference: Megatron's dynamic inference computes it, by `softmax_type`.
        similarity: other similarities may take the place of the softmax (P2.30).
        norm_keeps_gate: (config) -> whether RMSNorm of the SDPA output (P1.16) leaves the gate in:
            one that multiplies all of a head's output is divided out again.
        options: names of the options that belong to this variant, and to others that name them too.
        export: None: such models cannot be converted.
    """

    name: str
    description: str
    attend: Attend
    kernel: Kernel
    slot_logit: SlotLogit | None = None
    slot_value: SlotValue | None = None
    parameters: tuple[Parameter, ...] = ()
    logs_slot_logit: bool = False
    explicit_gate: bool = False
    softmax_type: str = "vanilla"
    dynamic_inference: bool = False
    similarity: bool = False
    norm_keeps_gate: Callable[[Any], bool] = never
    options: frozenset[str] = frozenset()
    export: Export | None = None

    @property
    def always_gated(self) -> bool:
        """Whether `attend` returns the gate unasked: beside a slot it costs nothing."""
        return self.slot_logit is not no_slot

    @property
    def is_plain(self) -> bool:
        """Whether it is softmax attention with nothing added."""
        return not (self.always_gated or self.parameters or self.explicit_gate)

    @property
    def kinds(self) -> tuple[str, ...]:
        """Its names in the declarations of conversion targets."""
        return (self.export and self.export.kinds) or (self.name,)

    def kind(self, options: Mapping[str, Any]) -> Any:
        """Which of `kinds` a model with these options is: any value, if they say another."""
        option = self.export and self.export.kind_option
        return options.get(option, self.kinds[0]) if option else self.kinds[0]
