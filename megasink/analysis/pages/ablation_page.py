"""Write an ablation: ablation.json, tables, arrays, figures, a page."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megasink.analysis.pages import html
from megasink.analysis.pages.ablation_figures import DRAWINGS, Arrays, shown_on, title_of
from megasink.analysis.pages.drawing import pictures
from megasink.analysis.result_schemas import (
    RANDOM,
    UNCHANGED,
    AblationCurve,
    AblationPoint,
    AblationResults,
    AblationValue,
)


def write_ablation(results: AblationResults, masks: Arrays, tsne: Arrays, output: Path) -> None:
    """Write everything about an ablation to a folder, and print its summary."""
    compared = [html.paragraph(_NOTE, "note"), _scores(results)] if results.scores else []
    html.publish(
        output,
        "ablate",
        model=results.model.name,
        heading="heads zeroed",
        words=in_words(results),
        before={"Scores compared": compared},
        pictures=pictures(DRAWINGS, results, masks, tsne),
        after={
            "Every point": _points(results) if results.scores else [],
            "Requested heads and interventions": given(results),
            "Words and papers": [html.words_and_papers()],
            "How it was measured": [_provenance(results)],
        },
        files={
            "points.npz": masks,
            "tsne.npz": tsne,
            "ablation.csv": list(_rows(results)),
            "ablation.json": results,
        },
    )


def _rows(results: AblationResults) -> Iterator[Mapping[str, Any]]:
    """Yield a line of ablation.csv for each point and dataset or task."""
    for point in results.points:
        for on, value in point.values.items():
            yield {
                "row": point.row,
                "label": point.label,
                "asked_percent": point.asked,
                "seed": point.seed,
                "zeroed_percent": point.zeroed,
                "on": on,
                **vars(value),
            }


_NOTE = (
    "AUC: mean value over the range of percentages (P3.16). Next column: the AUC minus that of "
    "random heads, with a 95% interval over texts or questions that holds for all scores together. "
    "Only a score whose difference exceeds this interval ranks heads better than chance here. "
    "Removable: the last percentage of zeroed heads at which the curve crosses the tolerance, by "
    "linear interpolation (P3.15). The published rule gives 0 if the curve never crosses it. The "
    "last column shows the largest percentage measured."
)


def in_words(results: AblationResults) -> list[str]:
    """Return the result on each dataset or task in a sentence; of the first few only."""
    how = (
        f"within {results.tolerance:g} percentage point"
        if results.higher_is_better
        else f"within {100 * results.tolerance:g}%"
    )
    what = "accuracy" if results.higher_is_better else "the loss"
    # Points of --heads and --interventions; not each head of --layer, which may be many.
    given = [point for point in results.points if point.row.startswith("--")]
    lines = []
    for on in shown_on(results)[:4]:
        unchanged = results.unchanged.values[on]
        text = f"{results.model.name} on {on}: {_number(unchanged, results)} {results.quantity}"
        text += f" over {unchanged.samples} samples, without changes."
        for point in given:
            value = point.values[on]
            change = _text(value.change, "{:+.2f}" if results.higher_is_better else "{:+.4f}")
            text += f" {point.label}: {_number(value, results)} ({change})."
        curves = [curve for curve in results.curves if curve.on == on]
        if curves:
            best = best_of(curves, higher_is_better=results.higher_is_better)
            of = [curve for curve in curves if curve is best or curve.score == RANDOM]
            shares = [f"{removable_text(curve)} by {title_of(curve.score)}" for curve in of]
            text += f" Heads that can be zeroed with {what} {how}: {', '.join(shares)}."
            if best is None:
                text += " No score's curve is better than that of random heads by more than its "
                text += "95% interval."
            else:
                text += f" Best by AUC: {title_of(best.score)} ({_apart(best)} against random)."
        lines.append(text)
    return lines


def best_of(curves: Sequence[AblationCurve], *, higher_is_better: bool) -> AblationCurve | None:
    """Return the curve with the best AUC, if it leads random heads by more than its interval."""
    best, sign = min(curves, key=lambda curve: curve.rank), 1 if higher_is_better else -1
    if best.over_random is None or best.over_random_interval is None:
        return None
    return best if sign * best.over_random > best.over_random_interval else None


def _apart(curve: AblationCurve) -> str:
    if curve.over_random is None:
        return ""
    interval = _text(curve.over_random_interval, "{:.4f}")
    return f"{curve.over_random:+.4f} ± {interval}"


def removable_text(curve: AblationCurve) -> str:
    """Return the percentage removable; "at least" for a curve that never leaves the level."""
    if curve.never_left:
        return f"at least {curve.measured_to:.1f}%"
    return f"{curve.removable:.1f}%"


def _number(value: AblationValue, results: AblationResults) -> str:
    return _text(value.value, "{:.2f}" if results.higher_is_better else "{:.4f}")


def _text(number: float | None, form: str) -> str:
    return "none" if number is None else form.format(number)


def _scores(results: AblationResults) -> str:
    rows = []
    for on in shown_on(results):
        curves = [curve for curve in results.curves if curve.on == on]
        for curve in sorted(curves, key=lambda curve: curve.rank):
            found = [str(curve.rank), _text(curve.auc, "{:.4f}"), _apart(curve)]
            shares = [f"{curve.removable:.2f}%", f"{curve.measured_to:.1f}%"]
            rows.append([title_of(curve.score), on, *found, removable_text(curve), *shares])
    head = ["score", "on", "rank", "AUC", "minus random's", "removable"]
    head += ["by the published rule", "measured to"]
    return html.table(head, rows)


def _points(results: AblationResults) -> list[str]:
    """Return one table for each dataset or task: the value, and the percentage zeroed."""
    percents = sorted({point.asked for point in results.points if point.asked is not None})
    parts = list[str]()
    for on in shown_on(results):
        rows = []
        for score in results.scores:
            for seed in dict.fromkeys(point.seed for point in results.of(score)):
                name = title_of(score) + ("" if seed is None else f", seed {seed}")
                of = {p.asked: p for p in results.of(score) if p.seed == seed}
                rows.append([name, *(_cell(of.get(percent), on, results) for percent in percents)])
        parts.append(html.paragraph(f"{on}: {results.quantity} (heads zeroed)", "note"))
        parts.append(html.table(["requested", *(f"{percent:g}%" for percent in percents)], rows))
    return parts


def _cell(point: AblationPoint | None, on: str, results: AblationResults) -> str:
    if point is None:
        return ""
    return f"{_number(point.values[on], results)} ({_text(point.zeroed, '{:.1f}%')})"


def given(results: AblationResults) -> list[str]:
    """Return the table of the heads and interventions that the command named, if any."""
    points = [point for point in results.points if point.row != UNCHANGED and point.asked is None]
    if not points:
        return []
    rows, without = [], []
    for on in shown_on(results):
        for point in points:
            value = point.values[on]
            error = _text(value.standard_error, "{:.4f}")
            if results.tasks and value.standard_error is None and value.samples > 1:
                without.append(on)
            cells = [_number(value, results), _text(value.change, "{:+.4f}"), error]
            rows.append([point.label, on, *cells])
    table = html.table(["", "on", results.quantity, "change", "its standard error"], rows)
    names = ", ".join(dict.fromkeys(without))
    note = f"No standard error for {names}: the number is not a mean over stored questions."
    return [table, *([html.paragraph(note, "note")] if without else [])]


def _provenance(results: AblationResults) -> str:
    facts = {
        "megasink": results.megasink,
        "torch": results.torch,
        **asdict(results.model),
        "data": ", ".join(results.data),
        "samples": results.samples,
        "tasks": ", ".join(f"{task} (version {v})" for task, v in results.tasks.items()),
        "thresholds set by": results.calibration,
    }
    del facts["heads"]
    for score, taus in results.thresholds.items():
        shown = (f"{percent}%: {tau:.4g}" for percent, tau in taus.items())
        facts[f"thresholds of {title_of(score)}"] = ", ".join(shown)
    return html.facts(results.model.name, facts)
