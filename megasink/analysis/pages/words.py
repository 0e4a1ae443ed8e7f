"""The glossary of a report, and the papers that define its numbers."""

from markupsafe import Markup

from megasink.analysis.pages import html
from megasink.attention.definitions import SINK_EPSILON
from megasink.console.papers import PAPERS

WORDS = {
    "token 0, first token": "the first token that the model reads: BOS, the token that begins a "
    "text, where the tokenizer adds one",
    "attention sink": f"a token that a head gives more than {SINK_EPSILON} of its attention, on "
    "average over the later tokens (P2); mostly the first",
    "alpha_k, weight on key k": "the mean attention of a head to token k, over the "
    "tokens from k on",
    "sink rate": "the share of heads with a sink on one token, mean over samples (P2); eps is the "
    "limit that its weight exceeds",
    "even head": "a head that attends evenly to all tokens so far gives the first of T tokens (1 + "
    "1/2 + ... + 1/T) / T of its attention",
    "F-Attn": "the mean weight on the first token over heads, rows and samples (P1)",
    "sink center": "the token with the highest mean weight over all heads; by direction, the one "
    "whose states are most alike in all texts (P4)",
    "drain threshold": "0.75, the weight on the first token from which P0 calls a head drained",
    "prominent": "after a block over 5 times as long as the mean of the others, and given more "
    "than 0.3 of the attention in the next layer with attention (P4)",
    "circuit stage": "none: no sink rate of 0.05; broad: several of the first tokens; shifted: one "
    "token, not the first; forming: the first token, not prominent; middle: prominent only after "
    "the first third of the blocks; fixed: within it (P4; megasink's rules)",
    "hidden state, x": "what the model carries from layer to layer for a token: x_0 the embedding, "
    "x_(l + 1/2) after attention of layer l, x_(l + 1) the output of layer (block) l",
    "norm, L2 norm": "the length of a vector: the root of its summed squares",
    "massive activation": "a hidden state, mostly the first token's, that is many times as long as "
    "the others (P4)",
    "activation": "one number of a hidden state, or of the output that attention (attn_residual) "
    "or the MLP (ffn_residual), the feed-forward part of a block, adds to it",
    "queries, keys, values": "q, k and v: token i attends to token j by q_i k_j, and reads v_j",
    "group": "query heads that share keys and values",
    "sink or bias": "a learnable sink takes attention and adds nothing; a learnable bias is a key "
    "with a value of its own (P0, P2)",
    "cosine": "of the angle between two vectors: 1 for the same direction, 0 for a right angle",
    "gate": "the factor on a head's output: the explicit gate of a gated model, otherwise the "
    "share of attention that does not go to the sink (P0, P1)",
    "head importance": "the mean share of a head's attention that does not go to the sink, or the "
    "mean of its gate (P0)",
    "head imbalance": "the coefficient of variation of importance over a layer's heads, mean over "
    "layers (P0)",
    "gradient": "how much the loss changes with a factor of a head's output, by a backward pass; "
    "signed: the first-order rise of the loss without the head",
    "inactive head": "a head of a sample whose score is beyond a threshold (P3)",
    "AWFT": "average weight of the first token (P3)",
    "AEQD": "average entropy of the query distributions (P3)",
    "FTVVN": "first token's value vector norm (P3)",
    "AVVN": "average value vector norm (P3)",
    "LTHON": "last token's head output norm (P3)",
    "AHON": "average head output norm (P3); circuit AHON: after the output projection",
    "(LN)": "divided by the mean over the layer's heads (P3)",
    "(HN)": "divided by the same head's AHON (P3)",
    "random score": "a number drawn for each head and sample, the baseline of the scores (P3)",
    "CDF": "cumulative distribution: the share of heads whose value is at most so large",
    "IoU": "intersection over union of two sets of heads",
    "Spearman": "rank correlation, 1 for the same order; W1: Wasserstein distance between two "
    "distributions, in the unit of the values",
    "PCA, t-SNE": "projections of vectors to two dimensions; distances of t-SNE are not to scale",
    "loss, nats per token": "the mean cross-entropy of the targets, the tokens that are predicted, "
    "with the natural logarithm; perplexity is its "
    "exponential, and bits per byte the loss in bits over the bytes of the text",
    "population std": "the standard deviation with the count as its divisor",
    "NaN": "no number: there is nothing to measure",
    "AUC": "area under a curve over its span: the mean value",
}


def words_and_papers() -> str:
    """Return the section of the page."""
    papers = [[key, title, f"arXiv {number}"] for key, (title, number) in PAPERS.items()]
    links = [f"https://arxiv.org/abs/{number}" for _, number in PAPERS.values()]
    note = "P0.10 and similar names are rows of megasink's list of each paper's definitions. The "
    note += "limits in the sentences of the summary are megasink's own, as is the sink center."
    return Markup("").join(
        [
            html.table(["word", "meaning"], [*map(list, WORDS.items())], kind="facts"),
            html.table(["", "paper", ""], papers, kind="facts", links=links),
            html.paragraph(note, "note"),
        ]
    )
