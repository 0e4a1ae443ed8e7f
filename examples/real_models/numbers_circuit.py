"""The numbers of claims.toml about the circuit of the first token (P4); see numbers.py.

Blocks and positions count from 0. States are listed by halves: 0 the embedding, 2 l + 1 after
attention of block l, 2 l + 2 its output.

Shapes: N texts, L layers, H heads, S states, P positions.
"""

import numpy as np

from examples.real_models import changes
from examples.real_models.analyses import Floats, Subject
from examples.real_models.numbers import number
from megasink.analysis.metrics.circuit import NORM_RATIO
from megasink.attention.constants import SINK_EPSILON

KEPT = 0.5
"""Of the norm after a block, that must be left after each block up to the last third."""


def jump_of(subject: Subject) -> int | None:
    """Return the block of the lasting growth in most texts, if any: the block of P4's rows."""
    lasting_N = lasting_block(subject)
    known = lasting_N[~np.isnan(lasting_N)]
    return int(np.median(known)) if 2 * len(known) > len(lasting_N) else None


@number("jump_block")
def lasting_block(subject: Subject) -> Floats:
    """The block with the largest growth of the first token's norm that lasts to the last third.

    Of the blocks before the last third, the one that adds most to the first token's norm, where the
    first token is then over `NORM_RATIO` times as long as the others, and keeps at least `KEPT` of
    that norm after each block up to the last third; NaN if there is none.
    """
    text = subject.samples("text")
    norm_NB, ratio_NB = text["state_norm"][:, ::2, 0], text["massive_ratio"][:, 2::2]
    early = 2 * ratio_NB.shape[1] // 3
    after_NB = norm_NB[:, 1 : early + 1]
    lowest_NB = np.minimum.accumulate(after_NB[:, ::-1], 1)[:, ::-1]
    lasts_NB = (ratio_NB[:, :early] > NORM_RATIO) & (lowest_NB >= KEPT * after_NB)
    growth_NB = np.where(lasts_NB, after_NB - norm_NB[:, :early], -np.inf)
    return np.where(lasts_NB.any(1), growth_NB.argmax(1), np.nan)


@number("first_long_block")
def first_long_block(subject: Subject) -> Floats:
    """The first block whose output has a first token over 5 times as long as the others."""
    long_NL = subject.samples("text")["massive_ratio"][:, 2::2] > NORM_RATIO
    return np.where(long_NL.any(1), long_NL.argmax(1), np.nan)


@number("mlp_share_of_jump")
def mlp_share_of_jump(subject: Subject) -> Floats:
    """Growth of the first token's norm by the MLP over that of the whole block."""
    jump = jump_of(subject)
    if jump is None:
        return np.full(1, np.nan)
    before, middle, after = (
        subject.samples("text")["state_norm"][:, 2 * jump + half, 0] for half in range(3)
    )
    return (after - middle) / (after - before)


for _at, _part in enumerate(("up", "gate")):

    @number(f"{_part}_ratio")
    def mlp_ratio(subject: Subject, at: int = _at) -> Floats:
        """First token over others, in the block of the jump; the gate after its activation."""
        jump = jump_of(subject)
        return np.full(1, np.nan) if jump is None else changes.mlp_ratios(subject, jump)[:, at]


@number("cosine_after_jump")
def cosine_after_jump(subject: Subject) -> float:
    """Of the first token's states of two texts, after the block of the jump."""
    jump = jump_of(subject)
    cosine_SP = np.array(subject.results("text").metrics["cosine_across_inputs"].values)
    return float("nan") if jump is None else float(cosine_SP[2 * jump + 2, 0])


@number("attention_norm_ratio")
def attention_norm_ratio(subject: Subject) -> Floats:
    """Of what block 0's attention returns, at the first token over the last."""
    norm_NP = subject.samples("text")["attention_branch_norm"][:, 0]
    return norm_NP[:, 0] / norm_NP[:, -1]


@number("square_sum")
def square_sum(subject: Subject) -> Floats:
    """At the last token."""
    return subject.samples("text")["square_sum"][:, 0, -1]


@number("jump_without_a_head")
def jump_without_a_head(subject: Subject) -> Floats:
    """Of the head whose absence lowers the norm most on average."""
    jump = jump_of(subject)
    if jump is None:
        return np.full(1, np.nan)
    share_HN = changes.norm_without_each_head(subject, jump)
    found: Floats = share_HN[share_HN.mean(1).argmin()]
    return found


for _what, _bos in (("bos", True), ("first", False)):

    @number(f"copies_of_{_what}")
    def copies(subject: Subject, bos: bool = _bos) -> Floats:
        """Loss after eight less that after one; NaN if there is no BOS."""
        if bos and not subject.has_bos:
            return np.full(1, np.nan)
        after = (changes.loss_after_copies(subject, n, bos=bos) for n in (changes.COPIES, 1))
        many, one = after
        return many - one


def _elsewhere(subject: Subject) -> tuple[Floats, Floats]:
    """Return [N, L'] of the last third's blocks but the last: the longest state's norm over the
    mean of the others, and the share of the next layer's heads with a sink on it; first token
    aside."""
    text = subject.samples("text")
    output_NLP = text["state_norm"][:, 2::2, 1:]
    layers = range(2 * output_NLP.shape[1] // 3, output_NLP.shape[1] - 1)
    ratios, sinks = [], []
    for layer in layers:
        norm_NP = output_NLP[:, layer, : output_NLP.shape[-1] // 2]
        at_N = norm_NP.argmax(1)
        highest_N = norm_NP.max(1)
        others_N = (output_NLP[:, layer].sum(1) - highest_N) / (output_NLP.shape[-1] - 1)
        ratios.append(highest_N / others_N)
        alpha_NH = text["alpha"][np.arange(len(at_N)), layer + 1, :, at_N + 1]
        sinks.append((alpha_NH > SINK_EPSILON).mean(1))
    return np.stack(ratios, 1), np.stack(sinks, 1)


@number("elsewhere_ratio")
def elsewhere_ratio(subject: Subject) -> Floats:
    """Largest over the blocks, of the first half of the positions."""
    return _elsewhere(subject)[0].max(1)


@number("elsewhere_sink")
def elsewhere_sink(subject: Subject) -> Floats:
    """In the block where that is largest."""
    ratio_NL, sink_NL = _elsewhere(subject)
    return sink_NL[np.arange(len(ratio_NL)), ratio_NL.argmax(1)]
