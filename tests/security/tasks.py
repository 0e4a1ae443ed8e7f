"""Tasks for the workers: the trainer and its readers on crafted checkpoints."""

import contextlib
import io
import os
import pickle
import sys
import types
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from megasink.errors import UserError
from tests.distributed import launch_task
from tests.said import said
from tests.security.crafted import Mark, OfAFork, as_upstream_reads, craft


def craft_all(run: str, copies: str, places: list[str]) -> dict[str, str]:
    """{place: folder of a checkpoint} of copies; the marks would be in COPIES/marks."""
    return {
        place: str(craft(Path(run), Path(copies, place), place, Path(copies, "marks", place)))
        for place in places
    }


def read_upstream(checkpoints: dict[str, str]) -> None:
    """As Megatron does by itself."""
    for place, checkpoint in checkpoints.items():
        as_upstream_reads(Path(checkpoint), place)


def refusals(command_lines: list[list[str]], port: int) -> list[str | None]:
    """What the trainer says to each command line, in one process; None where it trained."""
    return [said(launch_task.train, flags, ranks=1, port=port) or None for flags in command_lines]


def read(checkpoints: list[str]) -> list[str]:
    """What Megatron's own reading of everything that is no tensor says, as a run has it."""
    from megatron.core import dist_checkpointing
    from torch.distributed import checkpoint as torch_checkpoint

    from megasink.checkpoints.code_free_loading import loading_without_code
    from megasink.checkpoints.torch_metadata import read_metadata

    def entries(folder: str) -> dict[str, Any]:
        known = read_metadata(Path(folder)).state_dict_metadata
        return {key: io.BytesIO() for key, entry in known.items() if not hasattr(entry, "size")}

    answers = []
    for folder in checkpoints:
        try:
            with loading_without_code():
                common = dist_checkpointing.load_common_state_dict(folder)
                reader = torch_checkpoint.FileSystemReader(folder)
                torch_checkpoint.load(entries(folder), storage_reader=reader, no_dist=True)
            answers.append(f"read {type(common['args']).__name__}")
        except UserError as error:
            answers.append(str(error))
    assert not hasattr(torch.load, "__wrapped__")  # what was replaced is back
    return answers


def load_classes_of_a_fork(folder: str) -> list[Any]:
    """(an argument, whether the class was made), and what is said where it is no argument."""
    from megasink.checkpoints.code_free_loading import loading_without_code

    parts = OfAFork.__module__.split(".")
    names = [".".join(parts[: i + 1]) for i in range(len(parts))]
    modules = {name: types.ModuleType(name) for name in names}
    modules[names[-1]].OfAFork = OfAFork  # type: ignore[attr-defined]
    state = {"args": Namespace(kind=OfAFork(), num_layers=3), "iteration": 2}
    mark = Mark(Path(folder, "mark"))
    with mock.patch.dict(sys.modules, modules):
        torch.save(state, Path(folder, "arguments.pt"))
        torch.save(state | {"rng": [OfAFork()]}, Path(folder, "elsewhere.pt"))
        torch.save(state | {"rng": [mark]}, Path(folder, "both.pt"))
    with loading_without_code():
        args = torch.load(Path(folder, "arguments.pt"))["args"]
    answers: list[Any] = [(args.num_layers, type(args.kind) is OfAFork)]
    with loading_without_code():
        return [
            *answers,
            *(said(torch.load, Path(folder, f"{n}.pt")) for n in ("elsewhere", "both")),
        ]


def load_state_of_fp8(mark: str) -> str:
    """What an imitated module of TransformerEngine says to a crafted one."""
    from megasink.checkpoints.code_free_loading import loading_without_code

    module: Any = types.ModuleType("transformer_engine.pytorch.module.base")
    module.pickle = pickle
    said = ""
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        try:
            with loading_without_code():
                module.pickle.loads(pickle.dumps(Mark(Path(mark))))
        except UserError as error:
            said = str(error)
    assert module.pickle is pickle
    return said


def load_state_of_delayed_scaling() -> list[bool]:
    """Whether an imitation of TransformerEngine 2.20 accepts a state, within and afterwards."""
    from megasink.checkpoints.code_free_loading import loading_without_code

    # 2.20.2, transformer_engine/pytorch/_extra_state.py
    module: Any = types.ModuleType("transformer_engine.pytorch._extra_state")
    module.unsafe_pickle_extra_state_enabled = lambda: False
    with mock.patch.dict(sys.modules, {module.__name__: module}):
        with loading_without_code():
            within = module.unsafe_pickle_extra_state_enabled()
        return [within, module.unsafe_pickle_extra_state_enabled()]


def load_index(path: str) -> str:
    """What upstream's reader of a data set's cached order says."""
    from megatron.core.safe_globals import safe_numpy_load

    try:
        safe_numpy_load(path, allow_pickle=True, mmap_mode="r")
    except pickle.UnpicklingError as error:
        return str(error)
    return "loaded"


def arguments_read(run: str) -> dict[str, list[str]]:
    """The arguments that the configuration of a model is made from."""
    from megasink.checkpoints import saved_arguments
    from megasink.megatron.model_of_arguments import model_config

    class Recording(Namespace):
        def __getattribute__(self, name: str) -> Any:
            if not name.startswith("__"):
                read.add(name)
            return super().__getattribute__(name)

    read: set[str] = set()
    saved = saved_arguments.read_arguments(Path(run) / "config.json")
    args = saved_arguments.single_process_arguments(saved)
    for positions in ("rope", "yarn"):
        model_config(Recording(**vars(args) | {"position_embedding_type": positions}))
    taken = saved_arguments.describing()
    known = taken | saved_arguments._THIS_PROCESS | saved_arguments._NOT_TAKEN
    known |= saved_arguments._PLAIN_MODULES.keys()
    # What upstream asks a namespace for and no option sets.
    read = {name for name in read if hasattr(args, name)}
    return {"taken": sorted(read & taken), "forgotten": sorted(read - known)}


def model_that_names_places(run: str, written: str, path: str) -> None:
    """The control: what upstream does with such arguments."""
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.argument_utils import hybrid_config_from_args

    from megasink.checkpoints import saved_arguments
    from megasink.megatron.model import MegasinkModelBuilder
    from megasink.megatron.model_of_arguments import model_config

    saved = saved_arguments.read_arguments(Path(run) / "config.json")
    args = saved_arguments.single_process_arguments(saved | {"ffn_activation": None})
    args.config_logger_dir = written
    config = model_config(args)
    config.finalize()
    groups = ProcessGroupCollection.use_mpu_process_groups()
    with contextlib.suppress(TypeError):  # it cannot write process groups, but made the folder
        MegasinkModelBuilder(config).build_model(groups, pre_process=True, post_process=True)
    args.spec = ["crafted_module", "spec"]
    with mock.patch.object(sys, "path", [path, *sys.path]):
        hybrid_config_from_args(args, config=config.transformer, model_config_cls=type(config))


def flags_of_any_text() -> dict[str, list[str]]:
    """Without dashes, all flags of the trainer and of what measures a run, and those whose
    value argparse lets be anything."""
    import argparse

    from megasink import cpu

    cpu.activate()
    from megasink.cli import main_of
    from megasink.megatron.argument_parser import parse_apart
    from megasink.options.command_parser import flag_problems

    found: dict[str, list[str]] = {}
    upstream = argparse.ArgumentParser.parse_known_args

    def look(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        for action in self._actions:
            names = [name.lstrip("-") for name in action.option_strings if name[:2] == "--"]
            found.setdefault("all", []).extend(names)
            free = action.nargs != 0 and not action.choices and action.type not in (int, float)
            found.setdefault("text", []).extend(names if free else [])
        return upstream(self, *args, **kwargs)

    # Without what a task before this one has left: commands of several ranks would meet first.
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
    with (
        mock.patch.dict(os.environ, alone),
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", look),
    ):
        parse_apart([])
        for command in ("analyze", "ablate", "sweep", "evaluate"):
            flag_problems(main_of(command), ["model", "--output", "x", "--tasks", "y"])
    return found
