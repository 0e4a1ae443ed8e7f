"""The kinds of interventions, with the allowed values of their fields.

A file of interventions is checked here, without torch. The `HeadChange` that runs is in the module
that `change` imports.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from megasink.analysis.interventions.heads import Heads, normalized_heads
from megasink.analysis.interventions.record import Intervention, check_score, kind
from megasink.errors import UserError

if TYPE_CHECKING:
    from megasink.analysis.capture.changes import HeadChange
    from megasink.analysis.interventions.dynamic_zeroing import DynamicChange

PHASES = ("prefill", "decode", "both")


@kind
class ZeroHeads(Intervention):
    """Replace the outputs of chosen heads by zero before the output projection.

    The bias of W_O stays, and other heads are not rescaled.

    Attributes:
        heads: (layer, head) pairs, both from 0; sorted, each once.
        mask_shape: (layers, heads) of the mask that the heads were read from, which the model
            must have; None if they were listed.
    """

    kind: ClassVar[str] = "zero-heads"
    source: ClassVar[str] = "P4.7, P3.12"

    heads: Heads
    mask_shape: Sequence[int] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", normalized_heads(self.heads))
        if self.mask_shape is not None:
            shape = tuple(self.mask_shape) if isinstance(self.mask_shape, list | tuple) else ()
            if [type(size) for size in shape] != [int, int]:
                raise UserError(f"mask_shape {self.mask_shape!r}: give [layers, heads]")
            object.__setattr__(self, "mask_shape", shape)

    def change(self) -> "HeadChange":
        """Return the change."""
        from megasink.analysis.interventions.head_changes import Zeroing

        return Zeroing(self.heads, self.mask_shape)


@kind
class DynamicZeroing(Intervention):
    """Zero the heads whose score crosses a threshold, per call of the model and sample.

    A head of a sample gives 0 to the output projection if its score is strictly above (first-token
    weights) or below (all others) the threshold. The scores of a layer are those of the model as
    it runs: the layers below it are already changed. Nothing is renormalized, and the bias of W_O
    stays. The score covers the whole sequence, which is not causal (P3.12).

    With a key/value cache, the pass without a cache (the prompt) decides the masks, and later
    passes of the same rows keep them. A prompt that runs in chunks is decided by its first.

    Attributes:
        score: a registered metric with `inactive` set: the twelve of P3, `lthon_hn`,
            `circuit_ahon` and its form by layer, `random`, or a plugin's.
        threshold: absolute; for `random` the share of heads (P3.9).
        seed: of `random`; the same sample gets the same heads, in any batch.
    """

    kind: ClassVar[str] = "dynamic-zeroing"
    source: ClassVar[str] = "P3.1 to P3.13"

    score: str
    threshold: float
    seed: int = 0

    def __post_init__(self) -> None:
        check_score(self.score)
        object.__setattr__(self, "threshold", float(self.threshold))
        from megasink.analysis.interventions.scores import LayerScore

        low, high = LayerScore(self.score).bounds
        if not low <= self.threshold <= high:
            raise UserError(f"threshold {self.threshold:g}: {self.score} is in [{low:g}, {high:g}]")

    def change(self) -> "DynamicChange":
        """Return the change, which counts the heads that it zeroes."""
        from megasink.analysis.interventions.dynamic_zeroing import DynamicChange
        from megasink.analysis.interventions.scores import LayerScore

        return DynamicChange(LayerScore(self.score), self.threshold, self.seed)


@kind
class DrainFirstValue(Intervention):
    """Set v_0 to zero: subtract A_i0 v_0 from the outputs of heads, without renormalizing A.

    The first token is the first real one of each sequence. Query heads of a group share v_0, so
    the output is changed per query head and the cache is left alone. A gate multiplies what is
    subtracted; key 0 has no weight where a window hides it. Padding is left alone.

    P0's scores on log-likelihood tasks, where nothing is decoded, change (MMLU 75.42 to 50.27 for
    all heads), so the tokens of the prompt see it: "both" is the default.

    Attributes:
        threshold: drain a sample's heads whose mean weight on the first token over the pass
            without a cache (the prompt) is strictly above this, such as 0.75 (P0.28, Eq. 9); None
            drains all (P0.27).
        phase: "prefill" (passes without a cache), "decode" (those that continue one), or "both".
    """

    kind: ClassVar[str] = "drain-first-value"
    source: ClassVar[str] = "P0.27, P0.28"

    threshold: float | None = None
    phase: str = "both"

    def __post_init__(self) -> None:
        if self.phase not in PHASES:
            raise UserError(f"phase {self.phase!r}: choose {', '.join(PHASES)}")
        if self.threshold is None:
            return
        if not 0 <= self.threshold <= 1:
            raise UserError(f"threshold {self.threshold!r}: a mean weight is in [0, 1]")

    def change(self) -> "HeadChange":
        """Return the change."""
        from megasink.analysis.interventions.head_changes import Drain

        return Drain(self.kind, self.threshold, self.phase)


@kind
class SteerGates(Intervention):
    """Scale or clamp G of chosen heads: scale * G, but at least minimum and at most maximum.

    Only gated models have such a gate: G = 1 - the weight of the sink logit (P0.2), or the score
    of an explicit gate on the output of attention (P1.10). A plain model has none to steer, nor
    has one with a sink token.

    A gate that is exactly 0 stays 0 if it belongs to a sink, as the output behind it is lost.

    Attributes:
        heads: (layer, head) pairs, both from 0.
        scale: factor of G, from 0 on.
        minimum, maximum: limits of G, in [0, 1]; None for none.
    """

    kind: ClassVar[str] = "steer-gates"
    source: ClassVar[str] = "P0.2, P1.10; steering is megasink's own"

    heads: Heads
    scale: float = 1.0
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "heads", normalized_heads(self.heads))
        given = (self.scale, self.minimum, self.maximum)
        if given == (1.0, None, None):
            raise UserError("nothing to steer: give scale, minimum or maximum")
        if not 0 <= self.scale < math.inf:
            raise UserError(f"scale {self.scale:g}: a number from 0 on")
        low = 0.0 if self.minimum is None else self.minimum
        high = 1.0 if self.maximum is None else self.maximum
        if not 0 <= low <= high <= 1:
            raise UserError(f"minimum {low:g} and maximum {high:g}: 0 <= minimum <= maximum <= 1")

    def change(self) -> "HeadChange":
        """Return the change."""
        from megasink.analysis.interventions.head_changes import Steering

        return Steering(self)


@kind
class RemoveBos(Intervention):
    """Start with the first token of the text instead of BOS; positions restart at 0 (P4.3).

    A sequence that does not begin with BOS stays as it is. The remaining tokens are those of the
    sequence with BOS: nothing is tokenized again.
    """

    kind: ClassVar[str] = "remove-bos"
    source: ClassVar[str] = "P4.3"

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        if bos is None:
            raise UserError("remove-bos: the tokenizer has no BOS to remove")
        if list(tokens) == [bos]:
            raise UserError("remove-bos: a sequence consists of BOS only and would be empty")
        return list(tokens[1:] if tokens[0] == bos else tokens)


@kind
class RepeatFirstToken(Intervention):
    """Put copies of the first token in front: of BOS, or without BOS of the text's first (P4.4).

    Only the tokens that follow may be scored, so that every number of copies is evaluated on the
    same tokens: those after the first token of the text.

    Attributes:
        copies: number of first tokens, the original included; 1 changes nothing.
    """

    kind: ClassVar[str] = "repeat-first-token"
    source: ClassVar[str] = "P4.4"

    copies: int

    def __post_init__(self) -> None:
        if self.copies < 1:
            raise UserError(f"copies {self.copies!r}: a whole number from 1 on")

    def tokens(self, tokens: Sequence[int], bos: int | None) -> list[int]:
        return [*[tokens[0]] * (self.copies - 1), *tokens]
