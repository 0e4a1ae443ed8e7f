"""Find and load lm-evaluation-harness's tasks, without a network unless it is asked for.

lm-eval reads 15,000 YAML files to know its tasks, which takes 20 s. Here a scan of the names (about
a second) tells the unknown ones at once, and the folders that the known ones need.
"""

import difflib
import importlib.util
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from megasink.errors import ConfigError, UserError
from megasink.intervene.suites import expanded

OWN_TASKS = Path(__file__).parent / "tasks"
"""Tasks that ship with megasink, made from text that ships with Python."""

# "task: name", "group: name", "tag: name", and the entries of a YAML list: a superset of all names.
_NAMES = re.compile(
    r"^\s*(?:-\s+)?(?:(task|group|tag):\s+)?[\"']?([\w.+|:-]+)[\"']?\s*(?:#.*)?$", re.MULTILINE
)
_LISTS = re.compile(r"^\s*(?:-\s+)?(?:task|tag):\s*\[(.*?)\]", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their documents, ready for any number of evaluations.

    Attributes:
        loaded: lm-eval's tasks and groups.
        runs_code: whether a task may run the code that a model writes.
    """

    loaded: Any
    runs_code: bool


def load_tasks(
    names: Sequence[str],
    *,
    folders: Sequence[Path] = (),
    num_fewshot: int | None = None,
    allow_download: bool = False,
    run_generated_code: bool = False,
) -> LoadedTasks:
    """Load tasks and their datasets.

    Args:
        names: of tasks, groups and tags of lm-eval, of megasink's own tasks, or of the papers'
            suites (`megasink.intervene.suites`).
        folders: more tasks, as YAML files of lm-eval; Python files beside them may run.
        num_fewshot: examples before each question; None for the suite's or task's own number. A
            task that fixes it to 0 keeps 0, as in lm-eval.
        allow_download: fetch what the cache of datasets lacks.
        run_generated_code: allow tasks that run the code that the model writes.

    Raises:
        UserError: lm-eval is not installed, or a dataset is neither in the cache nor local.
        ConfigError: names of no task, with close names.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed: pip install 'megasink[eval]'")
    asked = expanded(names)
    index = _index([name for name, _ in asked], folders)
    _check_code(index, [name for name, _ in asked], run_generated_code)
    from megasink.intervene.harness import quiet
    from megasink.intervene.offline import offline

    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for name, shots in asked:
        with quiet():
            if allow_download:
                found = _load(index, name)
            else:
                with offline():
                    found = _load(index, name)
        if twice := sorted(found["tasks"].keys() & tasks.keys()):
            raise UserError(f"--tasks names {twice[0]} twice, by itself or in a group")
        for task in found["tasks"].values():
            _set_shots(task, shots if num_fewshot is None else num_fewshot)
        tasks |= found["tasks"]
        groups |= found["groups"]
    return LoadedTasks({"tasks": tasks, "groups": groups}, run_generated_code)
