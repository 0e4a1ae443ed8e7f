"""Write examples/real_models/results.md from the committed results alone.

    python -m examples.real_models.page           # after every change of results/
    python -m examples.real_models.page --take    # first take what is new from runs/real-models

Every number of the page is in results/; its sentences are in claims.toml and page.toml.
"""

import argparse
import json
import math
import shutil
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from examples.real_models.claims import Claim, claims
from examples.real_models.expected import (
    came,
    count_of,
    held,
    met,
    title_of_model,
    with_missed,
)
from examples.real_models.fidelity import HELD_OUT
from examples.real_models.importance_section import expectations, places, tables
from examples.real_models.inactive_figure import draw_inactive
from examples.real_models.training import (
    NUMBERS,
    balance_checks,
    by_seed,
    difference,
    surgery,
    surgery_checks,
    surgery_numbers,
)
from examples.real_models.training_figure import LABELS, draw_balance, draw_surgery
from examples.real_models.wheels import FOLDER, sources
from examples.real_models.zeroing import RESULTS

PAGE = Path(__file__).with_name("results.md")
PICTURES = Path("figures")
WORDS = Path(__file__).with_name("page.toml")
TAKEN = (
    *("claims.json", "claims.png", "importance.json", "importance.png", "fidelity-smollm2.json"),
    *("balance-smollm2.jsonl", "surgery-smollm2.jsonl"),
)
PAPERS = {
    "P0": "Head importance, first values, and geometry (P0)",
    "P2": "When attention sink emerges (P2)",
    "P3": "Inactive heads (P3)",
    "P4": "The circuit of the first token (P4)",
}
_ABSENT = {"number": None}
SHOWN = (90, 120)
"""Steps of surgery whose numbers are shown; at the first of them nothing was rounded."""


def value_of(found: dict[str, Any]) -> str:
    """Return a number with its interval, or a dash."""
    number = found["number"]
    if number is None:
        return "–"
    if found["interval"] is None:
        return rounded(number)
    low, high = found["interval"]
    return f"{rounded(number)} ({rounded(low)} to {rounded(high)})"


def rounded(number: float) -> str:
    """Return a number with two or three digits that say something."""
    if abs(number) < 5e-4:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(number))))
    return f"{number:,.{min(digits, 3)}f}"


def table(paper: str, found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of a paper's claims."""
    titles = (sources()["models"][model["model"]]["title"] for model in found)
    yield f"| claim | published | {' | '.join(titles)} | expected | verdict |"
    yield "|" + "---|" * (4 + len(found))
    for claim in claims():
        if claim.paper == paper:
            yield _row(claim, found)


def _row(claim: Claim, found: Sequence[dict[str, Any]]) -> str:
    missed = [title_of_model(model["model"]) for model in found if came(claim, model) is False]
    cells = (
        f"{claim.says} ({claim.rows})",
        claim.published,
        *(_values(claim, model["numbers"]) for model in found),
        with_missed(claim.predicted, missed),
        claim.verdict,
    )
    return f"| {' | '.join(cells)} |"


def _values(claim: Claim, numbers: dict[str, Any]) -> str:
    """Return a claim's numbers in a model, the further ones by name."""
    first, others = value_of(numbers[claim.number]), claim.also.items()
    further = (f"{words} {value_of(numbers[name])}" for words, name in others)
    return "; ".join([first, *further])


def standing(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield how many of the papers' claims hold in each model, and how many expectations came."""
    rows = claims()
    for model in found:
        counts = held(rows, model["model"])
        yield (
            f"Of {len(rows)} claims {counts['yes']} hold in {title_of_model(model['model'])}, "
            f"{counts['partly']} in part, {counts['no']} do not; not measured, or not measurable "
            f"there: {counts['']}."
        )
    expected, missed = count_of(rows, found)
    yield f"Of {expected} expected numbers {missed} were missed."


def fidelity_lines(found: dict[str, Any]) -> Iterator[str]:
    """Yield what fidelity.py found."""
    weights = found["weights"]
    yield f"- To Megatron: {found['verified']}."
    yield (
        f"- And back: {weights['tensors'] - weights['different']} of {weights['tensors']} tensors "
        f"are equal byte by byte; {found['same_greedy_tokens']} of 200 greedy tokens are the same."
    )
    steps = found["transformers"]
    yield (
        f"- {len(steps)} steps of AdamW take the loss of one text from {steps[0]['loss']:.3f} to "
        f"{steps[-1]['loss']:.3f} in transformers. Largest relative difference of Megatron:"
    )
    for layout, apart in found["apart"].items():
        yield f"    - {layout}: loss {apart['loss']:.1e}, gradient norm {apart['norm']:.1e}."
    ours, theirs = (found["perplexity"][side] for side in ("megatron", "transformers"))
    yield (
        f"- The run trained on one rank, exported: perplexity of {HELD_OUT} texts {theirs:.4f} in "
        f"transformers, {ours:.4f} in Megatron."
    )


def balance_table(path: Path) -> Iterator[str]:
    """Yield what each arm did to heads and losses, and its paired difference from no loss."""
    before, arms = by_seed(path)
    yield f"| {len(arms['none']['held-out loss'])} seeds | before | {' | '.join(LABELS.values())} |"
    yield "|" + "---|" * (2 + len(arms))
    for name, number in NUMBERS.items():
        show = "{:.4f}".format if "loss" in name else rounded
        start = number(before, before)
        cells = ["–" if math.isnan(start) else show(start)]
        cells.append(show(float(arms["none"][name].mean())))
        for arm in list(arms)[1:]:
            apart = difference(arms[arm][name], arms["none"][name])
            cells.append(f"{show(float(arms[arm][name].mean()))}; {value_of(apart)}")
        yield f"| {name} | {' | '.join(cells)} |"
        if name == "held-out loss":
            losses = [found[name] for found in arms.values()]  # no loss, Eq. 7, and Eq. 8 twice
            cells = [value_of(difference(loss, losses[1])) for loss in losses[2:]]
            yield f"| its difference from Eq. 7 | – | – | – | {' | '.join(cells)} |"


def verdicts(section: str, numbers: dict[str, Any]) -> Iterator[str]:
    """Yield what was expected of a section's runs, and what came, by the section's numbers."""
    yield "| claim | published | expected | verdict |"
    yield "|---|---|---|---|"
    for row in tomllib.loads(WORDS.read_text())["verdict"]:
        if row["section"] == section:
            came = all(met(bounds, numbers, name) for name, bounds in row["expected"].items())
            predicted = row["predicted"] + ("" if came else " **Missed.**")
            yield f"| {row['says']} | {row['published']} | {predicted} | {row['verdict']} |"


def surgery_table(path: Path) -> Iterator[str]:
    """Yield what is measured of each variant, before and after the training."""
    found = surgery(path)
    shown = {"as it was": found["vanilla", 0], "sinks put in": found["sink", 0]}
    shown |= {f"{arm}, {n} steps": stage for (arm, n), stage in sorted(found.items()) if n in SHOWN}
    numbers = {name: surgery_numbers(s, found["vanilla", 0]) for name, s in shown.items()}
    yield f"| | {' | '.join(shown)} |"
    yield "|" + "---|" * (1 + len(shown))
    for row in numbers["as it was"]:
        cells = (value_of(found.get(row, _ABSENT)) for found in numbers.values())
        yield f"| {row} | {' | '.join(cells)} |"


def page(folder: Path = RESULTS) -> str:
    """Return the page."""
    words = tomllib.loads(WORDS.read_text())
    found, importance = (
        json.loads((folder / name).read_text()) for name in ("claims.json", "importance.json")
    )
    lines = [
        "# Real models",
        "",
        words["opening"].strip(),
        "",
        *standing(found),
        "",
        words["left_out"].strip(),
        "",
        f"![Sinks and inactive heads of two models]({PICTURES}/claims.png)",
        "",
        words["picture"].strip(),
        "",
        "## Is importance what a model loses?",
        "",
        words["importance"].strip(),
        "",
        f"![Scores of heads and what is lost without each]({PICTURES}/importance.png)",
        "",
        *tables(importance),
        *map(places, importance),
        words["importance_after"].strip(),
        "",
        words["importance_expected"].strip(),
        "",
        *expectations(words["importance_check"], importance),
    ]
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}", "", words[paper].strip(), "", *table(paper, found)]
        if paper == "P3":
            lines += ["", f"![Heads zeroed in a task, and inactive heads]({PICTURES}/inactive.png)"]
            lines += ["", words["inactive"].strip()]
    balance, operated = (folder / f"{name}-smollm2.jsonl" for name in ("balance", "surgery"))
    lines += ["", "## Fine-tuning with the head-balance loss", "", words["balance"].strip(), ""]
    lines += [f"![Heads and losses of four arms]({PICTURES}/balance.png)", ""]
    lines += [words["balance_table"].strip(), "", *balance_table(balance), ""]
    lines += [*verdicts("balance", balance_checks(balance)), "", words["balance_after"].strip()]
    lines += ["", "## Sink surgery", "", words["surgery"].strip(), ""]
    lines += [f"![Three variants, trained on]({PICTURES}/surgery.png)", ""]
    lines += [*surgery_table(operated), "", *verdicts("surgery", surgery_checks(operated))]
    lines += ["", words["surgery_after"].strip()]
    fidelity = json.loads((folder / "fidelity-smollm2.json").read_text())
    lines += ["", "## In Megatron, and back", "", words["fidelity"].strip(), ""]
    lines += fidelity_lines(fidelity)
    lines += ["", "## What this is not", "", words["limits"].strip()]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--take", action="store_true", help="copy new results to results/ first")
    if parser.parse_args(arguments).take:
        for name in TAKEN:
            if (FOLDER / name).is_file():
                shutil.copyfile(FOLDER / name, RESULTS / name)
    pictures = PAGE.parent / PICTURES
    pictures.mkdir(parents=True, exist_ok=True)
    for name in ("claims.png", "importance.png"):
        shutil.copyfile(RESULTS / name, pictures / name)
    draw_inactive(json.loads((RESULTS / "claims.json").read_text()), pictures / "inactive.png")
    draw_balance(RESULTS / "balance-smollm2.jsonl", pictures / "balance.png")
    draw_surgery(RESULTS / "surgery-smollm2.jsonl", pictures / "surgery.png")
    PAGE.write_text(page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "page.py")
