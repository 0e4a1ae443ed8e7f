"""The glossary of a report, and the papers that define its numbers."""

from markupsafe import Markup

from megasink.analysis.pages import html
from megasink.attention.definitions import SINK_EPSILON

PAPERS = {
    "P0": (
        "Attention Sink Forges Native MoE in Attention Layers: Sink-Aware Training to Address Head "
        "Collapse",
        "2602.01203",
    ),
    "P1": (
        "Gated Attention for Large Language Models: Non-linearity, Sparsity, and "
        "Attention-Sink-Free",
        "2505.06708",
    ),
    "P2": ("When Attention Sink Emerges in Language Models: An Empirical View", "2410.10781"),
    "P3": ("Identifying and Evaluating Inactive Heads in Pretrained LLMs", "2504.03889"),
    "P4": (
        "How Attention Sinks Emerge in Large Language Models: An Interpretability Perspective",
        "2603.06591",
    ),
}
"""Short name -> title, arXiv number. P0.7 is row 7 of P0 in docs/papers.md."""
WORDS = {
    "attention sink": f"a token that a head gives more than {SINK_EPSILON} of its attention, on "
    "average over the later tokens (P2); mostly the first",
    "massive activation": "a hidden state, mostly the first token's, that is many times as long as "
    "the others (P4)",
    "head importance": "the mean share of a head's attention that does not go to the sink, or the "
    "mean of its gate (P0)",
    "head imbalance": "the coefficient of variation of importance over a layer's heads, mean over "
    "layers (P0)",
    "AWFT": "average weight of the first token (P3)",
    "AEQD": "average entropy of the query distributions (P3)",
    "FTVVN": "first token's value vector norm (P3)",
    "AVVN": "average value vector norm (P3)",
    "LTHON": "last token's head output norm (P3)",
    "AHON": "average head output norm (P3)",
    "(LN)": "divided by the mean over the layer's heads (P3)",
    "(HN)": "divided by the same head's AHON (P3)",
    "nats per token": "the cross-entropy loss with the natural logarithm",
}


def words_and_papers() -> str:
    """Return the section of the page."""
    papers = [[key, title, f"arXiv {number}"] for key, (title, number) in PAPERS.items()]
    links = [f"https://arxiv.org/abs/{number}" for _, number in PAPERS.values()]
    note = "P0.10 and the like are rows of megasink's list of what each paper defines. The limits "
    note += "in the sentences of the summary are megasink's own, as is the sink center."
    return Markup("").join(
        [
            html.table(["word", "meaning"], [*map(list, WORDS.items())], kind="facts"),
            html.table(["", "paper", ""], papers, kind="facts", links=links),
            html.paragraph(note, "note"),
        ]
    )
