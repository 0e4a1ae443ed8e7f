"""One self-contained HTML page per report: the results in words, numbers and figures."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import combinations, groupby
from pathlib import Path

from megasink.analysis.analysis_folder import Arrays, summary_cells, tables_of
from megasink.analysis.analysis_object import Analysis
from megasink.analysis.metrics import Metric, metrics, metrics_shown
from megasink.analysis.metrics.inactive_heads import spearman, top_agreement, wasserstein
from megasink.analysis.pages import html, model_differences
from megasink.analysis.pages.analysis_figures import figures
from megasink.analysis.pages.comparison_checks import differences
from megasink.analysis.pages.drawing import OPENING, Picture, page_files
from megasink.analysis.pages.summary_in_words import in_words
from megasink.analysis.result_schemas import SampleResults
from megasink.analysis.result_store import PAGE_FILES, write_results
from megasink.console.printable import printable, say


def page(analyses: Sequence[Analysis], pictures: Sequence[Picture]) -> str:
    """Return the page; figures are embedded, and nothing is loaded from elsewhere."""
    names = ", ".join(analysis.name for analysis in analyses)
    by_section = {section: list(group) for section, group in groupby(pictures, lambda p: p.section)}
    opening = by_section.pop(OPENING, [])
    made = html.Page(f"megasink: {names}", names)
    made.section(
        OPENING,
        *(html.paragraph(line) for analysis in analyses for line in in_words(analysis)),
        *(html.paragraph(line) for line in model_differences.in_words(analyses)),
        *(html.paragraph(warning, "warning") for warning in _warnings(analyses)),
        *(_figures(opening, names) if opening else []),
        _summaries(
            [(analysis.name, analysis.results) for analysis in analyses],
            with_change=model_differences.is_pair(analyses),
        ),
    )
    for section, members in by_section.items():
        made.section(section)
        for title, group in groupby(members, lambda picture: picture.title):
            made.subsection(title, *_figures(list(group), names))
    many = len(analyses) > 1
    by_dataset: list[tuple[str, SampleResults]] = [
        (f"{analysis.name}: {name}" if many else name, results)
        for analysis in analyses
        for name, results in analysis.results.datasets.items()
    ]
    made.section("By dataset", _summaries(by_dataset))
    if many:
        made.section("Pairwise comparison", _distances(analyses))
    made.section("Words and papers", html.words_and_papers())
    made.section("How it was measured", *(_provenance(analysis) for analysis in analyses))
    return made.text()


def _warnings(analyses: Sequence[Analysis]) -> Iterator[str]:
    for difference in differences(analyses):
        yield f"The analyses have {difference}."
    for analysis in analyses:
        if bad := analysis.results.non_finite:
            first = bad[0]
            yield (
                f"{analysis.name}: {len(bad)} samples had infinite or NaN values and are left out "
                f"of every average. The first is {first.source}, in layers {first.layers}, heads "
                f"{first.heads}."
            )


def _figures(pictures: Sequence[Picture], names: str) -> list[str]:
    """Return the figures of one heading, with their shared caption first."""
    first = pictures[0]
    if len(pictures) == 1 and not first.model:
        return [html.figure(first, f"{first.title}: {names}", first.caption)]
    return [
        html.paragraph(first.caption, "note"),
        *(html.figure(p, f"{p.title}: {p.model}", p.model) for p in pictures),
    ]


def _summaries(columns: Sequence[tuple[str, SampleResults]], *, with_change: bool = False) -> str:
    """Return a table of models or datasets, without empty rows; optionally with the change."""
    cells, more = [summary_cells(of) for _, of in columns], [""] * with_change
    rows = [[key, *(f"{of[key]:,}" for of in cells), *more] for key in ("samples", "tokens")]
    for name, entry in metrics().items():
        if any(of.get(name) is not None for of in cells):
            values = [of[name] for of in cells]
            more = [model_differences.delta(entry, *values)] if with_change else []
            name_of = _label(entry, [results for _, results in columns])
            rows.append([name_of, *map(entry.text, values), *more])
    return html.table(["", *(name for name, _ in columns), *["change"] * with_change], rows)


def _label(entry: Metric, columns: Sequence[SampleResults]) -> str:
    """Return a metric's row header: its number and source, and its definition below."""
    how = "" if entry.axis == "model" else f", {entry.scalar}"
    is_row = entry.source.startswith("P") and entry.source[1].isdigit()
    about = entry.definition
    if entry.key is not None:
        known = [of.metrics["even_weight"].values for of in columns if "even_weight" in of.metrics]
        even = dict.fromkeys(f"{of[entry.key]:.4f}" for of in known if of[entry.key] is not None)
        if even:
            about += f" A head that attends evenly gives this key a weight of {' or '.join(even)}."
    return html.term(f"{entry.title}{how}" + (f" ({entry.source})" if is_row else ""), about)


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
    facts = {"megasink": results.megasink, "torch": results.torch, **model, **asdict(results.run)}
    if analysis.maps:
        facts["maps"] = f"{analysis.maps['samples']} texts; shown: {analysis.maps['source']}"
    return html.facts(analysis.name, facts)


def write_report(
    analyses: Sequence[Analysis],
    output: Path,
    *,
    kinds: Sequence[str] = ("png",),
    kept: bool = False,
) -> None:
    """Write the page and figures (png, pdf) of analyses; of a single one tables too."""
    for difference in differences(analyses):
        print(f"megasink: warning: the analyses have {difference}", file=sys.stderr)
    for analysis in analyses:
        if unknown := sorted(analysis.results.metrics.keys() - metrics().keys()):
            print(
                f"megasink: warning: {analysis.name} has metrics that are not registered here: "
                f"{', '.join(unknown)}; load the module that defines them (--plugin) to see them",
                file=sys.stderr,
            )
    pictures = figures(analyses, kinds)
    files = page_files(page(analyses, pictures), pictures)
    if len(analyses) == 1:
        files |= {f"tables/{name}.csv": rows for name, rows in tables_of(analyses[0]).items()}
    write_results(output, files, (*PAGE_FILES, "tables/*.csv"), kept=kept)


def write_own_page(output: Path, analysis: Analysis) -> None:
    """Write the page, figures and tables of an analysis, and print its summary."""
    write_report([analysis], output, kept=True)
    for line in in_words(analysis):
        say(line)
    for entry in analysis.results.non_finite:
        print(
            f"megasink: warning: {printable(entry.source)} has infinite or NaN values in layers "
            f"{entry.layers}, heads {entry.heads}: this sample is left out of every average",
            file=sys.stderr,
        )
    print(f"wrote {output}/report.html, results.json, *.npz, tables/, figures/")


def write_numbers(output: Path, analysis: Analysis, samples: Arrays) -> None:
    """Write results.json and the arrays; `megasink report` creates the rest."""
    arrays = {"samples.npz": samples, "geometry.npz": analysis.points, "maps.npz": analysis.maps}
    write_results(output, arrays | {"results.json": analysis.results})
