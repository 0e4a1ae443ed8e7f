"""One self-contained HTML page per report: the results in words, numbers and figures."""

from collections.abc import Sequence
from dataclasses import asdict
from itertools import combinations, groupby
from typing import Any

import numpy as np

from megasink.analysis.folder import Analysis, array, summary_cells
from megasink.analysis.metrics import Metric, metrics, metrics_shown
from megasink.analysis.metrics.distances import spearman, top_agreement, wasserstein
from megasink.analysis.pages import html
from megasink.analysis.pages.comparable import differences
from megasink.analysis.pages.drawing import Picture
from megasink.analysis.results import SampleResults
from megasink.attention.definitions import SINK_EPSILON
from megasink.errors import UserError

SUMMARY, DATASETS, DISTANCES, PROVENANCE = (
    "Summary",
    "By dataset",
    "Pairwise comparison",
    "How it was measured",
)

ENOUGH_SAMPLES, ENOUGH_TOKENS = 16, 64
"""Below either, the page says that its numbers say little."""
_IN_WORDS = (
    "sink_rate",
    "first_token_attention",
    "circuit_stage",
    "sink_centre",
    "importance",
    "imbalance",
)


def page(analyses: Sequence[Analysis], pictures: Sequence[Picture]) -> str:
    """Return the page; figures are embedded, and nothing is loaded from elsewhere."""
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
        *(html.paragraph(line) for analysis in analyses for line in in_words(analysis)),
        *(html.paragraph(f"The analyses have {d}.", "warning") for d in differences(analyses)),
        *(_warning(analysis) for analysis in analyses if analysis.results.non_finite),
        _summaries([(analysis.name, analysis.results) for analysis in analyses]),
    ]
    for section, members in by_section.items():
        parts.append(html.heading(2, section))
        for title, group in groupby(members, lambda picture: picture.drawing.title):
            parts.append(html.heading(3, title))
            parts += _figures(list(group), names)
    many = len(analyses) > 1
    by_dataset: list[tuple[str, SampleResults]] = [
        (f"{analysis.name}: {name}" if many else name, results)
        for analysis in analyses
        for name, results in analysis.results.datasets.items()
    ]
    parts += [html.heading(2, DATASETS), _summaries(by_dataset)]
    if many:
        parts += [html.heading(2, DISTANCES), _distances(analyses)]
    parts += [
        html.heading(2, PROVENANCE),
        *(_provenance(analysis) for analysis in analyses),
        "</main>",
    ]
    return html.document(f"megasink: {names}", parts)


def _figures(pictures: Sequence[Picture], names: str) -> list[str]:
    """Return the figures of one heading, with the caption they share first."""
    drawing = pictures[0].drawing
    if len(pictures) == 1 and not pictures[0].model:
        alt = f"{drawing.title}: {names}"
        return [html.figure(pictures[0].files["png"], alt, drawing.caption)]
    return [
        html.paragraph(drawing.caption, "note"),
        *(html.figure(p.files["png"], f"{drawing.title}: {p.model}", p.model) for p in pictures),
    ]


def in_words(analysis: Analysis) -> list[str]:
    """Return what an analysis found in a paragraph; in one per dataset if not all are texts.

    Texts come first: a mean over texts and random tokens is no number of either.
    """
    results = analysis.results
    if len(results.run.inputs) < 2:
        return [_in_words(analysis.name, results)]
    return [_in_words(f"{analysis.name} on {name}", of) for name, of in results.datasets.items()]


def _in_words(name: str, of: SampleResults) -> str:
    """Return sentences: the sink, the circuit, the heads, and what they do not say."""
    number: dict[str, Any] = {name: result.number for name, result in of.metrics.items()}
    for needed in _IN_WORDS:
        if number.get(needed) is None:
            raise UserError(f"the analysis of {name} has no {needed}: analyze it again")
    length = of.tokens / of.samples
    prominent = number.get("prominent_after_block")
    where = (
        "no block makes its norm stand out"
        if prominent is None
        else f"its norm stands out after block {prominent:.0f}"
    )
    importance = array(of.metrics["importance"].values)
    flat = importance[np.isfinite(importance)]
    layer, head = np.unravel_index(np.nanargmin(importance), importance.shape)
    text = (
        f"{name}, {of.samples:,} sample{'s' * (of.samples != 1)} of {length:.0f} tokens: "
        f"{100 * number['sink_rate']:.1f}% of the heads{_spread(of, 'sink_rate')} have a sink on "
        f"the first token (weight above {SINK_EPSILON}) at this length, and it gets "
        f"{100 * number['first_token_attention']:.1f}% of the attention"
        f"{_spread(of, 'first_token_attention')}; {where}. "
        f"The circuit stage is “{number['circuit_stage']}”; the sink center is position "
        f"{number['sink_centre']:.0f}. Head importance, the share of attention off the first token "
        f"(off the sink, or the explicit gate, where there is one), runs from {flat.min():.3f} "
        f"(layer {layer}, head {head}) to {flat.max():.3f}, and the head imbalance is "
        f"{number['imbalance']:.3f}; what the model loses without a head is another number, which "
        "`megasink ablate` measures."
    )
    if of.samples < ENOUGH_SAMPLES or length < ENOUGH_TOKENS:
        text += (
            f" With fewer than {ENOUGH_SAMPLES} samples or {ENOUGH_TOKENS} tokens these numbers "
            "say little about the model: they vary between samples, and sink rates fall with "
            "the length."
        )
    return text


def _spread(of: SampleResults, metric: str) -> str:
    """Return the standard deviation of a percentage, in parentheses; nothing for one sample."""
    found = of.spread.get(metric)
    return "" if found is None else f" (± {100 * found:.1f} over samples)"


def _warning(analysis: Analysis) -> str:
    bad = analysis.results.non_finite
    first = bad[0]
    return html.paragraph(
        f"{analysis.name}: {len(bad)} samples had infinite or NaN values and are left out of "
        f"every average; the first: {first.source}, layers {first.layers}, heads {first.heads}.",
        "warning",
    )


def _summaries(columns: Sequence[tuple[str, SampleResults]]) -> str:
    """Return a table of models, or of datasets, side by side, without empty rows."""
    cells = [summary_cells(of) for _, of in columns]
    rows = [[key, *(f"{of[key]:,}" for of in cells)] for key in ("samples", "tokens")]
    for name, entry in metrics().items():
        if any(of.get(name) is not None for of in cells):
            rows.append([_label(entry), *(entry.text(of[name]) for of in cells)])
    return html.table(["", *(name for name, _ in columns)], rows)


def _label(entry: Metric) -> str:
    """Return a metric's row header: its number and its source."""
    how = "" if entry.axis == "model" else f", {entry.scalar}"
    is_row = entry.source.startswith("P") and entry.source[1].isdigit()
    return f"{entry.title}{how}" + (f" ({entry.source})" if is_row else "")


def _distances(analyses: Sequence[Analysis]) -> str:
    """Return W1 for every pair of models, and head-by-head scores if their shapes agree."""
    pooled, ranked = (
        {n: entry for n, entry in metrics_shown(where).items() if all(a.has(n) for a in analyses)}
        for where in ("wasserstein", "rank")
    )
    rows = []
    for a, b in combinations(analyses, 2):
        cells = [f"{wasserstein(a.by_sample[n], b.by_sample[n]):.4f}" for n in pooled]
        for name in ranked:
            mine, theirs = a.values(name), b.values(name)
            if mine.shape == theirs.shape:
                cells += [f"{spearman(mine, theirs):.3f}", f"{top_agreement(mine, theirs):.2f}"]
            else:
                cells += ["different shapes", ""]
        rows.append([f"{a.name} and {b.name}", *cells])
    head = ["", *(f"W1 of {entry.title}" for entry in pooled.values())]
    for entry in ranked.values():
        head += [f"Spearman of {entry.title}", f"IoU of top 5 of {entry.title}"]
    note = (
        "Wasserstein distance between the values of all samples, layers and heads (P3.21); "
        "rank correlation of the heads, and overlap of the top five (P3.30)."
    )
    return html.paragraph(note, "note") + html.table(head, rows)


def _provenance(analysis: Analysis) -> str:
    results = analysis.results
    model = asdict(results.model)
    del model["heads"]
    facts = {
        "megasink": results.megasink,
        "torch": results.torch,
        **{key: value for key, value in (model | asdict(results.run)).items() if value is not None},
    }
    if analysis.maps:
        facts["maps"] = f"{analysis.maps['samples']} texts; shown: {analysis.maps['source']}"
    rows = [[key.replace("_", " "), _fact(value)] for key, value in facts.items()]
    return html.table(["", analysis.name], rows, kind="facts")


def _fact(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
