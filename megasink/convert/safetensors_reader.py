"""Read single tensors from a folder of safetensors files."""

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megasink.checked_fields import check, fields
from megasink.convert.safetensors_writer import DTYPES
from megasink.errors import UserError
from megasink.json_file import read_object

_INDEX = fields({"weight_map": dict[str, str]})


class HuggingFaceWeights:
    """The weights in a Hugging Face folder.

    Attributes:
        folder: the folder.
        names: of all tensors.

    Raises:
        UserError: there are no safetensors files, one of the index is missing, or one is broken.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        self._file_of: dict[str, Any] = {}
        index = _index(folder)
        for file in sorted(set(index.values())) or ["model.safetensors"]:
            path = folder / file
            if not path.is_file():
                raise UserError(f"{folder}: {file} is missing: copy the whole folder again")
            try:
                opened = safe_open(path, framework="pt")
            except (SafetensorError, OSError) as error:
                raise UserError(f"{path} is broken ({error}): copy it again") from error
            names = set(opened.keys())
            wanted = {name for name, where in index.items() if where == file}
            wanted |= names - index.keys()  # to be accounted for, too
            if absent := sorted(wanted - names):
                raise UserError(f"{folder}: {absent[0]} is not in {file}, contrary to the index")
            self._file_of |= dict.fromkeys(wanted, opened)
        self.names = frozenset(self._file_of)

    def meta(self, name: str) -> Tensor:
        """Return a meta tensor of the shape and dtype of `read`.

        Raises:
            UserError: its dtype is not one of `DTYPES`.
        """
        part = self._file_of[name].get_slice(name)
        dtype = DTYPES.get(part.get_dtype())
        if dtype is None:
            raise UserError(
                f"{self.folder}: {name} is {part.get_dtype()}, which is not supported: save it as "
                f"one of {', '.join(DTYPES)} first"
            )
        return torch.empty(part.get_shape(), dtype=dtype, device="meta")

    def read(self, name: str) -> Tensor:
        """Read a tensor."""
        tensor: Tensor = self._file_of[name].get_tensor(name)
        return tensor


def _index(folder: Path) -> dict[str, str]:
    """Return {tensor: file}; empty for a folder with the single file model.safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        content = read_object(index)
        check(_INDEX, content, str(index))
        if not content.get("weight_map"):
            raise UserError(f"{index} is broken: no weight_map")
        return dict(content["weight_map"])
    if not (folder / "model.safetensors").is_file():
        pickles = sorted(path.name for path in folder.glob("*.bin"))
        why = (
            f" ({pickles[0]} is a pickle, which can run code: convert it first)" if pickles else ""
        )
        raise UserError(f"{folder} has no model.safetensors{why}")
    return {}
