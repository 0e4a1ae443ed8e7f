"""The files of a command's results: JSON, and one answer to a full disk."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.options import AnalysisOptions
from megasink.files.atomic import atomic_files, atomic_text
from megasink.files.checked_fields import to_json
from megasink.files.output_folder import results_in
from megasink.files.system_errors import writing


def holding(
    options: AnalysisOptions,
    command: str,
    about: Mapping[str, Any],
    ranks: Ranks,
) -> AbstractContextManager[Callable[[], None]]:
    """Hold the output folder of a command, in the first process; see `results_in`."""
    assert options.output is not None
    return results_in(
        options.output,
        command,
        about,
        given=options.given() | {"--name": about["--name"]},
        overwrite=options.overwrite,
        grows=options.grows,
        writes=not ranks.rank,
    )


@contextmanager
def results_of(
    output: Path, replaced: Collection[str] = (), *, kept: bool = True
) -> Iterator[Path]:
    """Yield a folder for results, which appear in `output` once all are written.

    `replaced` has patterns of earlier files. `kept`: measurements stay on disk until results are.
    """
    then = ", which then writes them without measuring again" * kept
    cure = f"free some space and repeat the command{then}"
    with writing(f"--output {output}", cure), atomic_files(output, replaced) as folder:
        yield folder


def write_json(path: Path, results: Any) -> None:
    """Write a dataclass as JSON."""
    atomic_text(path, json.dumps(to_json(results), indent=1))
