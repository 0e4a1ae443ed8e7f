"""All figures of an analysis, in page order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from megasink.progress import tracked
from megasink.report import figures_between, figures_heads, figures_maps, figures_states
from megasink.report.analysis import Analysis
from megasink.report.drawing import SECTIONS, Drawing, Picture
from megasink.report.figures_metrics import metric_drawings
from megasink.report.style import rendered, styled


def drawings() -> list[Drawing]:
    """Return every kind of figure: those of registered metrics, and custom ones."""
    own = (figures_states, figures_heads, figures_maps, figures_between)
    return [*metric_drawings(), *(drawing for module in own for drawing in module.DRAWINGS)]


def figures(analyses: Sequence[Analysis], kinds: Sequence[str] = ("png",)) -> list[Picture]:
    """Draw every figure that the analyses have numbers for, with progress on stderr.

    Args:
        kinds: file types: "png", "pdf".
    """
    jobs = list(_jobs(analyses))
    made = (_drawn(job, kinds) for job in tracked(jobs, "drawing", len(jobs), "figures"))
    return [picture for picture in made if picture is not None]


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
    """Pair each analysis with the suffix of its file names."""
    many = len(analyses) > 1
    return [(analysis, f"_{n}" if many else "") for n, analysis in enumerate(analyses, 1)]


def _heads(analysis: Analysis, suffix: str) -> Iterator[_Job]:
    """Yield one figure per chosen head."""
    for index, head in enumerate(figures_maps.heads_of(analysis)):
        why = str(analysis.maps["why_C"][index])
        about = f"{analysis.name}, layer {head.replace('.', ', head ')} ({why})"
        draw = partial(figures_maps.draw_head, analysis, index)
        yield _Job(f"head_{head}{suffix}", figures_maps.HEAD, draw, about)


@styled()
def _drawn(job: _Job, kinds: Sequence[str]) -> Picture | None:
    figure = job.draw()
    if figure is None:
        return None
    files = {kind: rendered(figure, kind) for kind in kinds}
    return Picture(job.name, job.drawing, files, job.model)
