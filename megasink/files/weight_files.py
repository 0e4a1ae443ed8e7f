"""The files with the weights of a Hugging Face folder."""

from pathlib import Path

from megasink.errors import UserError
from megasink.files.checked_fields import check, fields
from megasink.files.json_file import read_object

INDEX = "model.safetensors.index.json"
_FIELDS = fields({"weight_map": dict[str, str]})


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors that transformers reads: a single file before those of an index."""
    if (path := folder / "model.safetensors").is_file():
        return [path]
    if not (index := folder / INDEX).is_file():
        return []
    check(_FIELDS, content := read_object(index), str(index))
    names = sorted({*content.get("weight_map", {}).values()})
    if not names or any(Path(name).name != name for name in names):
        raise UserError(f"{index} has no weight_map of file names: the file is damaged")
    return [folder / name for name in names]
