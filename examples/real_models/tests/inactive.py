"""Inactive heads (P3) of SmolLM2, from transformers' eager attention: what is zeroed by a score, in
texts and in a task, and at what loss.

Shapes: L layers, H heads, T tokens, D head dim.
"""

import itertools
import json
from functools import cache

import numpy as np

from examples.real_models.tests.eager import passed
from examples.real_models.tests.oracle import (
    MEASURED,
    ORACLE,
    PERCENTS,
    QUESTIONS,
    ROOT,
    SCORES,
    SIX,
    scores_of,
)


def threshold(score, share, scores=None):
    """Return the value with a share of the scores below it (P3.11), by default of the other
    texts."""
    oracle = ORACLE()
    scores = scores or map(scores_of, oracle.passes(texts=oracle.texts[MEASURED:]))
    ordered = np.sort(np.concatenate([found[score].flatten() for found in scores]))
    share_of = np.arange(1, len(ordered) + 1) / len(ordered)
    share = 1 - share if score.startswith("awft") else share
    return np.interp(share, share_of, ordered)


def idle(p, score, limit):
    """Return [L, H]: the heads whose score calls them inactive."""
    values = scores_of(p)[score]
    return values > limit if score.startswith("awft") else values < limit


def zeroing(score, limit, closed):
    """Return what closes the heads that a score calls inactive (P3.12): a layer's scores are those
    after the heads of earlier layers were zeroed. Adds each layer's share to `closed`."""

    def change(_layer, map_HTT, value_HTD):
        out_HTD = map_HTT @ value_HTD
        if score == "awft":
            idle_H = map_HTT[..., 0].mean(-1) > limit
        else:
            norm_H = out_HTD.norm(dim=-1).mean(-1)
            idle_H = (norm_H / norm_H.mean() if score.endswith("_ln") else norm_H) < limit
        closed.append(idle_H.double().mean())
        return out_HTD * ~idle_H[:, None, None]

    return change


def zeroed_by(score, percent):
    """Return the percentage of heads zeroed, and the loss, of the measured texts."""
    limit, oracle = threshold(score, percent / 100), ORACLE()
    shares, nats = [], []
    for text in oracle.texts[:MEASURED]:
        closed = []
        change = zeroing(score, limit, closed)
        nats.append(passed(oracle.model, oracle.ids(text), change).nats_T.mean())
        shares.append(np.mean(closed))
    return 100 * np.mean(shares), np.mean(nats)


def requests():
    """Yield each question of the task: tokens of it with each answer, and of the answer alone."""
    path = ROOT / "megasink/analysis/evaluate/tasks/docstrings_choice.json"
    for item in json.loads(path.read_text())[:QUESTIONS]:
        before = len(ORACLE().ids(item["context"], None))
        whole = [ORACLE().ids(f"{item['context']} {choice}", None) for choice in item["choices"]]
        yield [(ids, ids[before:]) for ids in whole], item["answer"]


@cache
def accuracy(score=None, share=0.1):
    """Return the percentage of questions whose answer is the likeliest, with a share of the heads
    closed by a score, and the percentage closed. A model reads all tokens but the last, and
    thresholds are of what it reads."""
    model, change, closed = ORACLE().model, None, []
    if score:
        change = zeroing(score, threshold(score, share, scores_of_requests()), closed)
    right = []
    for answers, best in requests():
        nats = []
        for ids, answer in answers:
            p = passed(model, ids[:-1], change)
            last = -p.last_V.log_softmax(-1)[ids[-1]]
            nats.append(float(last + p.nats_T[len(p.nats_T) - len(answer) + 1 :].sum()))
        right.append(np.argmin(nats) == best)
    return 100 * np.mean(right), 100 * float(np.mean(closed or [0.0]))


@cache
def scores_of_requests():
    """Return the scores of each request of the task."""
    answers = [ids for answers, _ in requests() for ids, _ in answers]
    return [scores_of(passed(ORACLE().model, ids[:-1])) for ids in answers]


@cache
def line_of(score):
    """Return the points of a score's curve."""
    return [zeroed_by(score, percent) for percent in PERCENTS]


def removable(score):
    """Return the percentage at which the loss has risen by 1 %: the last crossing (P3.15)."""
    unchanged = float(np.mean([p.nats_T.mean() for p in ORACLE().passes()]))
    x, y = np.array(line_of(score)).T
    return last_crossing(x, 1.01 * unchanged - y)


def last_crossing(x, kept):
    """Return where a curve last crosses zero; its end if it stays above, 0 if below."""
    fine = np.linspace(x[0], x[-1], 100_001)
    above = np.interp(fine, x, kept) > 0
    crossings = np.flatnonzero(above[:-1] != above[1:])
    return fine[crossings[-1]] if len(crossings) else x[-1] * above.all()


def removable_on_task(score):
    """Return the percentage at which the accuracy has fallen by a point (P3.15)."""
    unchanged, _ = accuracy()
    y, x = zip(
        (unchanged, 0.0), *(accuracy(score, share) for share in (0.1, 0.2, 0.3)), strict=True
    )
    return last_crossing(np.array(x), np.array(y) - (unchanged - 1))


def rank_of_ahon(_subject):
    """Rank of the better AHON by the mean loss over its curve, among the scores."""
    area = {}
    for score in SCORES:
        x, y = np.array(line_of(score)).T
        area[score] = np.trapezoid(y, x) / (x[-1] - x[0])
    best = min(area["ahon"], area["ahon_ln"])
    return 1 + sum(other < best for other in area.values())


def largest_iou(_subject):
    """Of the masks of two of the six scores, each with the 10 % least active heads."""
    masks = []
    for score in SIX:
        values = np.concatenate([scores_of(p)[score].flatten() for p in ORACLE().passes()])
        order = np.argsort(-values if score == "awft" else values, kind="stable")
        masks.append(set(order[: len(values) // 10].tolist()))
    return max(len(a & b) / len(a | b) for a, b in itertools.combinations(masks, 2))


def late(score):
    """Share of inactive heads in the last third of the layers less that in the first."""
    limit, third = threshold(score, 0.15), ORACLE().layers // 3
    layers = ORACLE().each(lambda p: idle(p, score, limit).double().mean(-1)).mean(0)
    return layers[-third:].mean() - layers[:third].mean()


def growth(score):
    """Share of inactive heads at 128 tokens over that at 32."""
    limit = threshold(score, 0.15)
    shares = [
        ORACLE().each(lambda p: idle(p, score, limit).double(), tokens=tokens).mean()
        for tokens in (32, 128)
    ]
    return shares[1] / shares[0]


def when_cut(subject, score):
    """Return the share of inactive heads in each long text, cut as the analysis drew, by a
    threshold of texts of 64 tokens and by one of these; and the lengths."""
    arrays, oracle = subject.samples("cut").arrays, ORACLE()
    numbers = [int(str(source).rpartition(":")[2]) - 1 for source in arrays["source"]]
    lengths = arrays["tokens"]
    cut = [
        oracle.of(oracle.ids(oracle.long[number], int(tokens)))
        for number, tokens in zip(numbers, lengths, strict=True)
    ]
    limits = threshold(score, 0.15), threshold(score, 0.15, [scores_of(p) for p in cut])
    shares = ([float(idle(p, score, at).double().mean()) for p in cut] for at in limits)
    return *shares, lengths
