"""Write and read arrays and objects; files for resuming carry a checksum.

A sealed file has the SHA-256 of its contents and of `of`, the caller's description of their owner.
Damaged, cut, edited or copied files are refused before anything is computed from them.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megasink.errors import UserError
from megasink.files.atomic import atomic_file, atomic_text
from megasink.files.json_file import read_object

_SEAL = "sha256"
_BROKEN = "its contents have changed since it was written"


def write_object(path: Path, value: Mapping[str, Any], of: str) -> None:
    """Write a JSON object, atomically."""
    atomic_text(path, json.dumps({_SEAL: _of_object(value, of), **value}, indent=1))


def read_sealed(path: Path, of: str) -> dict[str, Any]:
    """Return the object that `write_object` wrote."""
    value = read_object(path)
    if value.pop(_SEAL, None) != _of_object(value, of):
        raise UserError(f"{path} is damaged ({_BROKEN})")
    return value


def write_arrays(
    path: Path, arrays: Mapping[str, NDArray[Any]] | None, of: str | None = None
) -> None:
    """Write an .npz atomically, without pickles, sealed by `of`; without arrays remove it."""
    if not arrays:
        path.unlink(missing_ok=True)
        return
    with atomic_file(path) as file:
        if of is None:
            np.savez_compressed(file, allow_pickle=False, **arrays)
        else:
            seal = np.asarray(_of_arrays(arrays, of))
            np.savez(file, allow_pickle=False, **{_SEAL: seal}, **arrays)


def read_arrays(path: Path, cure: str, of: str | None = None) -> dict[str, NDArray[Any]]:
    """Return the arrays that `write_arrays` wrote."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        if of is not None and str(arrays.pop(_SEAL, None)) != _of_arrays(arrays, of):
            raise ValueError(_BROKEN)
    except Exception as error:  # numpy, zipfile and zlib raise nearly anything on a broken file
        raise UserError(f"{path} is damaged ({error or type(error).__name__}): {cure}") from error
    return arrays


def _of_object(value: Mapping[str, Any], of: str) -> str:
    return hashlib.sha256(json.dumps([of, value], sort_keys=True).encode()).hexdigest()


def _of_arrays(arrays: Mapping[str, NDArray[Any]], of: str) -> str:
    digest = hashlib.sha256(of.encode())
    for name, array in sorted(arrays.items()):
        digest.update(repr((name, array.dtype.str, array.shape)).encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()
