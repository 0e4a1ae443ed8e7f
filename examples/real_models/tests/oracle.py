"""Oracles for the page of real models: SmolLM2 in eager attention, and the papers' definitions.

Texts are those of the license.

It takes runs/real-models/smollm2, or the folder that MEGASINK_TEST_SMOLLM2 names.

Shapes: N texts, L layers, H heads, T tokens, D head dim, S states of the residual stream.
"""

import json
import os
from dataclasses import asdict
from functools import cache, lru_cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import cosine_similarity, normalize
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples.real_models import analyses, changes, numbers_circuit  # noqa: F401
from examples.real_models.analyses import Subject
from examples.real_models.tests.conftest import without_plugin  # noqa: F401  # an analysis adds metrics
from examples.real_models.tests.eager import passed
from examples.real_models.texts import Text
from megasink.cli import main as megasink

ROOT = Path(__file__).parents[3]
MODEL = Path(os.environ.get("MEGASINK_TEST_SMOLLM2") or ROOT / "runs/real-models/smollm2").resolve()
needs_model = pytest.mark.skipif(
    not (MODEL / "model.safetensors").is_file(),
    reason="needs SmolLM2: python -m examples.real_models.fetch smollm2, or MEGASINK_TEST_SMOLLM2",
)

MEASURED, SCORED = 4, 4
PERCENTS = (5, 10, 30)
"""Not 0: there AWFT's threshold is the weight of a head that looks at the first token alone, and
others lie within a rounding of it (3e-7)."""
QUESTIONS = 4
SCORES = ("awft", "ahon", "ahon_ln")
SIX = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon")
P3 = (*SIX, *(f"{score}_ln" for score in SIX), "circuit_ahon", "circuit_ahon_ln", "lthon_hn")
WORDS = 160
"""Of a text; more than 128 tokens."""


class Oracle:
    """The model in eager attention, the texts, and each pass once."""

    def __init__(self):
        self.tokenizer = AutoTokenizer.from_pretrained(MODEL)
        self.model = AutoModelForCausalLM.from_pretrained(
            MODEL, attn_implementation="eager", dtype=torch.float32
        )
        words = (ROOT / "LICENSE").read_text().split()
        starts = range(0, WORDS * (MEASURED + SCORED), WORDS)
        self.texts = [" ".join(words[at : at + WORDS]) for at in starts]
        self.long = [" ".join(words[at : at + 500]) for at in (200, 600, 1000)]
        self.layers = self.model.config.num_hidden_layers

    def ids(self, text, tokens=64):
        """Return the text's first tokens, without BOS."""
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"][:tokens])

    def of(self, ids):
        """Return the pass of some tokens; the last few are kept."""
        return pass_of(ids)

    def passes(self, tokens=64, texts=None):
        """Yield the passes of the measured texts."""
        for text in self.texts[:MEASURED] if texts is None else texts:
            yield self.of(self.ids(text, tokens))

    def each(self, number, **options):
        """Return a number of each text, [N, ...]."""
        return np.stack([np.asarray(number(p)) for p in self.passes(**options)])


ORACLE = cache(Oracle)


@lru_cache(maxsize=2 * MEASURED)
def pass_of(ids):
    """Return the pass of some tokens."""
    return passed(ORACLE().model, list(ids))


@pytest.fixture(scope="module", name="subject")
def small_subject(tmp_path_factory):
    """SmolLM2, and texts of the license in the place of the wheels'."""
    oracle = ORACLE()
    folder = tmp_path_factory.mktemp("independent")
    (folder / "runs/real-models").mkdir(parents=True)
    texts = [Text(domain, "", "", text) for domain, text in zip(DOMAINS, oracle.texts, strict=True)]
    path = folder / "runs/real-models/texts.jsonl"
    path.write_text("".join(json.dumps(asdict(text)) + "\n" for text in texts))
    long = [Text(DOMAINS[0], "", "", text) for text in oracle.long]
    tokens = (*analyses.ANALYSES["tokens"], "--max-samples", "3")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for module in (analyses, changes):
            patch.setattr(module, "MEASURED", MEASURED)
            patch.setattr(module, "long_texts", lambda: long)
            patch.setattr(module, "FEW", MEASURED)
        patch.setattr(analyses, "SCORES", SCORES)
        patch.setattr(analyses, "QUESTIONS", QUESTIONS)
        patch.setattr(analyses, "DRAWN", (10, 300))
        patch.setattr(analyses, "PERCENTS", tuple(map(str, PERCENTS)))
        patch.setattr(analyses, "command", command)
        patch.setitem(analyses.ANALYSES, "tokens", tokens)
        yield Subject(MODEL)


DOMAINS = ("first", "first", "second", "second") * 2
"""Of each text; a domain is a file, and an analysis has its texts together."""


def command(*words):
    """Run a command in this process."""
    assert megasink([*words]) == 0


def layer_normalized(values_LH):
    """A layer's scores over their mean (P3.7)."""
    return values_LH / values_LH.mean(-1, keepdim=True)


def scores_of(p):
    """Return P3's scores of a text, each [L, H]."""
    map_LHTT, out_LHTD, value_LHTD = p.map_LHTT, p.out_LHTD, p.value_LHTD
    scores = {
        "awft": map_LHTT[..., 0].mean(-1),
        "aeqd": torch.special.entr(map_LHTT).sum(-1).mean(-1),
        "ftvvn": value_LHTD[..., 0, :].norm(dim=-1),
        "avvn": value_LHTD.norm(dim=-1).mean(-1),
        "lthon": out_LHTD[..., -1, :].norm(dim=-1),
        "ahon": out_LHTD.norm(dim=-1).mean(-1),
    }
    weights = [block.self_attn.o_proj.weight.double() for block in ORACLE().model.model.layers]
    weight_LEHD = torch.stack(weights).detach().unflatten(-1, (out_LHTD.shape[1], -1))
    written_LHTE = torch.einsum("lhtd,lehd->lhte", out_LHTD, weight_LEHD)
    scores["circuit_ahon"] = written_LHTE.norm(dim=-1).mean(-1)
    of_layers = {f"{name}_ln": layer_normalized(values) for name, values in scores.items()}
    return {**scores, **of_layers, "lthon_hn": scores["lthon"] / scores["ahon"]}


def alpha(p):
    """Return [L, H, T]: mean weight on key k over the queries from k on (P2.1)."""
    return p.map_LHTT.sum(-2) / torch.arange(p.map_LHTT.shape[-1], 0, -1)


def over_keys(values_LHTT):
    """Return [L, T - 1]: of queries t from 1 on, the mean over keys 1 to t and over heads."""
    rows = [values_LHTT[..., t, 1 : t + 1].mean(-1) for t in range(1, values_LHTT.shape[-1])]
    return torch.stack(rows, -1).mean(1)


def cosines(p):
    """Return [L, H, T, T]: cos(q_i, k_j)."""
    return normalize(p.query_LHTD, dim=-1) @ normalize(p.key_LHTD, dim=-1).mT


def products(p):
    """Return [L, H, T, T]: |q_i| |k_j|."""
    return p.query_LHTD.norm(dim=-1)[..., None] * p.key_LHTD.norm(dim=-1)[..., None, :]


def ratio(norm_XT):
    """Return [X]: of the first token over the mean of the others."""
    return norm_XT[..., 0] / norm_XT[..., 1:].mean(-1)


def state_norms(p):
    """Return [S, T]."""
    return p.state_STE.norm(dim=-1)


def key_dimension(p):
    """Return [L, H]: participation ratio of the eigenvalues of the keys' covariance."""
    key_LHTD = p.key_LHTD[:, :, 1:]
    centered = key_LHTD - key_LHTD.mean(-2, keepdim=True)
    eigenvalues = torch.linalg.svdvals(centered) ** 2
    return eigenvalues.sum(-1) ** 2 / eigenvalues.square().sum(-1)


def query_cosine(p):
    """Return [L, H]: mean cosine of the queries from 1 on with their mean."""
    query_LHTD = p.query_LHTD[:, :, 1:]
    return cosine_similarity(query_LHTD, query_LHTD.mean(-2, keepdim=True), dim=-1).mean(-1)


def sink_rate(p, epsilon=0.3):
    """Return the share of heads with alpha_0 above epsilon (P2.2)."""
    return float((alpha(p)[..., 0] > epsilon).double().mean())


def map_components(p):
    """Share of the variance of all maps that two principal components explain (P3.27)."""
    rows = p.map_LHTT.flatten(0, 1).flatten(1)
    variance = torch.linalg.svdvals(rows - rows.mean(0)).square()
    return variance[:2].sum() / variance.sum()


def cosine_gap(p):
    """Cosine with the first key less that with the others, over queries from 1 on."""
    return (cosines(p)[..., 1:, 0].mean(1) - over_keys(cosines(p))).mean()


def product_ratio(p):
    """|q| |first key| over |q| |other key|, over queries from 1 on."""
    return (products(p)[..., 1:, 0].mean(1) / over_keys(products(p))).mean()


def key_dimensions(p):
    """Mean effective dimension of heads with a sink over that of the others."""
    sink_LH = alpha(p)[..., 0] > 0.3
    return key_dimension(p)[sink_LH].mean() / key_dimension(p)[~sink_LH].mean()


def sparsity(p, limit):
    """Return [L]: the share of heads' outputs below a limit."""
    return (p.out_LHTD.abs() < limit).double().mean((1, 2, 3))


BY_TEXT = {
    **{name: partial(lambda p, name: scores_of(p)[name], name=name) for name in P3},
    "importance": lambda p: 1 - p.map_LHTT[..., 0].mean(-1),
    "alpha": alpha,
    "square_sum": lambda p: p.map_LHTT.square().sum(-1).mean(1),
    "first_weight": lambda p: p.map_LHTT[..., 0].mean(1),
    "sink_alpha": lambda p: alpha(p)[..., :32].amax(-1),
    "sink_position": lambda p: alpha(p)[..., :32].argmax(-1),
    "value_norm": lambda p: p.value_LHTD.norm(dim=-1).mean(1),
    "key_norm": lambda p: p.key_LHTD.norm(dim=-1).mean(1),
    "query_norm": lambda p: p.query_LHTD.norm(dim=-1).mean(1),
    "output_norm": lambda p: p.out_LHTD.norm(dim=-1).mean(1),
    "first_key_cosine": lambda p: cosines(p)[..., 0].mean(1),
    "first_key_product": lambda p: products(p)[..., 0].mean(1),
    "state_norm": state_norms,
    "massive_ratio": lambda p: ratio(state_norms(p)),
    "state_abs_max": lambda p: p.state_STE.abs().amax((1, 2)),
    "attention_abs_max": lambda p: p.branch_LTE.abs().amax((1, 2)),
    "mlp_abs_max": lambda p: p.mlp_LTE.abs().amax((1, 2)),
    "attention_branch_norm": lambda p: p.branch_LTE.norm(dim=-1),
    "abs_mean_after_gate": lambda p: p.out_LHTD.abs().mean((1, 2, 3)),
    "abs_mean_before_gate": lambda p: p.out_LHTD.abs().mean((1, 2, 3)),
    **{f"sparsity_{side}_gate{suffix}": partial(sparsity, limit=limit)
       for side in ("before", "after") for suffix, limit in (("", 1e-2), ("_1e-3", 1e-3))},
    "query_cosine": query_cosine,
    "key_dimension": key_dimension,
}  # fmt: skip
"""Metric -> its values in a text, as samples.npz has them."""
