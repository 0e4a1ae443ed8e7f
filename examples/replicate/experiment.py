"""An experiment: experiment.toml, and fast.toml or full.toml beside it.

The two forms are grid files (grid/README.md) or, where experiment.toml has `uses = "a"`,
measurements of the runs of another experiment (measures.py). examples/replicate/README.md explains
the keys.
"""

import datetime
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.replicate import claims
from examples.replicate.grid.file import GridFile, read_grid
from examples.replicate.measures import MeasuresFile, read_measures, read_toml
from examples.replicate.own_program import ProgramFile, read_program_file
from examples.replicate.record import Large
from megasink.analysis.metrics import metrics_shown
from megasink.errors import ConfigError, UserError, unknown_name

FOLDER = Path(__file__).parent
FORMS = ("fast", "full")
REQUIRED: dict[str, type] = {
    "title": str,
    "rows": list,
    "prediction": str,
    "predicted": datetime.date,
    "claim": list,
}
OPTIONAL: dict[str, type] = {
    "prediction_full": str,
    "setting": str,
    "uses": str,
    "program": str,
    "curves": list,
    "maps": bool,
    "data": dict,
    "large": list,
    "monte_carlo": bool,
}
# Curves of every run, beside those of its trace.
TRAINED = ("lm_loss", "valid_lm_loss", "valid_bits_per_byte", "imbalance")


@dataclass(frozen=True)
class Corpus:
    """A corpus of an experiment: what writes it, and its arguments."""

    name: str
    make: Callable[..., None]
    maker: str
    arguments: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One form of an experiment; `read_experiment` has found no problem in it.

    Attributes:
        name: its letter; folder: of its files.
        grid: what runs; measures: what is measured on the runs of the experiment `uses`; program:
            what makes the runs instead. One of the three.
        curves: drawn on the page.
        maps: whether head importance is drawn, of the last analyses of the trace.
        monte_carlo: whether the checks of cone.py belong to it.
    """

    name: str
    folder: Path
    form: str
    title: str
    rows: list[str]
    setting: str
    prediction: str
    predicted: str
    uses: str | None
    grid: GridFile | None
    measures: MeasuresFile | None
    program: ProgramFile | None
    data: list[Corpus]
    claims: list[dict[str, Any]]
    curves: list[str]
    maps: bool
    large: list[Large]
    monte_carlo: bool

    @property
    def file(self) -> GridFile | MeasuresFile | ProgramFile:
        """The file of the form."""
        return self.grid or self.measures or self.program  # type: ignore[return-value]

    @property
    def cells(self) -> list[str]:
        """Names of the cells."""
        return [cell.name for cell in self.file.cells]


def letters() -> dict[str, Path]:
    """Return the experiments: letter -> folder."""
    found = sorted(path.parent for path in FOLDER.glob("?_*/experiment.toml"))
    return {folder.name[0]: folder for folder in found}


def read_experiment(folder: Path, form: str) -> Experiment:
    """Read and check an experiment.

    Raises:
        ConfigError: lists every problem, of the file of the form too.
        UserError: a file is missing, or is not TOML.
    """
    path = folder / "experiment.toml"
    told = read_toml(path)
    problems = list(_key_problems(told))
    if problems:
        raise ConfigError(f"{path}: {problem}" for problem in problems)
    uses, grid, measures, program = told.get("uses"), None, None, None
    if uses is not None and uses not in letters():
        raise ConfigError(f"{path}: {unknown_name('uses', uses, list(letters()))}")
    files = [each / f"{form}.toml" for each in (folder, *([letters()[uses]] if uses else []))]
    if lacking := [file for file in files if not file.is_file()]:
        raise UserError(f"{lacking[0]}: no such file: the experiment has no {form} form")
    if "program" in told:
        program = read_program_file(*files, told["program"])
    elif uses is None:
        grid = read_grid(*files)
    else:
        measures = read_measures(*files)
    data, data_problems = _data(told.get("data", {}), form)
    chosen = [claim for claim in told["claim"] if form in claim.get("forms", FORMS)]
    of_form = grid or measures or program
    assert of_form is not None
    problems = [*data_problems, *_form_problems(told["claim"])]
    cells = [cell.name for cell in of_form.cells]
    curves = _curves() if program is None else list(program.program.curves)
    problems += claims.problems(chosen, cells, of_form.metrics, curves)
    problems += [
        unknown_name("curves", name, curves)
        for name in told.get("curves", [])
        if name not in curves
    ]
    if len(of_form.seeds) < claims.LEAST_SEEDS:
        problems.append(f"{form}.toml has {len(of_form.seeds)} seeds: verdicts take 3 or more")
    if problems:
        raise ConfigError(f"{path} ({form}): {problem}" for problem in problems)
    return Experiment(
        name=folder.name[0],
        folder=folder,
        form=form,
        title=told["title"],
        rows=told["rows"],
        setting=told.get("setting", "").strip(),
        prediction=told.get(f"prediction_{form}", told["prediction"]).strip(),
        predicted=told["predicted"].isoformat(),
        uses=uses,
        grid=grid,
        measures=measures,
        program=program,
        data=data,
        claims=chosen,
        curves=told.get("curves", []),
        maps=told.get("maps", False),
        large=[Large(says=each["says"], command=each["command"]) for each in told.get("large", [])],
        monte_carlo=told.get("monte_carlo", False),
    )


def _curves() -> list[str]:
    return [*TRAINED, *(f"trace/{name}" for name in metrics_shown("scalar"))]


def _key_problems(told: Mapping[str, Any]) -> Iterator[str]:
    known = REQUIRED | OPTIONAL
    for key, kind in REQUIRED.items():
        if key not in told:
            yield f"{key} is missing: give a {kind.__name__}"
    for key, value in told.items():
        if key not in known:
            yield unknown_name("the key", key, list(known))
        elif not isinstance(value, known[key]):
            yield f"{key} is {value!r:.60}: give a {known[key].__name__}"
    for row in told.get("rows", []):
        if not isinstance(row, str) or not re.fullmatch(r"P[0-4]\.\d+", row):
            yield f"rows: {row!r} is not a row such as P0.21"
    if not str(told.get("prediction", "?")).strip():
        yield "prediction is empty: say what will come out, before the first run"
    for number, each in enumerate(told.get("large", []), 1):
        if not isinstance(each, dict) or set(each) != {"says", "command"}:
            yield f"large {number}: give says and command, and no other key"
    if told.get("program") and (other := told.keys() & {"uses", "data", "maps"}):
        yield f"{min(other)}: the program makes the runs: drop it"
    if told.get("uses") and told.get("data"):
        yield "data: the experiment uses the runs, and so the corpora, of another: drop it"


def _form_problems(told: list[Any]) -> Iterator[str]:
    for number, claim in enumerate(told, 1):
        forms = claim.get("forms", FORMS) if isinstance(claim, dict) else FORMS
        if not isinstance(forms, list | tuple) or not set(forms) <= set(FORMS) or not forms:
            yield f"claim {number}: forms is {forms!r}: give a list of fast and full"


def _data(told: Mapping[str, Any], form: str) -> tuple[list[Corpus], list[str]]:
    """Return the corpora of a form, and the problems."""
    if not told:
        return [], []
    from examples.replicate import corpora, languages

    modules = {"languages": languages, "corpora": corpora}
    found, problems = [], []
    for name, each in told.items():
        if not isinstance(each, dict) or not isinstance(each.get("make"), str):
            problems.append(f"data.{name}: give make, such as languages.write_triggers")
            continue
        if unknown := each.keys() - {"make", *FORMS}:
            problems.append(f"data.{name}.{min(unknown)} is unknown: give make, fast and full")
        module, _, function = each["make"].partition(".")
        make = getattr(modules.get(module), function, None)
        if not callable(make):
            problems.append(f"data.{name}: there is no function {each['make']}")
            continue
        if form in each or not each.keys() & set(FORMS):
            found.append(Corpus(name, make, each["make"], dict(each.get(form, {}))))
    return found, problems
