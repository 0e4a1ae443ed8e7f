"""Write docs/real-models.md from the committed results alone.

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
from examples.real_models.importance_figure import title_of
from examples.real_models.wheels import FOLDER, sources
from examples.real_models.zeroing import RESULTS

PAGE = Path(__file__).parents[2] / "docs" / "real-models.md"
PICTURES = Path("figures/real-models")
WORDS = Path(__file__).with_name("page.toml")
TAKEN = ("claims.json", "claims.png", "importance.json", "importance.png", "fidelity-smollm2.json")
PAPERS = {
    "P0": "Head importance, first values, and geometry (P0)",
    "P2": "When attention sink emerges (P2)",
    "P3": "Inactive heads (P3)",
    "P4": "The circuit of the first token (P4)",
}
_SHOWN = ("mask_gradient", "circuit_ahon_ln", "importance", "ahon_ln", "awft", "avvn")


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
    values = (value_of(model["numbers"][claim.number]) for model in found)
    cells = (
        f"{claim.says} ({claim.rows})",
        claim.published,
        *values,
        claim.predicted,
        claim.verdict,
    )
    return f"| {' | '.join(cells)} |"


def importance_table(found: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Yield rank correlations of some scores with the divergence, and how far each list reaches."""
    titles = [sources()["models"][model["model"]]["title"] for model in found]
    heads = " | ".join(f"{title}: all heads | in a layer" for title in titles)
    yield f"| score | {heads} |"
    yield "|" + "---|" * (1 + 2 * len(found))
    for score in _SHOWN:
        cells = []
        for model in found:
            row = model["kl"]["scores"][score]
            for what in ("all", "within"):
                interval = row[f"{what}_interval"]
                cells.append(value_of({"number": row[what], "interval": interval}))
        yield f"| {title_of(score)} | {' | '.join(cells)} |"


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


def page(folder: Path = RESULTS) -> str:
    """Return the page."""
    words = tomllib.loads(WORDS.read_text())
    found, importance = (
        json.loads((folder / name).read_text()) for name in ("claims.json", "importance.json")
    )
    measured = "; ".join(
        f"{sources()['models'][model['model']]['title']}: {model['measured']['texts']} texts"
        for model in importance
    )
    lines = [
        "# Real models",
        "",
        words["opening"].strip(),
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
        f"Rank correlation with the divergence of predictions without each head ({measured}):",
        "",
        *importance_table(importance),
        "",
        words["importance_after"].strip(),
    ]
    for paper, title in PAPERS.items():
        lines += ["", f"## {title}", "", words[paper].strip(), "", *table(paper, found)]
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
    PAGE.write_text(page())
    print(PAGE)
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "page.py")
