"""Tensors of a folder of safetensors files, one at a time."""

import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasink.convert.safetensors_writer import DTYPES
from megasink.errors import UserError


class HuggingFaceWeights:
    """The weights of a Hugging Face folder.

    Attributes:
        folder: of the model.
        names: of every tensor.

    Raises:
        UserError: no safetensors, a file of the index is missing, or a file is cut short.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._files = {}
        where = _weight_map(folder)
        for file in sorted(set(where.values())):
            path = folder / file
            if not path.is_file():
                raise UserError(f"{folder}: {file} is missing: copy the whole folder again")
            try:
                self._files[file] = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is broken ({error}): copy it again") from error
        held = {file: frozenset(opened.keys()) for file, opened in self._files.items()}
        for name, file in where.items():
            if name not in held[file]:
                raise UserError(f"{folder}: {name} is not in {file}, where the index has it")
        self._where = where
        self.names = frozenset(where)

    def meta(self, name: str) -> Tensor:
        """An empty tensor of the shape and dtype of `read`.

        Raises:
            UserError: its numbers are of another kind than weights have here.
        """
        part = self._files[self._where[name]].get_slice(name)
        dtype = DTYPES.get(part.get_dtype())
        if dtype is None:
            raise UserError(
                f"{self.folder}: {name} is {part.get_dtype()}, which no weight is here: save it "
                f"as one of {', '.join(DTYPES)} first"
            )
        return torch.empty(part.get_shape(), dtype=dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """One tensor."""
        tensor: Tensor = self._files[self._where[name]].get_tensor(name)
        return tensor


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / "model.safetensors.index.json"
    single = folder / "model.safetensors"
    if index.is_file():
        try:
            return dict(json.loads(index.read_text())["weight_map"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise UserError(f"{index} is broken ({error!r})") from error
    if not single.is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        why = ""
        if pickles:
            why = f" ({pickles[0]} is a pickle, which may run code: convert it first)"
        raise UserError(f"{folder} has no model.safetensors{why}")
    try:
        with safe_open(single, framework="pt") as opened:
            return dict.fromkeys(opened.keys(), single.name)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{single} is broken ({error}): copy it again") from error
