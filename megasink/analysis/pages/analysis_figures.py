"""All figures of an analysis, in page order."""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from megasink.analysis.folder import Analysis
from megasink.analysis.pages import (
    change,
    figures_between,
    figures_heads,
    figures_maps,
    figures_states,
    opening,
)
from megasink.analysis.pages.drawing import SECTIONS, Drawing, Picture
from megasink.analysis.pages.figures_metrics import metric_drawings
from megasink.analysis.pages.style import rendered, styled
from megasink.progress import tracked


def drawings() -> list[Drawing]:
    """Return every kind of figure: those of registered metrics, and custom ones."""
    own = (opening, figures_states, figures_heads, figures_maps, change, figures_between)
    return [*metric_drawings(), *(drawing for module in own for drawing in module.DRAWINGS)]


def figures(analyses: Sequence[Analysis], kinds: Sequence[str] = ("png",)) -> list[Picture]:
    """Draw every figure that the analyses have numbers for, with progress on stderr.

    Args:
        kinds: file types: "png", "pdf".
    """
    jobs = list(_jobs(analyses))
    for picture, draw in tracked(jobs, "drawing", len(jobs), "figures"):
        with styled():
            figure = draw()
            if figure is not None:
                picture.files.update({kind: rendered(figure, kind) for kind in kinds})
    return [picture for picture, _ in jobs if picture.files]


def _jobs(analyses: Sequence[Analysis]) -> Iterator[tuple[Picture, Callable[[], Any]]]:
    """Yield each picture, without files, and the function that draws it."""
    for drawing in sorted(drawings(), key=lambda drawing: SECTIONS.index(drawing.section)):
        if not drawing.by_model:
            yield Picture(drawing.name, drawing), partial(drawing.draw, analyses)
            continue
        for number, analysis in enumerate(analyses, 1):
            suffix = f"_{number}" if len(analyses) > 1 else ""
            if drawing is figures_maps.HEAD:
                yield from _heads(analysis, suffix)
            else:
                picture = Picture(drawing.name + suffix, drawing, analysis.name)
                yield picture, partial(drawing.draw, analysis)


def _heads(analysis: Analysis, suffix: str) -> Iterator[tuple[Picture, Callable[[], Any]]]:
    """Yield one figure per chosen head."""
    for index, head in enumerate(figures_maps.heads_of(analysis)):
        why = str(analysis.maps["why_C"][index])
        about = f"{analysis.name}, layer {head.replace('.', ', head ')} ({why})"
        picture = Picture(f"head_{head}{suffix}", figures_maps.HEAD, about)
        yield picture, partial(figures_maps.draw_head, analysis, index)
