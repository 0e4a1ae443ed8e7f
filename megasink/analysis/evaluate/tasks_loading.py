"""Find and load lm-evaluation-harness's tasks, without a network unless requested.

lm-eval reads 14,000 YAML files to find its tasks, in 20 s. A scan of the names takes a second.
"""

import contextlib
import importlib.util
import logging
import re
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

from megasink.analysis.evaluate.suites import SUITES, expanded
from megasink.errors import ConfigError, UserError, nearest
from megasink.files.json_file import read_object

OWN_TASKS = Path(__file__).parent / "tasks"
"""Tasks that ship with megasink, made from text that ships with Python."""

_FEWSHOT_SEED = 1234
"""As in lm-eval."""
# "task: name", "group: name", "tag: name", and entries of lists: a superset of all names.
_NAMES = re.compile(
    rb"^(?:[ \t-]*(?:task|group|tag):|[ \t]*-)[ \t]+[\"']?([^\s\"'\[\]]+)", re.MULTILINE
)


@dataclass(frozen=True)
class LoadedTasks:
    """Tasks with their documents, ready for any number of evaluations."""

    loaded: Any  # lm-eval's tasks and groups
    runs_code: bool  # whether a task may run code written by a model


class UnreachableError(OSError):
    """Raised when a host is looked up while tasks load offline."""


def load_tasks(
    names: Sequence[str],
    *,
    folders: Sequence[Path] = (),
    num_fewshot: int | None = None,
    tokenizer: Path | None = None,
    allow_download: bool = False,
    run_generated_code: bool = False,
) -> LoadedTasks:
    """Load tasks and their datasets: tasks, groups and tags of lm-eval, suites, and own tasks.

    `folders` have more tasks, as YAML files of lm-eval; Python files beside them may run.
    """
    if importlib.util.find_spec("lm_eval") is None:
        raise UserError("lm-evaluation-harness is not installed: pip install 'megasink[eval]'")
    task_requests = expanded(names)
    mentioned = {*_places(), *(n for folder in (OWN_TASKS, *folders) for n in _mentioned(folder))}
    _refuse_unknown([entry.task for entry in task_requests], mentioned)  # before lm-eval is read
    metadata = {key: value for entry in task_requests for key, value in entry.metadata.items()}
    if tokenizer is not None:
        metadata["tokenizer"] = str(tokenizer)
    index = _index([entry.task for entry in task_requests], folders, metadata)
    entries = [leaf for entry in task_requests for leaf in _leaves(index, entry.task)]
    _check_code(entries, tokenizer, run_generated_code)

    tasks: dict[str, Any] = {}
    groups: dict[str, Any] = {}
    for entry in task_requests:
        for name in () if allow_download else entry.data:
            if not _is_cached(name):
                raise _not_here(entry.task, f"no {name} in the cache")
        with quiet(), contextlib.nullcontext() if allow_download else _offline():
            loaded = _load(index, entry.task)
        if twice := sorted(loaded["tasks"].keys() & tasks.keys()):
            raise UserError(
                f"--tasks includes {twice[0]} twice, directly or through a group: pass it once"
            )
        for task in loaded["tasks"].values():  # as `lm_eval.simple_evaluate` does
            own = task.get_config("num_fewshot")
            if own != 0:  # a task that fixes 0 has a format of its own
                shots = entry.shots if num_fewshot is None else num_fewshot
                task.set_config("num_fewshot", (own or 0) if shots is None else shots)
            task.set_fewshot_seed(seed=_FEWSHOT_SEED)
        tasks |= loaded["tasks"]
        groups |= loaded["groups"]
    return LoadedTasks({"tasks": tasks, "groups": groups}, run_generated_code)


def _load(index: Any, name: str) -> Any:
    """Load one task, group or tag with its datasets, and name it in any error."""
    from datasets.exceptions import DatasetNotFoundError

    try:
        return index.load([name])
    except UserError:
        raise
    # Tasks run their own code, which raises anything; a missing network looks different in each.
    except Exception as error:
        causes: list[BaseException] = [error]
        while (cause := causes[-1].__cause__ or causes[-1].__context__) and len(causes) < 20:
            causes.append(cause)
        away = (ConnectionError, UnreachableError, DatasetNotFoundError)
        text = " ".join(str(error).split())
        if any(isinstance(e, away) or "offline" in str(e).lower() for e in causes):
            raise _not_here(name, text) from error
        if any(isinstance(e, ImportError) for e in causes):
            raise UserError(
                f"task {name} needs a package that is not installed ({text:.200}): pip install "
                "'megasink[eval-long]' installs the packages of the suites"
            ) from error
        raise UserError(f"task {name} cannot be loaded: {text:.400}") from error


def _not_here(name: str, reason: str) -> UserError:
    return UserError(
        f"the data of task {name} is not on this machine: add --allow-download to fetch it, or "
        "evaluate once on a machine with a network, copy that machine's cache here and set "
        f"HF_DATASETS_CACHE or HF_HOME to the copy ({reason:.200})"
    )


def _is_cached(name: str) -> bool:
    """Return whether a cache has files of a Hub data set."""
    from datasets.config import HF_DATASETS_CACHE
    from huggingface_hub.constants import HF_HUB_CACHE

    made = Path(HF_DATASETS_CACHE, name.replace("/", "___"))
    return made.is_dir() or Path(HF_HUB_CACHE, f"datasets--{name.replace('/', '--')}").is_dir()


def _check_code(entries: Sequence[Any], tokenizer: Path | None, allowed: bool) -> None:
    """Reject tasks that run code of a model's output or folder, before their data load."""
    unsafe = sorted({e.name for e in entries if (e.cfg or {}).get("unsafe_code")})
    if unsafe and not allowed:
        raise UserError(
            f"{', '.join(unsafe)}: these tasks run model-written code on this machine: add "
            "--confirm-run-unsafe-code in a sandbox, or choose other tasks"
        )
    made = [entry.name for entry in entries if (entry.cfg or {}).get("custom_dataset")]
    config = None if tokenizer is None else tokenizer / "tokenizer_config.json"
    # lm-eval loads this tokenizer with trust_remote_code=True.
    if made and config is not None and config.is_file() and "auto_map" in read_object(config):
        raise UserError(
            f"task {made[0]} loads the model's tokenizer, but {config} refers to custom code: "
            "remove auto_map from this file, or choose other tasks"
        )


def _index(names: Sequence[str], folders: Sequence[Path], metadata: dict[str, Any]) -> Any:
    """Return lm-eval's manager of tasks, with the folders that define these names."""
    from lm_eval.tasks import TaskManager

    places = _places()
    needed: set[Path] = set()
    own = [OWN_TASKS, *folders]
    while True:
        with quiet():
            index = TaskManager(
                include_path=[*sorted(needed), *own], include_defaults=False, metadata=metadata
            )
        reached = {*names, *(n for name in names for n in _reached(index, name))}
        missing = {name for name in reached if name not in index.task_index}
        # A tag may have tasks in more folders than the one that defines it.
        tags = {name for name in reached - missing if index.task_index[name].yaml_path is None}
        more = {place for name in missing | tags for place in places.get(name, ())} - needed
        if not more:
            break
        needed |= more
    _refuse_unknown(names, index.task_index)
    return index


def _reached(index: Any, name: str, seen: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield the names that a group or tag refers to, at any depth."""
    entry = index.task_index.get(name)
    if entry is None or name in seen:
        return
    listed = (entry.cfg or {}).get("task") if entry.kind.name == "GROUP" else None
    members = [*(entry.tags if entry.kind.name == "TAG" else ()), *_named(listed)]
    for member in members:
        yield member
        yield from _reached(index, member, seen | {name})


def _named(listed: Any) -> Iterator[str]:
    """Yield the names in a group's list, whose entries may be groups written out in place."""
    for member in listed if isinstance(listed, list) else ():
        if isinstance(member, str):
            yield member
        elif isinstance(member.get("task"), list):
            yield from _named(member["task"])
        elif name := member.get("group", member.get("task")):
            yield name


def _leaves(index: Any, name: str) -> Iterator[Any]:
    for member in (name, *_reached(index, name)):
        entry = index.task_index.get(member)
        if entry is not None and entry.kind.name in ("TASK", "PY_TASK"):
            yield entry


@cache
def _places() -> dict[str, set[Path]]:
    """Return the folders of lm-eval that mention each name as a task, group, tag or member."""
    spec = importlib.util.find_spec("lm_eval.tasks")
    assert spec is not None
    assert spec.origin is not None
    root = Path(spec.origin).parent
    places: dict[str, set[Path]] = {}
    for folder in (path for path in sorted(root.iterdir()) if path.is_dir()):
        for name in _mentioned(folder):
            places.setdefault(name, set()).add(folder)
    return places


def _mentioned(folder: Path) -> Iterator[str]:
    """Yield everything that may be the name of a task in a folder's YAML files."""
    for path in folder.rglob("*.yaml"):
        yield from (name.decode(errors="replace") for name in _NAMES.findall(path.read_bytes()))


def _refuse_unknown(names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ConfigError with each unknown name."""
    known, problems = set(known), []
    for name in (name for name in names if name not in known):
        near = nearest(name, [*SUITES, *known], cutoff=0.6)
        hint = f": did you mean {near}?" if near else ""
        problems.append(f"--tasks {name}: no such task, group, tag or suite{hint}")
    if problems:
        raise ConfigError(problems)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence messages of lm-eval and datasets about every task; errors are still raised."""
    import lm_eval.api.task

    module: Any = lm_eval.api.task
    loggers = [logging.getLogger(name) for name in ("lm_eval", "datasets")]
    before = [logger.level for logger in loggers]
    bar = module.tqdm
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    module.tqdm = lambda items, **_: items
    try:
        yield
    finally:
        module.tqdm = bar
        for logger, level in zip(loggers, before, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def _offline() -> Iterator[None]:
    """Read datasets only from their cache, and make every host lookup of tasks' own code fail."""
    import datasets.config
    import huggingface_hub.constants

    def unreachable(host: Any, *_: Any, **__: Any) -> NoReturn:
        raise UnreachableError(f"a request to {host} was blocked: tasks load offline")

    with contextlib.ExitStack() as stack:
        for module, name, value in (
            # What HF_HUB_OFFLINE and HF_DATASETS_OFFLINE set, read when these are imported.
            (huggingface_hub.constants, "HF_HUB_OFFLINE", True),
            (datasets.config, "HF_HUB_OFFLINE", True),
            (datasets.config, "HF_DATASETS_OFFLINE", True),
            (socket, "getaddrinfo", unreachable),
        ):
            stack.callback(setattr, module, name, getattr(module, name))
            setattr(module, name, value)
        yield
