"""The curves of `megasink trace`: what became of the sink, step by step."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasink.diagnostics.circuit import STAGES
from megasink.report.curves import BLUE, ORANGE, style_axis

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


def draw_trace(rows: Sequence[dict[str, Any]], output: Path) -> None:
    """Draw sink rate, imbalance, loss, norms and stage against tokens (P2.11, P4.23).

    Args:
        rows: with the keys of `ROWS`.
        output: PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 5, figsize=(18, 3.6), layout="constrained")
    tokens = [row["tokens"] for row in rows]

    def draw(axis: Any, key: str, colour: str, label: str | None = None) -> None:
        axis.plot(tokens, [row[key] for row in rows], "o-", ms=4, color=colour, label=label)

    draw(axes[0], "sink_rate", BLUE, "heads with a sink (eps 0.3)")
    draw(axes[0], "first_token_attention", ORANGE, "weight on the first token")
    axes[0].set_ylim(-0.03, 1.03)
    axes[0].legend(frameon=False, fontsize=8)
    draw(axes[1], "imbalance", BLUE)
    bits = all(row["bits_per_byte"] is not None for row in rows)
    draw(axes[2], "bits_per_byte" if bits else "nats_per_token", BLUE)
    draw(axes[3], "massive_ratio", BLUE)
    axes[4].plot(tokens, [STAGES.index(row["stage"]) for row in rows], "o-", ms=4, color=BLUE)
    axes[4].set_yticks(range(len(STAGES)), STAGES)
    titles = (
        ("attention sink", "share"),
        ("head imbalance", "coefficient of variation"),
        ("loss", "bits per byte" if bits else "nats per token"),
        ("massive activation", "first token / mean of the others"),
        ("stage of the circuit", ""),
    )
    for axis, (title, label) in zip(axes, titles, strict=True):
        style_axis(axis, title, label, "tokens")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=130)
    plt.close(figure)
