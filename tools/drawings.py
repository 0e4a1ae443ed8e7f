"""The drawings of docs/concepts.md: ``python tools/drawings.py`` writes them to docs/figures.

Every number in them is computed here from the definitions of docs/maths.md. The files are SVG
whose colors follow the reader's choice of light or dark.

Shapes: S tokens, H heads.
"""

import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from megasink.balance.loss import head_balance_gradient, head_balance_loss

ROOT = Path(__file__).parents[1]
Array = NDArray[np.float64]
STYLE = """
text { font: 14px system-ui, "DejaVu Sans", sans-serif; fill: #1f2430 }
.small { font-size: 12px } .title { font-weight: 600 } .mono { font-family: monospace }
.soft { fill: #5b6472 } .light { fill: #ffffff } .mid { text-anchor: middle }
.end { text-anchor: end } .back { fill: #ffffff } .box { fill: #eef2f8; stroke: #8a94a6 }
.line { stroke: #5b6472; fill: none; stroke-width: 1.5 } .cell { stroke: #c8ced8; fill: none }
.blue { fill: #0072b2 } .red { fill: #d55e00 } .redline { stroke: #d55e00; fill: none;
stroke-width: 2 } .dash { stroke-dasharray: 5 4 } .head { fill: #5b6472 } .redhead { fill: #d55e00 }
.redtext { fill: #b34700 }
@media (prefers-color-scheme: dark) {
text { fill: #e4e8f0 } .soft { fill: #a9b2c1 } .light { fill: #ffffff } .back { fill: #1b1f27 }
.box { fill: #2a303c; stroke: #7b8598 } .line { stroke: #a9b2c1 } .cell { stroke: #454d5b }
.blue { fill: #3a9bd9 } .red { fill: #f0803c } .redline { stroke: #f0803c }
.head { fill: #a9b2c1 } .redhead { fill: #f0803c } .redtext { fill: #f0803c } }
"""


def sigmoid(x: Array) -> Array:
    """Return 1 / (1 + exp(-x))."""
    return 1 / (1 + np.exp(-x))


class Drawing:
    """An SVG, built up by its parts; sizes in pixels."""

    def __init__(self, width: int, height: int, what: str) -> None:
        """Begin a drawing that `what` describes to who cannot see it."""
        marks = "".join(
            f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" '
            f'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" '
            f'class="{name}"/></marker>'
            for name in ("head", "redhead")
        )
        self.parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img"><title>{escape(what)}</title>'
            f"<style>{STYLE}</style><defs>{marks}</defs>",
            f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """Write; _x and ^x set the next character, or {those in braces}, lower or higher."""
        out, rest = "", text
        while rest:
            mark, rest = rest[0], rest[1:]
            if mark not in "_^":
                out += escape(mark)
                continue
            part, rest = rest[1:].split("}", 1) if rest.startswith("{") else (rest[:1], rest[1:])
            down = 4 if mark == "_" else -6
            out += f'<tspan dy="{down}" font-size="0.75em">{escape(part)}</tspan>'
            out += f'<tspan dy="{-down}">\u200b</tspan>'
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{out}</text>')

    def rect(
        self, x: float, y: float, width: float, height: float, kind: str, opacity: float = 1
    ) -> None:
        """Draw a rectangle."""
        self.parts.append(
            f'<rect x="{x:g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" '
            f'class="{kind}" fill-opacity="{opacity:.2f}"/>'
        )

    def path(
        self, points: Sequence[tuple[float, float]], kind: str = "line", end: str = ""
    ) -> None:
        """Draw a line through points, with a head of an arrow if `end` names one."""
        line = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
        arrow = f' marker-end="url(#{end})"' if end else ""
        self.parts.append(f'<path d="M{line}" class="{kind}"{arrow}/>')

    def box(self, x: float, y: float, width: float, lines: Sequence[str]) -> None:
        """Draw a box with lines of text in it, 20 pixels each."""
        height = 20 * len(lines) + 14
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height}" rx="6" class="box"/>'
        )
        for row, text in enumerate(lines):
            self.text(x + width / 2, y + 22 + 20 * row, text, "mid")

    def cells(self, x: float, y: float, size: float, table: Array) -> None:
        """Draw a table of shares: the deeper the blue, the closer to 1. NaN stays blank."""
        for (row, column), share in np.ndenumerate(table):
            if np.isnan(share):
                continue
            left, top = x + size * column, y + size * row
            self.rect(left, top, size, size, "blue", share)
            self.rect(left, top, size, size, "cell")
            if share >= 0.1 and size >= 28:
                kind = "small mid light" if share > 0.5 else "small mid"
                self.text(
                    left + size / 2, top + size / 2 + 4, f"{share:.2f}".removeprefix("0"), kind
                )

    def bars(self, x: float, y: float, size: float, height: float, share_H: Array) -> None:
        """Draw upright bars of shares, each `size` wide, on the line y."""
        for head, share in enumerate(share_H):
            left, top = x + size * head, y - height * share
            self.rect(left + 3, top, size - 6, height * share, "blue")
            self.text(left + size / 2, top - 5, f"{share:.2f}", "small mid")
        self.path([(x, y), (x + size * len(share_H), y)])

    def done(self) -> str:
        """Return the file's text."""
        return "".join(self.parts) + "</svg>\n"


TOKENS = ("<s>", "the", "cat", "sat", ".", "the", "cat", "sat")
SINK_LOGIT, MATCH = 3.0, 5.0


def attention_of_a_head() -> tuple[tuple[Array, Array], tuple[Array, Array]]:
    """Return (weights [S, S], gates [S]) without a sink, and (weights [S, 1 + S], gates) with one.

    The head looks for what stood behind the same token before: a score of MATCH there, else 0.
    Without a sink it gives the first token SINK_LOGIT; with one, that is the sink's logit.
    """
    count = len(TOKENS)
    score_SS = np.full((count, count), -np.inf)
    for i, j in zip(*np.tril_indices(count), strict=True):
        score_SS[i, j] = MATCH * (j > 0 and TOKENS[j - 1] == TOKENS[i])
    plain_SS = score_SS.copy()
    plain_SS[:, 0] = SINK_LOGIT
    weight_SS = np.exp(plain_SS) / np.exp(plain_SS).sum(1, keepdims=True)
    lse_S = np.log(np.exp(score_SS).sum(1))
    gate_S = sigmoid(lse_S - SINK_LOGIT)
    with_sink = np.exp(score_SS - lse_S[:, None]) * gate_S[:, None]
    sink_SS = np.concatenate([1 - gate_S[:, None], with_sink], 1)
    return (weight_SS, 1 - weight_SS[:, 0]), (sink_SS, gate_S)


def sink() -> str:
    """Draw the weights of a head without and with a learnable sink, and its gates."""
    drawing = Drawing(
        860,
        402,
        "Weights of one attention head: without a learnable sink the first token takes what is "
        "left over; with one, the sink does. The gate is what is left for the other tokens.",
    )
    size, top = 30, 70
    hidden = np.triu(np.ones((len(TOKENS), len(TOKENS)), dtype=bool), 1)
    plain, learnt = attention_of_a_head()
    plain[0][hidden] = learnt[0][:, 1:][hidden] = np.nan
    titles = ("vanilla: the first token is the sink", "a learnable sink, of logit s_h = 3")
    columns = (TOKENS, ("sink", *TOKENS))
    gates = ("G_i = 1 - A_{i0}", "G_i = sigmoid(LSE_i - s_h)")
    for left, title, names, (weight, gate_S), formula in zip(
        (60, 460), titles, columns, (plain, learnt), gates, strict=True
    ):
        drawing.text(left, 30, title, "title")
        drawing.cells(left, top, size, weight)
        for row, token in enumerate(TOKENS):
            drawing.text(left - 8, top + size * row + 20, token, "small end")
        for column, token in enumerate(names):
            x = left + size * (column + 0.5)
            drawing.text(x, top + size * len(TOKENS) + 18, token, "small mid")
        drawing.rect(left, top, size, size * len(TOKENS), "redline", 0)
        right = left + size * len(names) + 16
        drawing.text(right, top - 10, "gate", "small")
        for row, share in enumerate(gate_S):
            y = top + size * row + 7
            drawing.rect(right, y, 50 * share, 16, "red")
            drawing.text(right + 50 * share + 4, y + 13, f"{share:.2f}", "small")
        drawing.text(left, top + size * len(TOKENS) + 46, formula, "redtext")
    note = (
        "A row is a query, a column a key; what has no number is below 0.1. In the last three rows "
    )
    drawing.text(60, 384, f"{note}the head finds what it looks for.", "small soft")
    return drawing.done()


def gate() -> str:
    """Draw where the gate comes from, and the way of its gradient."""
    drawing = Drawing(
        860,
        330,
        "The gate of a head, from the log-sum-exp of the flash kernel and the sink logit or from "
        "the hidden state, multiplies its output; its mean is the importance of the head.",
    )
    drawing.box(20, 60, 90, ["hidden", "state x"])
    drawing.path([(110, 87), (150, 87)], end="head")
    drawing.box(150, 60, 190, ["flash kernel, unchanged:", "softmax(q k^T) v"])
    drawing.path([(340, 74), (690, 74)], end="head")
    drawing.text(352, 66, "output O")
    drawing.path([(340, 100), (385, 100), (385, 150)], end="head")
    drawing.text(380, 138, "LSE", "end")
    drawing.box(300, 150, 240, ["sink: G = sigmoid(LSE - s_h)"])
    drawing.path([(65, 114), (65, 215), (300, 215)], "line dash", end="head")
    drawing.box(300, 198, 240, ["or gated: G = sigmoid(x w_h)"])
    drawing.path([(540, 167), (560, 167), (560, 190)])
    drawing.path([(540, 215), (560, 215), (560, 190), (712, 190), (712, 94)], end="head")
    drawing.text(568, 182, "gate G, 0 to 1")
    drawing.box(690, 58, 44, ["×"])
    drawing.path([(734, 75), (770, 75)], end="head")
    drawing.text(776, 80, "G O")
    drawing.path([(640, 190), (640, 244)], end="head")
    drawing.box(520, 244, 280, ["mean over all tokens: importance", "Imp_h -> head-balance loss"])
    drawing.path([(520, 274), (245, 274), (245, 117)], "redline dash", end="redhead")
    drawing.text(258, 266, "gradient of the loss, through LSE:", "small redtext")
    drawing.text(258, 294, "flash kernels drop it, megasink restores it", "small redtext")
    drawing.text(20, 30, "Where the gate of a head comes from, and what it does", "title")
    return drawing.done()


OPENNESS = {
    "every head at work": np.zeros(8),
    "collapsed: two heads do the work": np.array([3.0, -2.5, -3.0, 2.0, -2.0, -3.5, -2.5, -3.0]),
}
"""What a gate's argument is for a head, the same for all tokens."""
DESCENT, RATE = 60, 0.4


def gates_of(openness_H: Array, tokens: int = 12) -> Array:
    """Return gates [S, H] of heads: sigmoid of their openness and of what differs by token."""
    token_SH = 1.2 * np.sin(1.7 * np.arange(tokens)[:, None] + 2.3 * np.arange(8))
    return sigmoid(openness_H + token_SH)


def collapse() -> str:
    """Draw the gates of a layer whose heads are all at work, and of one that has collapsed."""
    drawing = Drawing(
        860,
        400,
        "Gates of eight heads for twelve tokens, their means, and the coefficient of variation: "
        "small if all heads are at work, large if two heads do the work.",
    )
    size, base, top = 40, 170, 182
    for left, (title, openness_H) in zip((70, 480), OPENNESS.items(), strict=True):
        gate_SH = gates_of(openness_H)
        importance_H = gate_SH.mean(0)
        spread = importance_H.std() / importance_H.mean()
        drawing.text(left, 30, title, "title")
        drawing.text(left, 52, f"CV = std / mean of the bars = {spread:.2f}", "redtext")
        drawing.bars(left, base, size, 90, importance_H)
        for token, row_H in enumerate(gate_SH):
            for head, share in enumerate(row_H):
                drawing.rect(left + size * head, top + 15 * token, size, 15, "blue", share)
                drawing.rect(left + size * head, top + 15 * token, size, 15, "cell")
        for head in range(8):
            drawing.text(left + size * (head + 0.5), top + 195, f"{head}", "small mid")
        drawing.text(left - 8, base - 20, "Imp_h", "small end")
        drawing.text(left - 8, top + 95, "tokens", "small end")
        drawing.text(left + 4 * size, top + 212, "head; blue: its gate is open", "small mid soft")
    return drawing.done()


def descent() -> Array:
    """Return importances [steps, H] of the collapsed layer under the head-balance loss alone."""
    openness_H, rows = list(OPENNESS.values())[1], []
    for _ in range(DESCENT + 1):
        gate_SH = gates_of(openness_H)
        rows.append(gate_SH.mean(0))
        opening_H = head_balance_gradient(torch.from_numpy(rows[-1]), 1.0).numpy()
        openness_H = openness_H - RATE * opening_H * (gate_SH * (1 - gate_SH)).mean(0)
    return np.stack(rows)


def balance() -> str:
    """Draw the gradient of the head-balance loss on a collapsed layer, and where it leads."""
    drawing = Drawing(
        860,
        330,
        "The head-balance loss opens the gates of heads below mu + var / mu and closes those above "
        "it; descending on it alone brings the importances of a layer together.",
    )
    path = descent()
    importance_H = path[0]
    gradient_H = head_balance_gradient(torch.from_numpy(importance_H), 1.0).numpy()
    size, left, base, height = 42, 60, 280, 190
    drawing.text(left, 30, "one step: low heads open, high heads close", "title")
    drawing.text(left, 52, "arrows: - dL / d Imp_h, not to the scale of the bars", "small redtext")
    drawing.bars(left, base, size, height, importance_H)
    middle = importance_H.mean() + importance_H.var() / importance_H.mean()
    line = base - height * middle
    drawing.path([(left, line), (left + 8 * size, line)], "line dash")
    drawing.text(left + 8 * size - 4, line - 6, f"mu + var / mu = {middle:.2f}", "small end")
    longest = np.abs(gradient_H).max()
    for head, slope in enumerate(gradient_H):
        x, top = left + size * (head + 0.5), base - height * importance_H[head]
        begin = top - 20 if slope < 0 else top + 6
        drawing.path([(x, begin), (x, begin - 80 * -slope / longest)], "redline", end="redhead")
    for head in range(8):
        drawing.text(left + size * (head + 0.5), base + 18, f"{head}", "small mid")
    drawing.text(left - 8, base - 80, "Imp_h", "small end")
    drawing.text(left + 4 * size, base + 36, "head", "small mid soft")
    left, width = 500, 300
    drawing.text(left, 30, "many steps on this loss alone", "title")
    losses = [float(head_balance_loss(torch.from_numpy(row), 1.0)) for row in path[[0, -1]]]
    from_to = f"H CV^2: {losses[0]:.2f} -> {losses[1]:.2f}"
    drawing.text(left, 52, from_to, "small redtext")
    drawing.path([(left, base - height), (left, base), (left + width, base)])
    for share in (0, 0.5, 1):
        drawing.text(left - 6, base - height * share + 4, f"{share:g}", "small end")
    for head in range(8):
        points = [
            (left + width * step / DESCENT, base - height * row[head])
            for step, row in enumerate(path)
        ]
        drawing.path(points, "redline" if gradient_H[head] > 0 else "line")
    drawing.text(left + 8, base - height + 4, "Imp_h", "small")
    drawing.text(left + 110, base - height + 18, "heads above the dashed line", "small redtext")
    drawing.text(left + width / 2, base + 18, f"0 to {DESCENT} steps", "small mid soft")
    return drawing.done()


DRAWINGS: dict[str, Callable[[], Any]] = {
    "concept-sink.svg": sink,
    "concept-gate.svg": gate,
    "concept-collapse.svg": collapse,
    "concept-balance.svg": balance,
}


def main() -> int:
    """Write every drawing."""
    for name, draw in DRAWINGS.items():
        (ROOT / "docs" / "figures" / name).write_text(draw(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
