"""All figures of an analysis, in page order."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from megasink.analysis.analysis import Analysis
from megasink.analysis.pages import change, figures_heads, figures_maps, figures_metrics, opening
from megasink.analysis.pages.drawing import SECTIONS, Drawing, Picture, picture_of
from megasink.console.progress import tracked
from megasink.figures.style import styled


def drawings() -> list[Drawing]:
    """Return every kind of figure: those of registered metrics, and custom ones."""
    own = (opening, figures_metrics, figures_heads, figures_maps, change)
    return [
        *figures_metrics.metric_drawings(),
        *(drawing for module in own for drawing in module.DRAWINGS),
    ]


def figures(analyses: Sequence[Analysis], kinds: Sequence[str] = ("png",)) -> list[Picture]:
    """Draw every figure that the analyses have numbers for, with progress on stderr."""
    jobs, pictures = list(_jobs(analyses)), []
    for job in tracked(jobs, "drawing", len(jobs), "figures"):
        with styled():
            figure = job.draw()
            if figure is None:
                continue
            of = job.drawing
            about = {"section": of.section, "model": job.model}
            if of.finding is not None:
                about["finding"] = of.finding(job.draw.args[-1])
            pictures.append(
                picture_of(figure, job.name, of.title, of.caption, kinds=kinds, **about)
            )
    return pictures


class _Job(NamedTuple):
    """A figure to draw, of one model or, if that is empty, of all."""

    name: str
    drawing: Drawing
    draw: partial[Any]
    model: str = ""


def _jobs(analyses: Sequence[Analysis]) -> Iterator[_Job]:
    for drawing in sorted(drawings(), key=lambda drawing: SECTIONS.index(drawing.section)):
        if not drawing.by_model:
            yield _Job(drawing.name, drawing, partial(drawing.draw, analyses))
            continue
        for number, analysis in enumerate(analyses, 1):
            suffix = f"_{number}" if len(analyses) > 1 else ""
            if drawing is figures_maps.HEAD:
                yield from _heads(analysis, suffix)
            else:
                name, draw = drawing.name + suffix, partial(drawing.draw, analysis)
                yield _Job(name, drawing, draw, analysis.name)


def _heads(analysis: Analysis, suffix: str) -> Iterator[_Job]:
    """Yield one figure per chosen head."""
    for index, head in enumerate(figures_maps.heads_of(analysis)):
        why = str(analysis.maps["why_C"][index])
        about = f"{analysis.name}, layer {head.replace('.', ', head ')} ({why})"
        draw = partial(figures_maps.draw_head, analysis, index)
        yield _Job(f"head_{head}{suffix}", figures_maps.HEAD, draw, about)
