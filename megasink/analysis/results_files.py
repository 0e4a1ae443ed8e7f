"""The files of a command's results: JSON, and one answer to a full disk."""

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.options import AnalysisOptions
from megasink.atomic import atomic_text
from megasink.errors import UserError
from megasink.output_folder import results_in
from megasink.typed_json import to_json


def holding(
    options: AnalysisOptions,
    command: str,
    about: Mapping[str, Any],
    ranks: Ranks,
    grows: Collection[str] = (),
) -> AbstractContextManager[Callable[[], None]]:
    """Hold the output folder of a command, in the first process; see `results_in`."""
    assert options.output is not None
    writes = not ranks.rank
    overwrite = options.overwrite
    return results_in(
        options.output, command, about, overwrite=overwrite, grows=grows, writes=writes
    )


@contextmanager
def writing(output: Path, *, kept: bool = True) -> Iterator[None]:
    """Create the folder, and turn an OSError while writing into an error that says what to do.

    Args:
        kept: whether the measurements are on disk until the results are.

    Raises:
        UserError: the folder cannot be written, or the disk is full.
    """
    try:
        output.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        then = ", which then writes them without measuring again" * kept
        raise UserError(
            f"the results cannot be written to {output} ({error.strerror or error}): free some "
            f"space and repeat the command{then}"
        ) from error


def write_json(path: Path, results: Any) -> None:
    """Write a dataclass as JSON."""
    atomic_text(path, json.dumps(to_json(results), indent=1))
