"""One self-contained HTML page: what was found in words, numbers and figures."""

import base64
import html
from collections.abc import Sequence
from itertools import combinations
from typing import Any

import numpy as np

from megasink.diagnostics.distances import spearman, top_agreement, wasserstein
from megasink.report.analysis import Analysis

STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 74rem; margin: 2rem auto; padding: 0 1.5rem;
       color: #1c2430; }
h1 { font-size: 1.6rem; } h2 { font-size: 1.15rem; margin-top: 2.2rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .3rem .8rem; border-bottom: 1px solid #d8dde5; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; } .note { color: #5a6472; font-size: .9rem; }
.warning { background: #fff3d6; padding: .6rem 1rem; border-left: 4px solid #d9a30d; }
"""

CAPTIONS = {
    "importance": "Head importance: mean gate of each head over all tokens (P0.12). White: no "
    "softmax attention.",
    "sinks": "Weight on the first token by layer, and share of heads whose mean weight on a key "
    "exceeds 0.3 (P1.31, P2.2).",
    "norms": "Norm of the hidden state by token position, and of the first token against the "
    "others (P4.1, P2.10).",
    "values": "Norms of values and keys by token, and cosine of queries with the first key against "
    "the mean over the other keys, dashed (P0.5, P2.8, P2.9).",
    "scores": "Distribution of the six scores of inactive heads over samples, layers and heads "
    "(P3.22).",
    "inactive_by_layer": "Where the inactive heads are (P3.20).",
    "agreement": "How much the scores agree on which heads are inactive (P3.18).",
    "gates": "Scores of the explicit gates (P1.29, P1.30).",
}

_NUMBERS = (
    ("head imbalance (P0.13)", "imbalance", "{:.3f}"),
    ("weight on the first token (P1.31)", "first_token_attention", "{:.3f}"),
    ("largest activation, mean over layers (P1.32)", "mean_max_activation", "{:.1f}"),
    ("nats per token", "nats_per_token", "{:.4f}"),
    ("perplexity", "perplexity", "{:.2f}"),
    ("bits per byte (P0.18)", "bits_per_byte", "{:.4f}"),
    ("samples", "samples", "{:,}"),
    ("tokens", "tokens", "{:,}"),
)


def page(analyses: Sequence[Analysis], pictures: dict[str, bytes]) -> str:
    """The page; figures are embedded, nothing is loaded from elsewhere.

    Args:
        pictures: of `figures`.
    """
    names = ", ".join(analysis.name for analysis in analyses)
    parts = [
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>",
        f"<title>megasink analyze: {html.escape(names)}</title><style>{STYLE}</style></head><body>",
        f"<h1>{html.escape(names)}</h1>",
        *(f"<p>{html.escape(in_words(analysis))}</p>" for analysis in analyses),
        *(_warning(analysis) for analysis in analyses if analysis.found["non_finite"]),
        _table(analyses),
    ]
    if len(analyses) > 1:
        parts.append(_distances(analyses))
    for name, png in pictures.items():
        data = base64.b64encode(png).decode()
        parts.append(
            f"<h2>{html.escape(name.replace('_', ' ').capitalize())}</h2>"
            f"<p class='note'>{html.escape(CAPTIONS[name])}</p>"
            f"<img alt='{html.escape(name)}' src='data:image/png;base64,{data}'>"
        )
    parts += [_datasets(analyses), *(_provenance(analysis) for analysis in analyses)]
    return "\n".join([*parts, "</body></html>"])


def in_words(analysis: Analysis) -> str:
    """Three sentences: the sink, the circuit, the heads."""
    found, circuit = analysis.found, analysis.found["circuit"]
    rate = found["sink_rate"]["0.3"][0]
    attention = found["first_token_attention"]
    prominent = circuit["prominent_after_block"]
    where = (
        "no block makes its norm stand out"
        if prominent is None
        else f"its norm stands out after block {prominent}"
    )
    importance = analysis.array("importance")
    flat = importance[np.isfinite(importance)]
    layer, head = np.unravel_index(np.nanargmin(importance), importance.shape)
    return (
        f"{analysis.name}: {100 * rate:.1f} % of the heads have a sink on the first token "
        f"(weight above 0.3), which gets {100 * attention:.1f} % of the attention; {where}, and "
        f"the circuit's stage is “{circuit['stage']}”, with its centre at position "
        f"{circuit['sink_centre_by_attention']}. Head importance runs from {flat.min():.3f} "
        f"(layer {layer}, head {head}) to {flat.max():.3f}; the head imbalance is "
        f"{found['imbalance']:.3f}."
    )


def _warning(analysis: Analysis) -> str:
    bad = analysis.found["non_finite"]
    first = bad[0]
    text = (
        f"{analysis.name}: {len(bad)} samples had infinite or NaN values and are in no average; "
        f"first {first['source']}, layers {first['layers']}, heads {first['heads']}."
    )
    return f"<p class='warning'>{html.escape(text)}</p>"


def _table(analyses: Sequence[Analysis]) -> str:
    head = "".join(f"<th>{html.escape(analysis.name)}</th>" for analysis in analyses)
    rows = []
    for label, key, form in _NUMBERS:
        values = [analysis.found.get(key) for analysis in analyses]
        if any(value is not None for value in values):
            rows.append(_row(label, [_shown(value, form) for value in values]))
    for epsilon in analyses[0].found["sink_rate"]:
        rates = [100 * a.found["sink_rate"][epsilon][0] for a in analyses]
        rows.append(_row(f"sink rate, eps {epsilon} (P2.2)", [f"{r:.1f} %" for r in rates]))
    return f"<table><tr><th></th>{head}</tr>{''.join(rows)}</table>"


def _row(label: str, cells: list[str]) -> str:
    return f"<tr><td>{html.escape(label)}</td>{''.join(f'<td>{c}</td>' for c in cells)}</tr>"


def _shown(value: Any, form: str) -> str:
    return "" if value is None else form.format(value)


def _distances(analyses: Sequence[Analysis]) -> str:
    """Every two models: W1 of two scores, and head by head where their shapes agree."""
    rows = []
    for a, b in combinations(analyses, 2):
        cells = [f"{wasserstein(a.scores[k], b.scores[k]):.4f}" for k in ("awft", "ahon_ln")]
        mine, theirs = a.array("importance"), b.array("importance")
        if mine.shape == theirs.shape:
            cells += [f"{spearman(mine, theirs):.3f}", f"{top_agreement(mine, theirs):.2f}"]
        else:
            cells += ["other shape", ""]
        rows.append(_row(f"{a.name} and {b.name}", cells))
    return (
        "<h2>Distances</h2><p class='note'>Wasserstein distance of the scores (P3.21); rank "
        "correlation and overlap of the five most important heads (P3.30).</p>"
        "<table><tr><th></th><th>W1 of AWFT</th><th>W1 of AHON (LN)</th><th>Spearman of importance"
        f"</th><th>IoU of top 5</th></tr>{''.join(rows)}</table>"
    )


def _datasets(analyses: Sequence[Analysis]) -> str:
    rows = []
    for analysis in analyses:
        for name, found in analysis.found["datasets"].items():
            numbers = [found["imbalance"], found["sink_rate"]["0.3"][0], found.get("perplexity")]
            cells = [f"{found['samples']:,}", *(_shown(n, "{:.3f}") for n in numbers)]
            rows.append(_row(f"{analysis.name}: {name}", cells))
    return (
        "<h2>By dataset</h2><table><tr><th></th><th>samples</th><th>head imbalance</th>"
        f"<th>sink rate</th><th>perplexity</th></tr>{''.join(rows)}</table>"
    )


def _provenance(analysis: Analysis) -> str:
    found = analysis.found
    facts = {
        "megasink": found["megasink"],
        "torch": found["torch"],
        **{key: value for key, value in found["model"].items() if key != "heads"},
        **found["run"],
    }
    text = ", ".join(f"{key} {value}" for key, value in facts.items())
    return f"<p class='note'>{html.escape(text)}</p>"
