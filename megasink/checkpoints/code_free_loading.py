"""Load checkpoints through Megatron and torch without running code from the files.

Upstream unpickles the index, non-tensor entries and FP8 states; each is replaced while a run loads
(upstream/training_patches.py quotes the lines). torch's weights-only loader creates the classes of
core/safe_globals.py; others among the saved arguments become empty stand-ins.
"""

import contextlib
import functools
import io
import pickle
import re
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import StorageMeta

from megasink.checkpoints.torch_metadata import StandIn, load_metadata, stand_in
from megasink.errors import UserError, reason_of
from megasink.upstream.training_patches import ENTRIES, FP8_STATES, METADATA, TORCH_LOAD

_NAMED = re.compile(r"GLOBAL ([\w.]+)")


@contextlib.contextmanager
def loading_without_code() -> Iterator[None]:
    """Restrict Megatron's and torch's loading to the contents of a checkpoint."""
    from megatron.core.safe_globals import SafeUnpickler

    refused: list[UserError] = []
    reading = {"folder": "", "entry": "a tensor in it"}

    def refuse(where: Any, error: Exception) -> UserError:
        refused.append(UserError(f"{where} is broken or untrusted: {_reason(error)}"))
        return refused[-1]

    def read_metadata(self: Any, *_: Any, rank: int | None = None, **__: Any) -> Any:
        path = self._get_metadata_path(rank)
        reading["folder"] = self.path
        with self.fs.create_stream(path, "rb") as file:
            try:
                metadata = load_metadata(file)
            except Exception as error:  # unpickling random bytes can raise anything
                raise refuse(path, error) from error
        if getattr(metadata, "storage_meta", None) is None:  # as upstream does next
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata

    upstream_bytes = DefaultLoadPlanner.load_bytes

    def load_bytes(self: Any, read_item: Any, value: io.BytesIO) -> None:
        reading["entry"] = f"its entry {read_item.dest_index.fqn}"
        upstream_bytes(self, read_item, value)
        reading["entry"] = "a tensor in it"

    upstream_load = torch.load

    @functools.wraps(upstream_load)
    def load(f: Any, *args: Any, **kwargs: Any) -> Any:
        kwargs = {k: v for k, v in kwargs.items() if k != "pickle_module"} | {"weights_only": True}
        try:
            return _load(upstream_load, f, *args, **kwargs)
        except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError) as error:
            path = f if isinstance(f, str | Path) else None
            raise refuse(path or "{folder}: {entry}".format(**reading), error) from error

    def loads(content: bytes, **_: Any) -> Any:
        try:
            return SafeUnpickler(io.BytesIO(content)).load()
        except Exception as error:  # unpickling random bytes can raise anything
            raise refuse(f"{reading['folder']}: an FP8 state", error) from error

    with contextlib.ExitStack() as stack:
        stack.enter_context(METADATA.replacing(read_metadata=read_metadata))
        stack.enter_context(ENTRIES.replacing(load_bytes=load_bytes))
        stack.enter_context(TORCH_LOAD.replacing(load=load))
        safe_pickle = SimpleNamespace(dumps=pickle.dumps, loads=loads)
        for name, module in list(sys.modules.items()):
            if name.startswith("transformer_engine.") and vars(module).get("pickle") is pickle:
                stack.enter_context(FP8_STATES.replacing(module, pickle=safe_pickle))
            elif name == "transformer_engine.pytorch._extra_state":
                # From 2.20 on states of delayed scaling are refused before they are unpickled.
                allow = {"unsafe_pickle_extra_state_enabled": lambda: True}
                stack.enter_context(FP8_STATES.replacing(module, **allow))
        try:
            yield
        except BaseException as error:
            # Upstream raises CheckpointException instead, or prints the error and exits with 0.
            if refused and error is not refused[0]:
                raise refused[0] from error
            raise


def _reason(error: Exception) -> str:
    """Extract the name that was refused from torch's long message."""
    named = _NAMED.search(str(error))
    if named:
        return f"it refers to the code {named[1]}"
    return reason_of(error)


def _load(upstream: Callable[..., Any], file: Any, *args: Any, **kwargs: Any) -> Any:
    """Call torch.load for weights only, with stand-ins for classes among the arguments."""
    start = file.tell() if hasattr(file, "tell") else 0
    try:
        return upstream(file, *args, **kwargs)
    except pickle.UnpicklingError:
        if hasattr(file, "seek"):
            file.seek(start)
        made = _stand_ins(file)
        if not made:
            raise
        if hasattr(file, "seek"):
            file.seek(start)
        with torch.serialization.safe_globals(list(made)):
            content = upstream(file, *args, **kwargs)
    # Common state, like every non-tensor entry, is a list of one.
    state = content[0] if isinstance(content, list) and len(content) == 1 else content
    arguments = state.get("args") if isinstance(state, dict) else None
    if not isinstance(arguments, Namespace):
        raise pickle.UnpicklingError(f"GLOBAL {made[0][1]}")
    if outside := _first_stand_in(state, arguments):
        raise pickle.UnpicklingError(f"GLOBAL {outside}")
    return content


def _stand_ins(file: Any) -> list[tuple[Any, str]]:
    """Return (class, name) of the names that torch refuses; [] if an argument cannot have one."""
    try:
        names = torch.serialization.get_unsafe_globals_in_checkpoint(file)
    except Exception:  # corrupt, or not from torch.save: report torch.load's error
        return []
    made = [(stand_in(*name.rpartition(".")[::2]), name) for name in sorted(names)]
    return [] if any(one is None for one, _ in made) else made


def _first_stand_in(state: Any, arguments: Namespace) -> str | None:
    """Return the first class name found outside the arguments, or None."""
    left, seen = [state], {id(arguments)}
    while left:
        value = left.pop()
        if isinstance(value, StandIn):
            return f"{type(value).__module__}.{type(value).__name__}"
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, list | tuple | set | frozenset):
            left += value
        elif hasattr(value, "__dict__"):
            left += vars(value).values()
    return None
