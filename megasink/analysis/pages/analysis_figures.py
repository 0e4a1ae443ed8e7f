"""All figures of an analysis, in page order."""

from collections.abc import Iterator, Sequence
from typing import Any

from megasink.analysis.analysis_object import Analysis
from megasink.analysis.pages import (
    head_figures,
    map_figures,
    metric_figures,
    model_differences,
    summary_in_words,
)
from megasink.analysis.pages.drawing import SECTIONS, Drawing, Picture, picture_of
from megasink.console.progress import tracked
from megasink.figures.style import styled


def drawings() -> list[Drawing]:
    """Return every kind of figure: those of registered metrics, and custom ones."""
    own = (summary_in_words, metric_figures, head_figures, map_figures, model_differences)
    return [
        *metric_figures.metric_drawings(),
        *(drawing for module in own for drawing in module.DRAWINGS),
    ]


def figures(analyses: Sequence[Analysis], kinds: Sequence[str] = ("png",)) -> list[Picture]:
    """Draw every figure that the analyses have numbers for, with progress on stderr."""
    jobs, pictures = list(_jobs(analyses)), []
    for name, of, what, model in tracked(jobs, "drawing", len(jobs), "figures"):
        with styled():
            if (figure := of.draw(*what)) is None:
                continue
            about: dict[str, Any] = {"section": of.section, "model": model, "kinds": kinds}
            if of.finding is not None:
                about["finding"] = of.finding(what[0])
            pictures.append(picture_of(figure, name, of.title, of.caption, **about))
    return pictures


def _jobs(analyses: Sequence[Analysis]) -> Iterator[tuple[str, Drawing, tuple[Any, ...], str]]:
    """Yield each figure's file, its drawing, its data, and its model if it shows only one."""
    for drawing in sorted(drawings(), key=lambda drawing: SECTIONS.index(drawing.section)):
        if not drawing.by_model:
            yield drawing.name, drawing, (analyses,), ""
            continue
        for number, analysis in enumerate(analyses, 1):
            suffix = f"_{number}" if len(analyses) > 1 else ""
            if drawing.name != "head":
                yield drawing.name + suffix, drawing, (analysis,), analysis.name
                continue
            for index, head in enumerate(map_figures.heads_of(analysis)):
                why = str(analysis.maps["why_C"][index])
                about = f"{analysis.name}, layer {head.replace('.', ', head ')} ({why})"
                yield f"head_{head}{suffix}", drawing, (analysis, index), about
