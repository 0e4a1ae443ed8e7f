"""Checkpoints whose pickles leave a mark when they are executed, made from a genuine one."""

import io
import os
import pickle
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import MetadataIndex

ENTRIES = {
    "common state": "common_state/",
    "random states": "rng_state/",
    "extra state": "linear_qkv._extra_state/",
    "rerun state": "rerun_state_machine_state/",
}
"""Which entry of a checkpoint is taken: the first whose key has this in it."""


class Mark:
    """Makes a folder when it is unpickled."""

    def __init__(self, path: Path):
        self.path = str(path)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)


class OfAFork:
    """A class that megasink does not know, as forks of Megatron have among their arguments."""

    def __init__(self) -> None:
        self.value = 3


OfAFork.__module__ = "company.megatron.enums"


def entry_of(checkpoint: Path, part: str) -> str:
    """The whole key of an entry."""
    known = FileSystemReader(checkpoint).read_metadata().state_dict_metadata
    return next(key for key in known if part in key)


def replace_entry(checkpoint: Path, key: str, change: Any) -> None:
    """Put ``change(what it holds)`` in the place of an entry that is no tensor, or of a tensor."""
    metadata = FileSystemReader(checkpoint).read_metadata()
    index = next(i for i in metadata.storage_data if i.fqn == key)
    info = metadata.storage_data[index]
    with (checkpoint / info.relative_path).open("rb") as file:
        file.seek(info.offset)
        before = torch.load(io.BytesIO(file.read(info.length)), weights_only=False)
    saved = io.BytesIO()
    torch.save(change(before), saved)
    name = f"__7_{len(list(checkpoint.glob('*.distcp')))}.distcp"
    (checkpoint / name).write_bytes(saved.getvalue())
    info.relative_path, info.offset, info.length = name, 0, len(saved.getvalue())
    write_metadata(checkpoint, metadata)


def write_metadata(checkpoint: Path, metadata: Any) -> None:
    """In place of the one that is there."""
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))


def craft(run: Path, copy: Path, place: str, mark: Path) -> Path:
    """A copy of a run whose newest checkpoint asks for ``mark`` at a place.

    Args:
        place: "index" and "file" of it, "tensor", "optimizer", "common.pt", "old format" (the run
            is in it), or of `ENTRIES`.

    Returns:
        the folder of the checkpoint.
    """
    shutil.copytree(run, copy)
    checkpoint = max((copy / "checkpoints").glob("iter_*"))
    if place == "old format":
        (path,) = checkpoint.rglob("*.pt")
        state = torch.load(path, weights_only=False)
        state["optimizer"]["harm"] = Mark(mark)
        torch.save(state, path)
    elif place == "index":
        metadata = FileSystemReader(checkpoint).read_metadata()
        metadata.planner_data = Mark(mark)
        write_metadata(checkpoint, metadata)
    elif place == "file":
        metadata = FileSystemReader(checkpoint).read_metadata()
        index = MetadataIndex(entry_of(checkpoint, "rng_state/"))
        metadata.storage_data[index].relative_path = "../../../elsewhere"
        write_metadata(checkpoint, metadata)
    elif place == "tensor":
        replace_entry(checkpoint, "decoder.final_norm.weight", lambda _: Mark(mark))
    elif place == "optimizer":
        key = entry_of(checkpoint, ENTRIES["common state"])

        def with_mark(state: Any) -> Any:
            state[0]["optimizer"]["harm"] = Mark(mark)
            return state

        replace_entry(checkpoint, key, with_mark)
    elif place == "common.pt":
        torch.save({"args": Namespace(harm=Mark(mark))}, checkpoint / "common.pt")
    else:
        replace_entry(checkpoint, entry_of(checkpoint, ENTRIES[place]), lambda _: Mark(mark))
    return checkpoint


def as_upstream_reads(checkpoint: Path, place: str) -> None:
    """What the readers of torch and Megatron do with it by themselves."""
    import torch.distributed.checkpoint as torch_checkpoint

    if place in ("common.pt", "old format"):
        (path,) = checkpoint.rglob("*.pt")
        torch.load(path, weights_only=False)
        return
    reader = FileSystemReader(checkpoint)
    part = ENTRIES["common state" if place == "optimizer" else place] if place != "index" else ""
    wanted = {entry_of(checkpoint, part): io.BytesIO()} if part else {}
    torch_checkpoint.load(wanted, storage_reader=reader, no_dist=True)
