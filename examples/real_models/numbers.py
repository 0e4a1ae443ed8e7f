"""The numbers of claims.toml: each a function of a model, by text where texts have one each.

Positions and blocks count from 0. States are listed by halves: 0 the embedding, 2 l + 1 after
attention of block l, 2 l + 2 its output.

Shapes: N texts, L layers, H heads, S states, P positions.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from examples.real_models import changes
from examples.real_models.analyses import LENGTHS, Floats, Subject
from examples.real_models.importance import DRAWS, SEED, rank_correlation
from megasink.analysis.ablate.quality_curves import kept_level
from megasink.analysis.ablate.quality_curves import removable as curve_removable
from megasink.analysis.metrics.residual_stream import longest_first_token
from megasink.analysis.metrics.sinks import DRAIN, EPSILONS
from megasink.analysis.result_schemas import ALL, AblationCurve, AblationPoint, mean_line
from megasink.attention.constants import SINK_EPSILON


class Estimate(NamedTuple):
    """A number that is no mean over texts, with its interval and what it was drawn from."""

    number: float
    interval: tuple[float, float]
    texts: int


Number = Callable[[Subject], Any]
NUMBERS: dict[str, Number] = {}
"""Name -> function that returns [N], one value for each text, a float, or an `Estimate`; NaN where
the model has no such thing. The mean over texts is the number, and its interval is theirs."""

SIX = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon")


def number(name: str) -> Callable[[Number], Number]:
    """Register a number under its name in claims.toml."""

    def register(function: Number) -> Number:
        NUMBERS[name] = function
        return function

    return register


def rate(awft_NLH: Floats, epsilon: float = SINK_EPSILON) -> Floats:
    """Return [N]: share of the heads with a sink on the first token."""
    return (awft_NLH > epsilon).mean((1, 2))


@number("sink_rate")
def sink_rate(subject: Subject) -> Floats:
    """Of text without BOS."""
    return rate(subject.samples("text")["awft"])


@number("sink_rate_bos")
def sink_rate_bos(subject: Subject) -> Floats:
    """Of text with BOS; NaN if there is none."""
    return np.full(1, np.nan) if not subject.has_bos else rate(subject.samples("bos")["awft"])


@number("sink_rate_512_less_64")
def sink_rate_512_less_64(subject: Subject) -> Floats:
    """Paired: of the same long texts, cut."""
    return rate(subject.scores_at(512, long=True)["awft"]) - rate(
        subject.scores_at(64, long=True)["awft"]
    )


for _kind in ("random", "repeated"):

    @number(f"sink_rate_{_kind}")
    def sink_rate_of_tokens(subject: Subject, kind: str = _kind) -> Floats:
        """Of made-up tokens, without BOS."""
        return rate(subject.samples("tokens").of(kind)["awft"])


@number("sink_rate_between_domains")
def sink_rate_between_domains(subject: Subject) -> float:
    """Highest of a domain less the lowest."""
    samples = subject.samples("text")
    return float(np.ptp([rate(samples.of(d)["awft"]).mean() for d in np.unique(samples.dataset_N)]))


@number("massive_ratio")
def massive_ratio(subject: Subject) -> Floats:
    """Of each text, after the block with the longest first token in their mean."""
    ratio_NS = subject.samples("text")["massive_ratio"]
    return ratio_NS[:, 2 * longest_first_token(ratio_NS.mean(0)) + 2]


def first_over_others(values_NLP: Floats) -> Floats:
    """Return [N]: the first position's value over the mean of the others, mean over layers."""
    return (values_NLP[..., 0] / values_NLP[..., 1:].mean(-1)).mean(1)


for _what in ("value", "key"):

    @number(f"first_{_what}_ratio")
    def first_ratio(subject: Subject, what: str = _what) -> Floats:
        """Norm of the first over that of the others."""
        return first_over_others(subject.samples("text")[f"{what}_norm"])


@number("cosine_gap")
def cosine_gap(subject: Subject) -> Floats:
    """With the first key less with others, over queries from 1 on."""
    text = subject.samples("text")
    return (text["first_key_cosine"] - text["other_key_cosine"])[..., 1:].mean((1, 2))


@number("product_ratio")
def product_ratio(subject: Subject) -> Floats:
    """Of norms, with the first key over others, over queries from 1 on."""
    text = subject.samples("text")
    return (text["first_key_product"] / text["other_key_product"])[..., 1:].mean((1, 2))


@number("sink_rate_of_later_sentences")
def sink_rate_of_later_sentences(subject: Subject) -> Floats:
    """Of the first tokens of later sentences; texts that have any."""
    text = subject.samples("text")
    by_source = dict(zip(text.arrays["source"], text["alpha"], strict=True))
    found = []
    for source, starts in zip(subject.sources(), changes.sentence_starts(subject), strict=True):
        if starts:
            found.append((by_source[source][..., starts] > SINK_EPSILON).mean())
    return np.array(found)


NUMBERS["window_first_key"] = changes.window_first_key


def curve_of(subject: Subject, score: str) -> AblationCurve:
    """Return a score's curve of the ablation, on all texts."""
    (found,) = (c for c in subject.ablation.curves if c.score == score and c.on == ALL)
    return found


def ablation_lines(subject: Subject) -> dict[str, Any]:
    """Return score -> the percentages of heads zeroed, and the losses."""
    found = subject.ablation
    return {score: mean_line(found.line(score), ALL) for score in found.scores}


def unchanged_loss(subject: Subject) -> float:
    """Return the loss that the ablation begins with, in nats per token."""
    return subject.ablation.unchanged.number(ALL)


def losses_of(subject: Subject, points: Sequence[AblationPoint]) -> Floats:
    """Return [N]: the loss of each text, in nats per token, mean over points, which are seeds."""
    found = [subject.ablation_point(point.key).texts for point in points]
    rows = [[(text.nats or math.nan) / (text.targets or 1) for text in texts] for texts in found]
    return np.array(rows, dtype=np.float64).mean(0)


for _score in ("ahon_ln", "awft", "random"):

    @number(f"removable_{_score}")
    def removable(subject: Subject, score: str = _score) -> Estimate:
        """Percent of heads, by the crossing of 1 % of the loss (P3.15); interval over texts."""
        line = subject.ablation.line(score)
        zeroed_P = np.array(mean_line(line, ALL)[0])
        loss_PN = np.array([losses_of(subject, points) for points in line.values()])
        unchanged_N = losses_of(subject, [subject.ablation.unchanged])
        count = len(unchanged_N)
        drawn_DN = np.random.default_rng(SEED).integers(count, size=(DRAWS, count))

        def kept(at_N: Any) -> float:
            level = kept_level(float(unchanged_N[at_N].mean()), higher_is_better=False)
            found = curve_removable(
                zeroed_P, loss_PN[:, at_N].mean(1), level, higher_is_better=False
            )
            return float(zeroed_P.max()) if found.never_left else found.percent

        low, high = np.quantile([kept(at_N) for at_N in drawn_DN], (0.025, 0.975))
        return Estimate(kept(slice(None)), (float(low), float(high)), count)


@number("ahon_rank")
def ahon_rank(subject: Subject) -> float:
    """Rank by AUC, the least loss first."""
    return float(min(curve_of(subject, score).rank for score in ("ahon", "ahon_ln")))


@number("largest_iou")
def largest_iou(subject: Subject) -> float:
    """Of two of the six scores, at 10 % of heads."""
    agreement = subject.results("text").inactive_heads.agreement
    at = [agreement.scores.index(score) for score in SIX]
    return float(max(agreement.iou[i][j] or 0 for i, j in itertools.combinations(at, 2)))


def inactive(subject: Subject, score: str, values_NLH: Floats, by: str = "scored") -> Floats:
    """Return [N, L, H]: whether a head is inactive, by the threshold at 15 % of an analysis."""
    threshold = subject.results(by).inactive_heads.thresholds[score]["0.15"]
    return values_NLH > threshold if score == "awft" else values_NLH < threshold


for _score in ("awft", "ahon_ln"):

    @number(f"late_{_score}")
    def late(subject: Subject, score: str = _score) -> Floats:
        """Share of inactive heads in the last third of the layers less that in the first."""
        idle_NLH = inactive(subject, score, subject.samples("text")[score])
        third = max(1, idle_NLH.shape[1] // 3)
        return idle_NLH[:, -third:].mean((1, 2)) - idle_NLH[:, :third].mean((1, 2))

    @number(f"{_score}_growth")
    def growth(subject: Subject, score: str = _score) -> float:
        """Share of inactive heads at 128 tokens over that at 32, of the same texts."""
        short, long = (
            inactive(subject, score, subject.scores_at(tokens)[score]).mean()
            for tokens in (32, 128)
        )
        return float(long / short)


NUMBERS["map_components"] = changes.map_components


@number("imbalance")
def imbalance(subject: Subject) -> float:
    """Of importance over all tokens, mean over layers."""
    return float(subject.results("text").metrics["imbalance"].number)


@number("importance_between_domains")
def importance_between_domains(subject: Subject) -> float:
    """Lowest rank correlation over all heads between two domains."""
    samples = subject.samples("text")
    means = [samples.of(d)["importance"].mean(0).ravel() for d in np.unique(samples.dataset_N)]
    return min(rank_correlation(a, b) for a, b in itertools.combinations(means, 2))


@number("drained_everywhere")
def drained_everywhere(subject: Subject) -> Floats:
    """Rise of the loss."""
    return changes.loss_drained(subject, None) - changes.loss_unchanged(subject)


@number("drained_above_0.75")
def drained_above(subject: Subject) -> Floats:
    """Rise of the loss."""
    return changes.loss_drained(subject, DRAIN) - changes.loss_unchanged(subject)


@number("query_cosine")
def query_cosine(subject: Subject) -> Floats:
    """Mean over heads."""
    return subject.samples("text")["query_cosine"].mean((1, 2))


@number("key_dimension_ratio")
def key_dimension_ratio(subject: Subject) -> Floats:
    """Mean over the heads with a sink over that of the others; texts that have both."""
    text = subject.samples("text")
    sink_NLH, dimension_NLH = text["awft"] > SINK_EPSILON, text["key_dimension"]
    both = sink_NLH.any((1, 2)) & ~sink_NLH.all((1, 2))
    with_N, without_N = (
        np.array([row[at].mean() for row, at in zip(dimension_NLH[both], which[both], strict=True)])
        for which in (sink_NLH, ~sink_NLH)
    )
    return with_N / without_N if both.any() else np.full(1, np.nan)


def sink_rates(subject: Subject) -> list[dict[str, Any]]:
    """Return the sink rates by length of the texts, and of the long texts (P2.3)."""
    return [
        {
            "long": long,
            "tokens": tokens,
            "rates": {str(epsilon): float(rate(awft_NLH, epsilon).mean()) for epsilon in EPSILONS},
        }
        for long, lengths in LENGTHS.items()
        for tokens in lengths
        for awft_NLH in (subject.scores_at(tokens, long=long)["awft"],)
    ]
