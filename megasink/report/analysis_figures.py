"""All figures of an analysis, in the order of the page."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console
from rich.progress import track

from megasink.report import figures_between, figures_heads, figures_maps, figures_states
from megasink.report.analysis import Analysis
from megasink.report.drawing import SECTIONS, Drawing, Picture
from megasink.report.figures_metrics import metric_drawings
from megasink.report.style import STYLE, rendered


def drawings() -> list[Drawing]:
    """Every kind of figure: of the registered metrics, and those with a shape of their own."""
    own = (figures_states, figures_heads, figures_maps, figures_between)
    return [*metric_drawings(), *(drawing for module in own for drawing in module.DRAWINGS)]


def figures(analyses: Sequence[Analysis], kinds: Sequence[str] = ("png",)) -> list[Picture]:
    """Every figure that the analyses have numbers for, with a bar on a terminal.

    Args:
        kinds: of files: "png", "pdf".
    """
    console = Console(stderr=True)
    jobs = track(
        list(_jobs(analyses)),
        "figures",
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
    return [picture for job in jobs if (picture := _drawn(job, kinds)) is not None]


@dataclass(frozen=True)
class _Job:
    """A figure to draw; see `Picture`."""

    name: str
    drawing: Drawing
    draw: Callable[[], Any]
    model: str = ""


def _jobs(analyses: Sequence[Analysis]) -> Iterator[_Job]:
    for section in SECTIONS:
        for drawing in drawings():
            if drawing.section != section:
                continue
            if not drawing.by_model:
                yield _Job(drawing.name, drawing, partial(drawing.draw, analyses))
                continue
            for analysis, suffix in _numbered(analyses):
                draw = partial(drawing.draw, [analysis])
                yield _Job(drawing.name + suffix, drawing, draw, analysis.name)
        if section == "Geometry":
            for analysis, suffix in _numbered(analyses):
                yield from _heads(analysis, suffix)


def _numbered(analyses: Sequence[Analysis]) -> list[tuple[Analysis, str]]:
    """Each one with what tells its files from those of the others."""
    many = len(analyses) > 1
    return [(analysis, f"_{n}" if many else "") for n, analysis in enumerate(analyses, 1)]


def _heads(analysis: Analysis, suffix: str) -> Iterator[_Job]:
    """One figure for each head that was chosen."""
    for index, head in enumerate(figures_maps.heads_of(analysis)):
        why = str(analysis.maps["why_C"][index])
        about = f"{analysis.name}, layer {head.replace('.', ', head ')} ({why})"
        draw = partial(figures_maps.draw_head, analysis, index)
        yield _Job(f"head_{head}{suffix}", figures_maps.HEAD, draw, about)


def _drawn(job: _Job, kinds: Sequence[str]) -> Picture | None:
    import matplotlib

    with matplotlib.rc_context(STYLE):
        figure = job.draw()
        if figure is None:
            return None
        files = {kind: rendered(figure, kind) for kind in kinds}
    return Picture(job.name, job.drawing, files, job.model)
