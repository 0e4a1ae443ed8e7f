"""The table of attentions in megasink/attention/README.md: ``python -m`` this file."""

from pathlib import Path

from rich.console import Console

from megasink.attention.conformance import CASES
from megasink.cli.doctor_attention import report

PAGE = Path(__file__).resolve().parents[2] / "megasink" / "attention" / "README.md"
NAMES = (
    *("eager", "sdpa", "flex_attention", "megasink", "flash-cpu", "DotProductAttention"),
    "CoreAttention",
)


def columns() -> dict[str, dict[str, str]]:
    """Return {name and kind: {case: the verdict, or those of float32 and bfloat16}}."""
    found: dict[str, dict[str, str]] = {}
    for name in NAMES:
        for kind, verdicts in report(name, 64, Console(quiet=True))[0].items():
            column = found[f"{name} ({kind})"] = {}
            for case in CASES:
                words = [v["verdict"] for v in verdicts if v["case"] == case.name]
                column[case.name] = words[0] if len({*words}) == 1 else ", ".join(words)
    return found


def table(of: dict[str, dict[str, str]]) -> list[str]:
    """Return the lines of the table in Markdown."""
    rows = [["", *of], ["---"] * (len(of) + 1)]
    rows += [[case.name, *(column[case.name] for column in of.values())] for case in CASES]
    return [f"| {' | '.join(row)} |" for row in rows]


if __name__ == "__main__":
    print("\n".join(table(columns())))
