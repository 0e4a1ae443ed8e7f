"""The figure of a plan: memory of a rank by part, a bar for each pipeline stage."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasink.analysis.pages.style import GRAY, PALETTE, VERMILION, label, panels, save, styled
from megasink.plan.devices import GPU
from megasink.plan.job import Stage

_GIB = 2**30
# From the left: what is there all the time, and what comes and goes in a step.
_PARTS = {
    "parameters": "weights",
    "gradients": "gradients",
    "optimizer": "optimizer",
    "buffers": "other tensors that stay",
    "activations": "saved for backward",
    "working": "working, at the peak",
    "gaps": "gaps of the allocator",
}
_COLORS = (PALETTE[0], PALETTE[5], PALETTE[2], GRAY, PALETTE[4], PALETTE[3], "#e5e7eb")


@styled()
def draw(
    stages: Sequence[Stage],
    device: str,
    gpu: GPU,
    title: str,
    output: Path,
    comment: str | None = None,
) -> Path:
    """Write the figure as a PNG, and return its path.

    Args:
        stages: Of `megasink.plan.job.memory`.
        device: Name of the GPU, whose memory is marked.
        title: Above the figure.
        comment: In the file (`megasink.analysis.pages.style.comment_of`).

    Raises:
        OSError: It cannot be written.
    """
    figure, ((axis,),) = panels(1, 1, 1.7 + 0.34 * len(stages), width=9.0)
    names = [_name(stage) for stage in stages]
    left = [0.0] * len(stages)
    for (part, text), color in zip(_PARTS.items(), _COLORS, strict=True):
        sizes = [_size(stage, part) / _GIB for stage in stages]
        axis.barh(names, sizes, left=left, height=0.72, label=text, color=color)
        left = [start + size for start, size in zip(left, sizes, strict=True)]
    _mark(axis, device, gpu, max(left))
    axis.set_ylim(len(stages) - 0.4, -0.6)
    axis.grid(axis="y", visible=False)
    axis.tick_params(axis="y", length=0)
    label(axis, "", "", "GiB of a rank")
    figure.legend(loc="outside lower center", ncols=4)
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    save(figure, output, comment)
    return output


def _mark(axis: Any, device: str, gpu: GPU, most: float) -> None:
    """Draw a line at the memory of the GPU where it is in sight, and end the axis behind it."""
    text = f"{device}: {gpu.gib:.0f} GiB"
    if most < 0.35 * gpu.gib:  # bars would be slivers
        axis.set_title(f"{text}, beyond the right end", color=GRAY, loc="right")
        axis.set_xlim(0, 1.04 * most)
        return
    axis.axvline(gpu.gib, color=VERMILION, linestyle="--", linewidth=1.2)
    axis.set_title(text, color=VERMILION, loc="right")
    axis.set_xlim(0, 1.04 * max(most, gpu.gib))


def _size(stage: Stage, part: str) -> int:
    if part == "gaps":
        return max(0, stage.memory["reserved"] - stage.memory["peak"])
    return stage.memory[part]


def _name(stage: Stage) -> str:
    name = f"stage {stage.stage}" if stage.rank is not None else f"(stage {stage.stage})"
    count = len(stage.layers)
    return f"{name}: {count} layer{'s' * (count != 1)}"
