"""The opening of a report: a summary of one model in words, and two pictures."""

from typing import Any

import numpy as np

from megasink.analysis.analysis_object import Analysis, array
from megasink.analysis.capture.input_samples import MADE
from megasink.analysis.metrics.residual_stream import longest_first_token
from megasink.analysis.pages.drawing import OPENING, Drawing, drawing
from megasink.analysis.result_schemas import SampleResults, number_of
from megasink.attention.constants import SINK_EPSILON
from megasink.errors import UserError
from megasink.figures import style
from megasink.figures.recorded_panels import bars, curve, named_axes

ENOUGH_SAMPLES, ENOUGH_TOKENS = 16, 64
"""With fewer samples or tokens, the page warns that its results say little about the model."""
LARGE = 10
"""Lowest ratio of token 0's norm to that of the others that is called a massive activation."""
_NEEDED = ("sink_rate", "first_token_attention", "circuit_stage", "importance", "imbalance")
DRAWINGS: list[Drawing] = []


def in_words(analysis: Analysis) -> list[str]:
    """Return paragraphs on what an analysis found on texts, and its sinks on made-up tokens."""
    results = analysis.results
    made = {name: of for name, of in results.datasets.items() if name in MADE}
    if len(made) == len(results.datasets):  # no texts
        of = {f"{analysis.name} on {name} tokens": results for name in list(made)[:1]}
        made = dict(list(made.items())[1:])
    else:
        of = {analysis.name: results}
    lines = [line for name, part in of.items() for line in _paragraphs(name, part)]
    return lines + [_sinks(f"{analysis.name} on {n} tokens", part) for n, part in made.items()]


def _paragraphs(name: str, of: SampleResults) -> list[str]:
    for needed in _NEEDED:
        if number_of(of, needed) is None:
            raise UserError(f"the analysis of {name} has no {needed}: analyze the model again")
    paragraphs = [_sinks(name, of), _norms(of), _heads(of)]
    length = of.tokens / of.samples
    if of.samples < ENOUGH_SAMPLES or length < ENOUGH_TOKENS:
        paragraphs.append(
            f"With fewer than {ENOUGH_SAMPLES} samples or {ENOUGH_TOKENS} tokens these numbers say "
            "little about the model: they vary between samples, and sink rates fall with length."
        )
    return [paragraph for paragraph in paragraphs if paragraph]


def _sinks(name: str, of: SampleResults) -> str:
    """State how many heads have a sink, from which layer on, and how much attention it gets."""
    rate, attention = number_of(of, "sink_rate"), number_of(of, "first_token_attention")
    even = number_of(of, "even_weight")
    text = (
        f"{name}, {of.samples:,} sample{'s' * (of.samples != 1)} of {of.tokens / of.samples:.0f} "
        f"tokens: {100 * rate:.1f}% of the heads{_spread(of, 'sink_rate')} have an attention sink "
        f"on the first token, that is, they give it more than {SINK_EPSILON} of their "
        f"attention on average. This token gets {100 * attention:.1f}%"
        f"{_spread(of, 'first_token_attention')}"
        + (f", and with evenly spread attention it would get {100 * even:.1f}%." if even else ".")
    )
    by_layer = _values(of, "sink_rate_by_layer")
    if by_layer is not None and np.nanmax(by_layer) >= 0.5:
        first = int(np.flatnonzero(by_layer >= 0.5)[0])
        text += f" Layer {first} is the first in which half of the heads have a sink."
    return text


def _norms(of: SampleResults) -> str:
    """State whether and where the first token's hidden state is massive."""
    by_state, ratio = _values(of, "massive_ratio"), number_of(of, "massive_ratio")
    if by_state is None or ratio is None:
        return ""
    layer = longest_first_token(np.nan_to_num(by_state))
    massive = "a massive activation" if ratio >= LARGE else "there is no massive activation"
    return (
        f"After layer {layer} the first token's hidden state is {ratio:.1f} times as long as the "
        "mean of the others (averaged over the samples), more than after any other "
        f"layer: {massive}."
    )


def _heads(of: SampleResults) -> str:
    """State the heads of highest and lowest importance, and the limits of that number."""
    table = array(of.metrics["importance"].values)
    least, most = (
        np.unravel_index(find(table), table.shape) for find in (np.nanargmin, np.nanargmax)
    )
    low, high = f"{table[least]:.3f}", f"{table[most]:.3f}"
    runs = f"is {low} in every head"
    if low != high:
        runs = f"runs from {low} (layer {least[0]}, head {least[1]}) to "
        runs += f"{high} (layer {most[0]}, head {most[1]})"
    return (
        "Head importance is the share of a head's attention that does not go to its sink (without "
        "a sink: to the first token). For a gated head it is the mean of the gate. "
        f"Importance {runs}. The head imbalance, the coefficient of variation of importance "
        f"within a layer, is {number_of(of, 'imbalance'):.3f}. "
        "`megasink ablate` measures a different number: the loss without a head."
    )


def _values(of: SampleResults, name: str) -> Any:
    metric = of.metrics.get(name)
    return None if metric is None else array(metric.values)


def _spread(of: SampleResults, metric: str) -> str:
    """Return the standard deviation of a percentage, in parentheses; nothing for one sample."""
    deviation = of.spread.get(metric)
    return "" if deviation is None else f" (± {100 * deviation:.1f} over samples)"


@drawing(
    DRAWINGS,
    "opening",
    OPENING,
    "Sinks, hidden states and heads by layer",
    by_model=True,
    finding=lambda analysis: " ".join(_paragraphs(analysis.name, analysis.results)[:2]),
)
def _draw(analysis: Analysis) -> Any:
    """Left: the share of each layer's heads that have a sink on the first token (P2.2), and the
    length of the hidden state after each layer (P4.1), on the same axis. Right: the importance of
    every head (P0, Eq. 5); dark heads look at the sink.
    """
    figure, ((sinks, heads), (norms, blank)) = style.panels(
        2, 2, 4.6, width=11, gridspec_kw={"width_ratios": (1.15, 1)}, sharex="col"
    )
    blank.remove()
    # One map beside both curves.
    heads.remove()
    heads = figure.add_subplot(sinks.get_gridspec()[:, 1])
    rate = analysis.values("sink_rate_by_layer")
    layers = np.arange(len(rate))
    bars(sinks, 100 * rate, color=style.BLUE, width=0.8)
    sinks.set_ylim(0, 100)
    style.label(sinks, "heads with an attention sink", "% of the layer's heads")
    named_axes(sinks, across="layer")
    norm = analysis.values("state_norm")
    after = norm[2::2]  # the output of each block
    curve(norms, layers, after[:, 0], "o-", "token 0", color=style.VERMILION)
    if after.shape[1] > 1:
        others = np.nanmean(after[:, 1:], axis=1)
        curve(norms, layers, others, "s--", "mean of the others", color=style.BLUE)
    norms.legend(loc="best")
    style.label(norms, "length of the hidden state", "L2 norm", "layer")
    style.log_scale(norms)
    style.whole_numbers(norms.xaxis)
    table = analysis.values("importance")
    image = style.heatmap(heads, table.T, vmin=0, vmax=1, cmap=style.MAP, origin="lower")
    style.label(heads, "head importance", "head", "layer")
    figure.colorbar(image, ax=heads, label="share of attention off the sink")
    return figure
