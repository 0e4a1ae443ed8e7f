"""examples/replicate/results.md, generated from the results files alone."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from examples.replicate import claims, figures, record
from examples.replicate.experiment import letters, read_experiment
from examples.replicate.words import number_text, sentence, spread_text
from megasink.errors import UserError
from megasink.files.atomic import atomic_file, atomic_text
from megasink.options.command_parser import CommandParser

PAGE = Path(__file__).resolve().with_name("results.md")
FIGURES = PAGE.with_name("figures")

HEAD = """\
# Results: the claims of the papers, measured in small models

Every number on this page comes from the files in
[`examples/replicate/results`](results), which `python
examples/replicate/run.py NAME --form fast|full` writes. `python examples/replicate/page.py` makes
the page, and a test compares the two. [`examples/replicate`](README.md) has the settings, claims
and prediction of each experiment.

**How to read it.** Each prediction was written before the first run and has not been changed.
Tables have mean ± standard deviation over seeds (n - 1). A test over the seeds decides each claim:
it *reproduces* if the difference has the paper's sign with p < 0.05, is *opposite* if the
difference has the other sign with p < 0.05, and otherwise *does not show at this scale*, which
says nothing about larger models. Tests are one-sided, made in both directions, and paired by seed
(the runs of a seed share initial weights, batches and validation samples). The p-values of all
claims of a section are corrected together (Benjamini and Hochberg, each direction on its own), so
at most 5 % of the claims that reproduce are expected to do so by chance. Intervals are 95 %,
two-sided and not corrected. A test over three seeds has little power: a difference must be several
times its spread. All models here are small. The number of the paper beside a claim is from its own
models, and shows the sign, not the size.

Metrics called `trace/...` are measured on the checkpoints of a run, with held-out text. In sections
of runs before 2026-11-25 they were measured at the same steps during training, on validation
samples.
"""


def page(results: Sequence[record.Result]) -> str:
    """Return the page."""
    if not results:
        return f"{HEAD}\nNo experiment has been run yet.\n"
    parts = [HEAD, *_overview(results)]
    for result in results:
        parts += _section(result)
    return "\n".join(parts).rstrip() + "\n"


def title_of(result: record.Result) -> str:
    """Return the heading of a section."""
    return f"{result.title} ({result.experiment}, {result.form})"


def _overview(results: Sequence[record.Result]) -> Iterator[str]:
    yield "| experiment | form | reproduce | opposite | do not show | not measured | CPU time |"
    yield "|---|---|---|---|---|---|---|"
    for result in results:
        counts = [
            str(sum(verdict.verdict == kind for verdict in result.verdicts))
            for kind in (
                claims.REPRODUCES,
                claims.OPPOSITE,
                claims.NOT_SHOWN,
                claims.NOT_MEASURED,
            )
        ]
        name = f"{_cell(result.title)} ({result.experiment})"
        row = [name, result.form, *counts, _time(result.cpu_seconds)]
        yield f"| {' | '.join(row)} |"
    yield ""


def _section(result: record.Result) -> Iterator[str]:
    yield f"## {title_of(result)}\n"
    if result.setting:
        yield f"{result.setting}\n"
    yield f"**Predicted on {result.predicted}, before the first run.** {result.prediction}\n"
    yield from _verdicts(result)
    yield from _table(result)
    for name in figures.names(result):
        yield f"![{_cell(result.title)}](figures/{name})\n"
    yield from _checks(result)
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    yield (
        f"{result.runs} runs (seeds {', '.join(map(str, result.seeds))}), "
        f"{_time(result.seconds)} one after another, {_time(result.cpu_seconds)} of CPU time, on "
        f"{result.hardware}; {result.date}; {versions}. Rows {', '.join(result.rows)} of "
        "[papers.md](../../docs/papers.md).\n"
    )
    if result.large:
        yield (
            "These effects show only in a large model, on a node with GPUs. The command lines are "
            "checked, not run:\n"
        )
    for large in result.large:
        yield f"{large.says}:\n"
        yield f"```text\n{large.command.strip()}\n```\n"


def _verdicts(result: record.Result) -> Iterator[str]:
    if not result.verdicts:
        return
    yield "| claim | the paper | here |"
    yield "|---|---|---|"
    for verdict in result.verdicts:
        kind, _, rest = sentence(verdict, len(result.verdicts)).partition(":")
        here = f"**{kind}**: {_cell(rest.strip())}"
        claim = f"{_cell(verdict.says)} ({_cell(verdict.metric)})"
        yield f"| {claim} | {_cell(verdict.paper or '-')} | {here} |"
    yield ""


def _table(result: record.Result) -> Iterator[str]:
    yield f"| | {' | '.join(map(_cell, result.metrics))} |"
    yield "|---" * (1 + len(result.metrics)) + "|"
    for cell, metrics in result.cells.items():
        row = [spread_text(metrics[name]) for name in result.metrics]
        yield f"| {' | '.join([_cell(cell), *row])} |"
    yield ""


def _checks(result: record.Result) -> Iterator[str]:
    if not result.checks:
        return
    held = sum(check.holds for check in result.checks)
    first = result.checks[0]
    yield (
        f"Closed forms by Monte Carlo ({first.draws} draws each, seed {first.seed}; simultaneous "
        f"99 % intervals): {held} of {len(result.checks)} hold.\n"
    )
    yield "| quantity | source | closed form | measured | interval |"
    yield "|---|---|---|---|---|"
    for check in result.checks:
        numbers = (number_text(x, 5) for x in (check.expected, check.measured))
        interval = f"{number_text(check.low, 5)} to {number_text(check.high, 5)}"
        outside = "" if check.holds else " (**outside**)"
        yield f"| {' | '.join([_cell(check.what), check.source, *numbers, interval + outside])} |"
    yield ""


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _time(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def judge(result: record.Result) -> record.Result:
    """Return a result with the verdicts on the claims as they stand now, on its own numbers.

    Raises:
        UserError: a claim compares a cell or metric that the result does not have.
    """
    experiment = read_experiment(letters()[result.experiment], result.form)
    for name in claims.metrics_of(experiment.claims):
        if lacking := [cell for cell, metrics in result.cells.items() if name not in metrics]:
            raise UserError(
                f"results/{result.name}.json has no {name} of {lacking[0]!r}: run it again"
            )
    result.verdicts = claims.verdicts(experiment.claims, result.cells)
    return result


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the figures."""
    parser = CommandParser(prog="page.py", description=main.__doc__)
    parser.add_argument("--judge", action="store_true", help="first decide the claims again")
    args = parser.parse_args(argv)
    results = record.read_results()
    if args.judge:
        for result in results:
            record.write_result(judge(result))
    FIGURES.mkdir(exist_ok=True)
    for result in results:
        for name, png in figures.draw(result).items():
            with atomic_file(FIGURES / name) as file:
                file.write(png)
    atomic_text(PAGE, page(results))
    print(f"wrote {PAGE} from {len(results)} results files")
    return 0
