"""Every number of the page of real models once more, from transformers' eager attention.

Nothing of megasink measures on the expected side: see `oracle.py`.
"""

import itertools
import re
from functools import cache, partial

import numpy as np
import pytest
from scipy.stats import spearmanr
from torch.nn.functional import cosine_similarity

from examples.real_models import numbers_circuit  # noqa: F401  # registers numbers
from examples.real_models.claims import claims, measured
from examples.real_models.numbers import NUMBERS
from examples.real_models.tests.eager import passed
from examples.real_models.tests.inactive import (
    accuracy,
    growth,
    largest_iou,
    late,
    rank_of_ahon,
    removable,
    removable_on_task,
    when_cut,
)
from examples.real_models.tests.oracle import (
    BY_TEXT,
    DOMAINS,
    MEASURED,
    ORACLE,
    alpha,
    cosine_gap,
    key_dimensions,
    map_components,
    needs_model,
    product_ratio,
    query_cosine,
    ratio,
    sink_rate,
    small_subject,  # noqa: F401
    state_norms,
)
from megasink.analysis.capture.input_samples import inputs_of
from megasink.analysis.capture.probed_models import of_transformers
from megasink.analysis.options import AnalysisOptions

pytestmark = needs_model
NOT_HERE = {
    "removable_random": "which heads are drawn is megasink's",
    "task_random": "which heads are drawn is megasink's",
    "task_removable_random": "which heads are drawn is megasink's",
    "window_first_key": "no windows",
}


def of_made_up(subject, kind):
    """Return the mean sink rate of the tokens that an analysis without texts drew."""
    hub = subject.hub
    probed = of_transformers(hub.model, hub.tokenizer, "SmolLM2")
    options = AnalysisOptions(inputs=(kind,), seq_length=64, bos="none", max_samples=3)
    oracle = ORACLE()
    drawn = [oracle.of(sample.tokens) for sample in inputs_of(options, probed).samples]
    return np.mean([sink_rate(p) for p in drawn])


def later_sentences(_subject):
    """Sink rate of the tokens that begin a sentence in the first half of a text, but the first."""
    oracle, rates = ORACLE(), []
    for text in oracle.texts[:MEASURED]:
        offsets = oracle.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        begins = {match.start() for match in re.finditer(r"(?<=[.?!]\s)\S", text)}
        starts = [start + (text[start] == " ") for start, _ in offsets["offset_mapping"][:32]]
        chosen = [k for k in range(1, 32) if starts[k] in begins]
        if chosen:
            alpha_LHK = alpha(oracle.of(oracle.ids(text)))
            rates.append((alpha_LHK[..., chosen] > 0.3).double().mean())
    return np.mean(rates)


def first_long(p):
    """The block after which the first token is over 5 times as long as the others."""
    return int((ratio(state_norms(p)[2::2]) > 5).int().argmax())


@cache
def jump():
    """The block of every text that adds most to the first token's norm, of those in the first two
    thirds whose growth is left at half at least, and over 5 times the others' norm."""

    def of(p):
        norm, last = [float(n) for n in state_norms(p)[::2, 0]], 2 * ORACLE().layers // 3
        long = [b for b in range(last) if ratio(state_norms(p)[2 * b + 2]) > 5]
        lasts = [b for b in long if min(norm[b + 1 : last + 1]) >= norm[b + 1] / 2]
        return max(lasts, key=lambda b: norm[b + 1] - norm[b])

    (block,) = set(map(of, ORACLE().passes()))
    return block


def mlp_share(p):
    """Growth of the first token by the MLP, over that of the block."""
    before, middle, after = state_norms(p)[2 * jump() : 2 * jump() + 3, 0]
    return (after - middle) / (after - before)


def cosine_after_jump(_subject):
    """Mean cosine between the first token's states of two texts, after the block of the jump."""
    states = [p.state_STE[2 * jump() + 2, 0] for p in ORACLE().passes()]
    pairs = [cosine_similarity(a, b, dim=0) for a, b in itertools.combinations(states, 2)]
    return np.mean(pairs)


def without_a_head(_subject):
    """Norm of the first token after the jump without the head of block 0 that matters most, over
    that with all; mean over texts."""
    oracle = ORACLE()

    def norms(closed):
        def change(layer, map_HTT, value_HTD):
            out_HTD = map_HTT @ value_HTD
            if layer == 0 and closed is not None:
                out_HTD[closed] = 0
            return out_HTD

        texts = (oracle.ids(text) for text in oracle.texts[:MEASURED])
        return np.array(
            [state_norms(passed(oracle.model, ids, change))[2 * jump() + 2, 0] for ids in texts]
        )

    with_all = norms(None)
    heads = range(oracle.model.config.num_attention_heads)
    return min((norms(head) / with_all).mean() for head in heads)


def copies(*, bos):
    """Loss of tokens 1 on after eight of BOS, or of the first token, less that after one."""
    oracle = ORACLE()

    def loss(text, count):
        first, *others = oracle.ids(text)
        start = [oracle.tokenizer.bos_token_id] * count + [first] if bos else [first] * count
        return oracle.of((*start, *others)).nats_T[-len(others) :].mean()

    return np.mean([loss(text, 8) - loss(text, 1) for text in oracle.texts[:MEASURED]])


def elsewhere(p):
    """Return the largest ratio of a token of the first half to the others', in the blocks of the
    last third that another follows, and the share of sinks on it there."""
    rows = []
    for block in range(2 * ORACLE().layers // 3, ORACLE().layers - 1):
        norm_T = state_norms(p)[2 * block + 2, 1:]
        at = int(norm_T[: len(norm_T) // 2].argmax())
        others = (norm_T.sum() - norm_T[at]) / (len(norm_T) - 1)
        sinks = (alpha(p)[block + 1, :, at + 1] > 0.3).double().mean()
        rows.append((float(norm_T[at] / others), float(sinks)))
    return max(rows)


def imbalance(_subject):
    """Mean over layers of std over mean of importance, over all tokens (Eq. 6)."""
    importance_LH = ORACLE().each(BY_TEXT["importance"]).mean(0)
    return np.mean(importance_LH.std(-1) / importance_LH.mean(-1))


def between_domains(number):
    """Return a number's mean over the texts of each domain."""
    values, domains = ORACLE().each(number), np.array(DOMAINS[:MEASURED])
    return [values[domains == domain].mean(0) for domain in dict.fromkeys(DOMAINS)]


def drained(limit):
    """Rise of the loss if the first value is zero in the heads above a limit of AWFT (Eq. 9)."""
    oracle = ORACLE()

    def change(_layer, map_HTT, value_HTD):
        chosen_H = map_HTT[..., 0].mean(-1) > limit
        rest_HTT = map_HTT.clone()
        rest_HTT[chosen_H, :, 0] = 0
        return rest_HTT @ value_HTD

    texts = (oracle.ids(text) for text in oracle.texts[:MEASURED])
    return np.mean(
        [
            passed(oracle.model, ids, change).nats_T.mean() - oracle.of(ids).nats_T.mean()
            for ids in texts
        ]
    )


def mean(number):
    """Return a function that gives the mean over texts of a number of a pass."""
    return lambda _subject: ORACLE().each(number).mean()


def with_bos(_subject):
    """Sink rate with BOS before the text."""
    oracle = ORACLE()
    texts = [oracle.ids(text, 63) for text in oracle.texts[:MEASURED]]
    return np.mean([sink_rate(oracle.of((oracle.tokenizer.bos_token_id, *ids))) for ids in texts])


def shorter_less_longer(_subject):
    """Sink rate of long texts at 512 tokens less that at 64."""
    oracle = ORACLE()
    rates = [[sink_rate(p) for p in oracle.passes(tokens=n, texts=oracle.long)] for n in (512, 64)]
    return np.mean(rates[0]) - np.mean(rates[1])


EXPECTED = {
    "sink_rate": mean(sink_rate),
    "sink_rate_bos": with_bos,
    "sink_rate_512_less_64": shorter_less_longer,
    "sink_rate_random": partial(of_made_up, kind="random"),
    "sink_rate_repeated": partial(of_made_up, kind="repeated"),
    "sink_rate_between_domains": lambda _: np.ptp(between_domains(sink_rate)),
    "massive_ratio": lambda _: ORACLE().each(lambda p: ratio(state_norms(p)[2::2])).mean(0).max(),
    "first_value_ratio": mean(lambda p: ratio(p.value_LHTD.norm(dim=-1).mean(1)).mean()),
    "first_key_ratio": mean(lambda p: ratio(p.key_LHTD.norm(dim=-1).mean(1)).mean()),
    "cosine_gap": mean(cosine_gap),
    "product_ratio": mean(product_ratio),
    "sink_rate_of_later_sentences": later_sentences,
    "removable_ahon_ln": lambda _: removable("ahon_ln"),
    "ahon_rank": rank_of_ahon,
    "removable_awft": lambda _: removable("awft"),
    "task_accuracy": lambda _: accuracy()[0],
    **{f"task_{s}": lambda _, s=s: accuracy(s)[0] - accuracy()[0] for s in ("awft", "ahon_ln")},
    **{f"task_removable_{s}": lambda _, s=s: removable_on_task(s) for s in ("awft", "ahon_ln")},
    **{
        f"{s}_when_cut": lambda subject, s=s: np.mean(when_cut(subject, s)[0])
        for s in ("awft", "ahon_ln")
    },
    **{
        f"{s}_and_length": lambda subject, s=s: spearmanr(*when_cut(subject, s)[1:]).statistic
        for s in ("awft", "ahon_ln")
    },
    "largest_iou": largest_iou,
    "late_awft": lambda _: late("awft"),
    "late_ahon_ln": lambda _: late("ahon_ln"),
    "awft_growth": lambda _: growth("awft"),
    "ahon_ln_growth": lambda _: growth("ahon_ln"),
    "map_components": mean(map_components),
    "jump_block": lambda _: jump(),
    "mlp_share_of_jump": mean(mlp_share),
    "first_long_block": mean(first_long),
    "up_ratio": mean(lambda p: ratio(p.up_LTC[jump()].norm(dim=-1))),
    "gate_ratio": mean(lambda p: ratio(p.gate_LTC[jump()].norm(dim=-1))),
    "cosine_after_jump": cosine_after_jump,
    "attention_norm_ratio": mean(lambda p: p.branch_LTE[0, 0].norm() / p.branch_LTE[0, -1].norm()),
    "square_sum": mean(lambda p: p.map_LHTT[0, :, -1].square().sum(-1).mean()),
    "jump_without_a_head": without_a_head,
    "copies_of_bos": lambda _: copies(bos=True),
    "copies_of_first": lambda _: copies(bos=False),
    "elsewhere_ratio": mean(lambda p: elsewhere(p)[0]),
    "elsewhere_sink": mean(lambda p: elsewhere(p)[1]),
    "imbalance": imbalance,
    "importance_between_domains": lambda _: (
        spearmanr(*(x.ravel() for x in between_domains(BY_TEXT["importance"]))).statistic
    ),
    "drained_everywhere": lambda _: drained(-1),
    "drained_above_0.75": lambda _: drained(0.75),
    "query_cosine": mean(lambda p: query_cosine(p).mean()),
    "key_dimension_ratio": mean(key_dimensions),
}
"""Number of claims.toml -> the same of the texts here."""


def test_every_claim_is_computed_twice():
    assert {name for claim in claims() for name in claim.numbers} == {*EXPECTED, *NOT_HERE}


@pytest.mark.parametrize("name", EXPECTED)
def test_a_number_of_the_page(subject, name):
    found = measured(NUMBERS[name](subject))["number"]
    assert found == pytest.approx(float(EXPECTED[name](subject)), rel=2e-3, abs=2e-4)
