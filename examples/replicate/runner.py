"""What run.py does: data, runs, measurements, verdicts, the results file."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

import megasink
from examples.replicate import claims, cone, measuring, record
from examples.replicate.experiment import (
    FORMS,
    Corpus,
    Experiment,
    letters,
    read_experiment,
)
from examples.replicate.figures import draw
from examples.replicate.grid import command as grid
from examples.replicate.grid.hardware import cores, hardware
from examples.replicate.grid.results import read_record
from examples.replicate.words import sentence, spread_text
from megasink.analysis.analysis_folder import read_analysis
from megasink.checkpoints.damage import checkpoint_path, iterations
from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object
from megasink.options.command_parser import CommandParser
from megasink.upstream.versions import versions


def main(argv: Sequence[str] | None = None) -> int:
    """Run an experiment, and write its results file."""
    parser = CommandParser(prog="run.py", description=main.__doc__)
    parser.add_argument("experiment", choices=letters(), help="its letter")
    parser.add_argument("--form", choices=FORMS, default="fast", help="default: fast")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/replicate"), help="default: runs/replicate"
    )
    parser.add_argument("--jobs", type=int, help="side by side (default: one for each core)")
    parser.add_argument(
        "--results", type=Path, default=record.FOLDER, help=f"default: {record.FOLDER}"
    )
    args = parser.parse_args(argv)
    if args.jobs is not None and args.jobs < 1:
        raise UserError(f"--jobs {args.jobs}: at least 1")
    experiment = read_experiment(letters()[args.experiment], args.form)
    out = args.output / f"{experiment.name}-{args.form}"
    if experiment.grid is not None:
        for corpus in experiment.data:
            make_corpus(corpus, out / "data")
        jobs = [] if args.jobs is None else ["--jobs", str(args.jobs)]
        if code := grid.main([str(experiment.grid.path), "--output", str(out), *jobs]):
            return code
        runs = trained_runs(experiment, out)
    elif experiment.program is not None:
        runs = experiment.program.program.runs(out)
    else:
        assert experiment.measures is not None
        used = args.output / f"{experiment.uses}-{args.form}"
        records = measuring.used_runs(experiment.measures, used)
        planned = measuring.plan(experiment.measures, records, used, out)
        measuring.measure_all(planned, args.jobs or cores())
        runs = list(measuring.measured_runs(planned, records))
    result = summarize(experiment, runs, out)
    path = record.write_result(result, args.results)
    pictures = draw(result)
    for name, png in pictures.items():
        (out / name).write_bytes(png)
    show(result)
    print(f"wrote {path}; figures: {', '.join(str(out / name) for name in pictures)}")
    return 0


def make_corpus(corpus: Corpus, folder: Path) -> None:
    """Write a corpus, unless it is there.

    Raises:
        UserError: the folder holds a corpus of the same name that was made in another way.
    """
    marker = folder / f"{corpus.name}.made.json"
    told = {"maker": corpus.maker, "arguments": corpus.arguments}
    if marker.is_file():
        if read_object(marker) != told:
            raise UserError(f"{marker} was made in another way: use another --output")
        return
    folder.mkdir(parents=True, exist_ok=True)
    corpus.make(folder, corpus.name, **corpus.arguments)
    atomic_text(marker, json.dumps(told) + "\n")


def trained_runs(experiment: Experiment, out: Path) -> list[record.Run]:
    """Return the finished runs of a grid, by cell and seed."""
    assert experiment.grid is not None
    found = []
    for cell in experiment.grid.cells:
        for seed in experiment.grid.seeds:
            run = read_record(out / cell.folder / f"seed-{seed}.json")
            found.append(
                record.Run(
                    cell=cell.name,
                    seed=seed,
                    metrics=run.metrics,
                    curves=run.curves,
                    seconds=run.seconds,
                    cpu_seconds=run.cpu_seconds,
                )
            )
    return found


def summarize(experiment: Experiment, runs: list[record.Run], out: Path) -> record.Result:
    """Return the results of finished runs, with the verdicts on the claims."""
    compared = claims.metrics_of(experiment.claims)
    for run in runs:
        at = {name: claims.AT.fullmatch(name) for name in compared}
        run.metrics = dict(run.metrics) | {
            name: record.value_at(run, found["curve"], float(found["percent"]))
            for name, found in at.items()
            if found
        }
    cells = record.by_cell(runs, list(dict.fromkeys([*experiment.file.metrics, *compared])))
    of_cell = {cell: [run for run in runs if run.cell == cell] for cell in cells}
    curves: dict[str, dict[str, record.Curve]] = {}
    for name in experiment.curves:
        found_curves = {cell: record.curve_of(of_cell[cell], name) for cell in cells}
        curves[name] = {cell: curve for cell, curve in found_curves.items() if curve is not None}
        if not curves[name]:
            raise UserError(f"curves: no run has {name}: those of trace/... need its measurement")
    return record.Result(
        experiment=experiment.name,
        form=experiment.form,
        title=experiment.title,
        rows=experiment.rows,
        setting=experiment.setting,
        prediction=experiment.prediction,
        predicted=experiment.predicted,
        date=time.strftime("%Y-%m-%d"),
        versions={"megasink": megasink.__version__} | versions(),
        hardware=hardware(),
        seconds=round(sum(run.seconds for run in runs)),
        cpu_seconds=round(sum(run.cpu_seconds for run in runs)),
        runs=len(runs),
        seeds=experiment.file.seeds,
        metrics=experiment.file.metrics,
        cells=cells,
        curves=curves,
        x=experiment.program.program.x if experiment.program else "step",
        maps=importance_maps(experiment, out),
        checks=cone.checks() if experiment.monte_carlo else [],
        verdicts=claims.verdicts(experiment.claims, cells),
        large=experiment.large,
    )


def importance_maps(experiment: Experiment, out: Path) -> dict[str, list[list[float | None]]]:
    """Return head importance of each cell's first seed, by the last analysis of its trace."""
    if not experiment.maps:
        return {}
    maps = {}
    for cell in experiment.file.cells:
        folder = out / cell.folder / f"seed-{experiment.file.seeds[0]}" / "trace"
        if made := iterations(folder):
            importance: Any = read_analysis(checkpoint_path(folder, made[-1])).values("importance")
            maps[cell.name] = [[record.rounded(x, 3) for x in row] for row in importance.tolist()]
    return maps


def show(result: record.Result) -> None:
    """Print the table and the verdicts."""
    console = Console(highlight=False)
    texts = {
        cell: {name: spread_text(metrics[name]) for name in result.metrics}
        for cell, metrics in result.cells.items()
    }
    across = len(result.metrics) <= len(texts)  # the longer side goes down
    columns = result.metrics if across else list(texts)
    table = Table(box=None)
    for column in ("", *columns):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    for row in texts if across else result.metrics:
        cells = [texts[row][name] if across else texts[name][row] for name in columns]
        table.add_row(Text(row), *cells)
    console.print(table)
    for verdict in result.verdicts:
        console.print(Text(f"{verdict.says}: {sentence(verdict, len(result.verdicts))}"))
