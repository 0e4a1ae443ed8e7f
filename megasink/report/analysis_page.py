"""One self-contained HTML page about analyses: what was found in words, numbers and figures."""

from collections.abc import Sequence
from itertools import combinations, groupby
from typing import Any

import numpy as np

from megasink.diagnostics.distances import spearman, top_agreement, wasserstein
from megasink.report import html
from megasink.report.analysis import Analysis
from megasink.report.comparable import differences
from megasink.report.drawing import Picture

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


SUMMARY, DATASETS, DISTANCES, PROVENANCE = (
    "Summary",
    "By data set",
    "Between every two models",
    "How it was measured",
)


def page(analyses: Sequence[Analysis], pictures: Sequence[Picture]) -> str:
    """The page; figures are embedded, nothing is loaded from elsewhere.

    Args:
        pictures: of `figures`.
    """
    names = ", ".join(analysis.name for analysis in analyses)
    by_section = {
        section: list(group) for section, group in groupby(pictures, lambda p: p.drawing.section)
    }
    sections = {SUMMARY: [], **{s: [p.drawing.title for p in g] for s, g in by_section.items()}}
    sections[DATASETS] = []
    if len(analyses) > 1:
        sections[DISTANCES] = []
    sections[PROVENANCE] = []
    parts = [
        "<header>",
        f"<h1>{html.escape(names)}</h1>",
        html.contents(sections),
        "</header><main>",
        html.heading(2, SUMMARY),
        *(html.paragraph(in_words(analysis)) for analysis in analyses),
        *(html.paragraph(f"These are of {d}.", "warning") for d in differences(analyses)),
        *(_warning(analysis) for analysis in analyses if analysis.found["non_finite"]),
        _table(analyses),
    ]
    for section, members in by_section.items():
        parts.append(html.heading(2, section))
        for title, group in groupby(members, lambda picture: picture.drawing.title):
            parts.append(html.heading(3, title))
            parts += _figures(list(group), names)
    parts += [html.heading(2, DATASETS), _datasets(analyses)]
    if len(analyses) > 1:
        parts += [html.heading(2, DISTANCES), _distances(analyses)]
    parts += [
        html.heading(2, PROVENANCE),
        *(_provenance(analysis) for analysis in analyses),
        "</main>",
    ]
    return html.document(f"megasink: {names}", parts)


def _figures(pictures: Sequence[Picture], names: str) -> list[str]:
    """Those of one heading: what several have in common is said once, before them."""
    drawing = pictures[0].drawing
    if len(pictures) == 1 and not pictures[0].model:
        alt = f"{drawing.title}: {names}"
        return [html.figure(pictures[0].files["png"], alt, drawing.caption)]
    return [
        html.paragraph(drawing.caption, "note"),
        *(html.figure(p.files["png"], f"{drawing.title}: {p.model}", p.model) for p in pictures),
    ]


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
    return html.paragraph(
        f"{analysis.name}: {len(bad)} samples had infinite or NaN values and are in no average; "
        f"first {first['source']}, layers {first['layers']}, heads {first['heads']}.",
        "warning",
    )


def _table(analyses: Sequence[Analysis]) -> str:
    rows = []
    for label, key, form in _NUMBERS:
        values = [analysis.found.get(key) for analysis in analyses]
        if any(value is not None for value in values):
            rows.append([label, *(_shown(value, form) for value in values)])
    for epsilon in analyses[0].found["sink_rate"]:
        rates = [analysis.found["sink_rate"][epsilon][0] for analysis in analyses]
        cells = [_shown(None if r is None else 100 * r, "{:.1f} %") for r in rates]
        rows.append([f"sink rate, eps {epsilon} (P2.2)", *cells])
    return html.table(["", *(analysis.name for analysis in analyses)], rows)


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
        rows.append([f"{a.name} and {b.name}", *cells])
    head = ["", "W1 of AWFT", "W1 of AHON (LN)", "Spearman of importance", "IoU of top 5"]
    note = (
        "Wasserstein distance of the scores (P3.21); rank correlation of head importance, and "
        "overlap of the five most important heads (P3.30)."
    )
    return html.paragraph(note, "note") + html.table(head, rows)


def _datasets(analyses: Sequence[Analysis]) -> str:
    rows = []
    for analysis in analyses:
        for name, found in analysis.found["datasets"].items():
            rate = found["sink_rate"]["0.3"][0]
            rows.append(
                [
                    f"{analysis.name}: {name}" if len(analyses) > 1 else name,
                    f"{found['samples']:,}",
                    _shown(found["imbalance"], "{:.3f}"),
                    _shown(None if rate is None else 100 * rate, "{:.1f} %"),
                    _shown(found["first_token_attention"], "{:.3f}"),
                    _shown(found.get("perplexity"), "{:.2f}"),
                ]
            )
    head = ["", "samples", "head imbalance", "sink rate, eps 0.3", "weight on token 0"]
    return html.table([*head, "perplexity"], rows)


def _provenance(analysis: Analysis) -> str:
    found = analysis.found
    facts = {
        "megasink": found["megasink"],
        "torch": found["torch"],
        **{key: value for key, value in found["model"].items() if key != "heads"},
        **found["run"],
    }
    if analysis.maps:
        facts["maps"] = f"{analysis.maps['samples']} texts; shown: {analysis.maps['source']}"
    rows = [[key.replace("_", " "), _fact(value)] for key, value in facts.items()]
    return html.table(["", analysis.name], rows, kind="facts")


def _fact(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
