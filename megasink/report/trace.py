"""The figure and the page of `megasink trace`: what became of the sink, step by step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megasink.diagnostics.circuit import STAGES
from megasink.report import html
from megasink.report.style import (
    BLUE,
    GREEN,
    VERMILION,
    label,
    log_scale,
    note,
    panels,
    rendered,
    styled,
    whole_numbers,
)

ROWS = (
    "step",
    "tokens",
    "sink_rate",
    "first_token_attention",
    "imbalance",
    "bits_per_byte",
    "nats_per_token",
    "massive_ratio",
    "mean_max_activation",
    "stage",
    "sink_centre",
)
"""The columns of trace.csv, one row per checkpoint."""

CAPTION = (
    "Against the tokens seen in training: share of heads with alpha_0 > 0.3 and mean weight on the "
    "first token (P2.2, P2.11, P1.31); head imbalance, the mean over layers of std / mean of head "
    "importance (P0.13); loss; the largest norm(x_0) / mean over i > 0 of norm(x_i) of any block's "
    "output (P2.10), and the mean over layers of the largest activation (P1.32); the circuit's "
    "stage, and the position of the sink's centre (P4.23, P4.24)."
)

_SCALES = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def trace_row(found: dict[str, Any]) -> dict[str, Any]:
    """One line of trace.csv, out of the results.json of a run's model."""
    ratios = [ratio for ratio in found["massive_ratio"][2::2] if ratio is not None]
    return {
        "step": found["model"]["step"],
        "tokens": found["model"]["trained_tokens"],
        "sink_rate": found["sink_rate"]["0.3"][0],
        "first_token_attention": found["first_token_attention"],
        "imbalance": found["imbalance"],
        "bits_per_byte": found.get("bits_per_byte"),
        "nats_per_token": found.get("nats_per_token"),
        "massive_ratio": max(ratios, default=None),
        "mean_max_activation": found["mean_max_activation"],
        "stage": found["circuit"]["stage"],
        "sink_centre": found["circuit"]["sink_centre_by_attention"],
    }


def write_trace(
    rows: Sequence[dict[str, Any]], folder: Path, name: str, links: Sequence[str] = ()
) -> None:
    """Write trace.png and report.html: sink rate, imbalance, loss, norms, stage (P2.11, P4.23).

    Args:
        rows: with the keys of `ROWS`.
        name: of the run.
        links: addresses of the rows' own reports, relative to `folder`; none where there are none.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with styled():
        png = rendered(_draw(rows))
    (folder / "trace.png").write_bytes(png)
    (folder / "report.html").write_text(_page(rows, png, name, links))


def _draw(rows: Sequence[dict[str, Any]]) -> Any:
    """Sink rate, imbalance, loss, norms, stage and centre against tokens."""
    figure, axes = panels(2, 3, 5.6, sharex=True)
    size, unit = _unit(max(row["tokens"] for row in rows))
    tokens = [row["tokens"] / size for row in rows]

    def draw(axis: Any, key: str, colour: str, text: str | None = None) -> None:
        values = [np.nan if row[key] is None else row[key] for row in rows]
        axis.plot(tokens, values, "o-", color=colour, label=text)

    sinks, imbalance, loss, norms, stage, centre = axes.flat
    draw(sinks, "sink_rate", BLUE, "heads with a sink")
    draw(sinks, "first_token_attention", VERMILION, "weight on token 0")
    sinks.set_ylim(-0.03, 1.03)
    sinks.legend(loc="best")
    draw(imbalance, "imbalance", BLUE)
    imbalance.set_ylim(bottom=0)
    bits = all(row["bits_per_byte"] is not None for row in rows)
    if any(row["nats_per_token"] is not None for row in rows):
        draw(loss, "bits_per_byte" if bits else "nats_per_token", BLUE)
    else:
        note(loss, "not computed")
    draw(norms, "massive_ratio", BLUE, "norm of token 0 over others")
    draw(norms, "mean_max_activation", GREEN, "largest activation")
    log_scale(norms)
    norms.legend(loc="best")
    stage.plot(tokens, [STAGES.index(row["stage"]) for row in rows], "o-", color=BLUE)
    stage.set_yticks(range(len(STAGES)), STAGES)
    stage.set_ylim(-0.4, len(STAGES) - 0.6)
    draw(centre, "sink_centre", BLUE)
    centre.set_ylim(-0.4, max(3.4, 0.4 + max(row["sink_centre"] for row in rows)))
    whole_numbers(centre.yaxis)
    titles = (
        ("attention sink", "share"),
        ("head imbalance", "coefficient of variation"),
        ("loss", "bits per byte" if bits else "nats per token"),
        ("massive activation", "ratio; activation"),
        ("stage of the circuit", ""),
        ("centre of the sink", "position"),
    )
    for axis, (title, text) in zip(axes.flat, titles, strict=True):
        label(axis, title, text)
    for axis in axes[-1]:
        axis.set_xlabel(f"tokens seen{unit}")
    return figure


def _unit(highest: float) -> tuple[float, str]:
    """What token counts are divided by, and how the axis says so."""
    for size, letter in _SCALES:
        if highest >= size:
            return size, f" ({letter})"
    return 1.0, ""


def _page(rows: Sequence[dict[str, Any]], png: bytes, name: str, links: Sequence[str]) -> str:
    first, last = rows[0], rows[-1]
    summary = (
        f"{name}: {len(rows)} checkpoints, from step {first['step']:,} to {last['step']:,} "
        f"({last['tokens']:,} tokens). The share of heads with a sink on the first token goes from "
        f"{100 * first['sink_rate']:.1f} % to {100 * last['sink_rate']:.1f} %, the head imbalance "
        f"from {first['imbalance']:.3f} to {last['imbalance']:.3f}; the circuit's stage is "
        f"“{last['stage']}” at the end."
    )
    head = [key.replace("_", " ") for key in ROWS]
    cells = [[_cell(row[key]) for key in ROWS] for row in rows]
    parts = [
        f"<main><h1>{html.escape(name)}: training trace</h1>",
        html.paragraph(summary),
        html.figure(png, f"Training trace of {name}", CAPTION),
        html.heading(2, "Checkpoints"),
        *([html.paragraph("Each step links to its own report.", "note")] if links else []),
        html.table(head, cells, links=links),
        "</main>",
    ]
    return html.document(f"megasink: trace of {name}", parts)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)
