"""The section of results.md on importance: two measures side by side, and what was
expected of them."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from examples.real_models.expected import met, title_of_model
from examples.real_models.importance_figure import title_of
from examples.real_models.wheels import sources

SHOWN = (
    *("mask_gradient", "mask_gradient_signed", "circuit_ahon_ln", "circuit_ahon", "ahon_ln"),
    *("importance", "awft", "ftvvn", "avvn"),
)
MEASURES = {"kl": "divergence", "rise": "loss"}
_KINDS = {"all": "all heads", "given_depth": "given the layer", "within": "in a layer"}


def tables(found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield for each model the rank correlations of some scores with the loss and the divergence,
    best by the loss first, and how far other texts come."""
    for model in found:
        title = sources()["models"][model["model"]]["title"]
        texts = f"{model['measured']['texts']} texts of 128 tokens"
        yield f"Rank correlation with the effect of zeroing each head, {title}, {texts}:"
        yield ""
        heads = (f"{m}: {k}" for m in MEASURES.values() for k in _KINDS.values())
        yield f"| score | {' | '.join(heads)} |"
        yield "|" + "---|" * (1 + len(MEASURES) * len(_KINDS))
        loss = model["rise"]["scores"]
        named: dict[tuple[str, ...], list[str]] = {}  # of equal rows one: importance is 1 - AWFT
        for score in sorted(SHOWN, key=lambda score: -loss[score]["all"]):
            rows = [model[measure]["scores"][score] for measure in MEASURES]
            cells = tuple(_cell(row, kind) for row in rows for kind in _KINDS)
            named.setdefault(cells, []).append(title_of(score))
        yield from (_row(" = 1 - ".join(names), cells) for cells, names in named.items())
        ceiling = [model[measure]["reachable"] for measure in MEASURES]
        yield _row(
            "as half of the texts rank them for the others",
            [_number(row.get(kind)) for row in ceiling for kind in _KINDS],
        )
        yield ""


def _row(title: str, cells: Sequence[str]) -> str:
    return f"| {title} | {' | '.join(cells)} |"


def _cell(row: Mapping[str, Any], kind: str) -> str:
    low, high = row[f"{kind}_interval"]
    if row[kind] is None:
        return "–"
    return f"{row[kind]:.2f} ({low:.2f} to {high:.2f})"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def numbers(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return name -> number of a model of importance.json: `measured` as it is, a score's as
    `loss all importance`, and its place among all scores as `loss place importance`."""
    flat = dict(model["measured"])
    for measure, word in MEASURES.items():
        rows = model[measure]["scores"]
        order = sorted(rows, key=lambda score: -(rows[score]["all"] or 0))
        for place, score in enumerate(order, 1):
            flat[f"{word} place {score}"] = place
            for kind in (*_KINDS, "kept"):
                flat[f"{word} {kind} {score}"] = rows[score][kind]
            flat[f"{word} low within {score}"] = rows[score]["within_interval"][0]
    return flat


def expectations(checks: Sequence[Mapping[str, Any]], found: Sequence[Any]) -> Iterator[str]:
    """Yield what was expected of importance and other scores, what came, and which was missed."""
    yield f"| expected | {' | '.join(title_of_model(model['model']) for model in found)} |"
    yield "|" + "---|" * (1 + len(found))
    for check in checks:
        cells = []
        for model in found:
            if model["model"] not in check:
                cells.append("–")
                continue
            values, came = numbers(model), met(check[model["model"]], numbers(model), check["of"])
            open_ = check.get("texts", 0) > model["measured"]["texts"]
            verdict = "open" if open_ else "as expected" if came else "**missed**"
            cells.append(f"{values[check['of']]:.3g}, {verdict}")
        yield f"| {check['says']} | {' | '.join(cells)} |"


def places(model: Mapping[str, Any]) -> str:
    """Return where importance stands among all scores, by both measures."""
    values, scores = numbers(model), len(model["kl"]["scores"])
    divergence, loss = (values[f"{word} place importance"] for word in MEASURES.values())
    return (
        f"In {title_of_model(model['model'])} importance is number {divergence} of {scores} scores "
        f"by the divergence and number {loss} by the loss."
    )
