"""Write a fine-tuned model like its original: the same files, tensor names and types.

TRL and transformers change the configuration for training, so only weights are written here. All
other files are the original's, except for requested changes.
"""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoConfig, GenerationConfig
from transformers.core_model_loading import revert_weight_conversion

from megasink.errors import UserError
from megasink.files.atomic import atomic_text
from megasink.files.json_file import read_object
from megasink.files.output_folder import differences
from megasink.files.weight_files import weight_files

_GENERATION = "generation_config.json"
_FILES = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
_OF_TOKENIZER = ("*token*.json", "vocab*", "merges*", "*.jinja", "*.model", "*.tiktoken")
_TEMPLATES = "additional_chat_templates"


def plain_weights(folder: Path) -> list[Path]:
    """Return the safetensors of a model; refuse quantized ones, and a model without any."""
    if (method := read_object(folder / "config.json").get("quantization_config")) is not None:
        name = method.get("quant_method") if isinstance(method, dict) else method
        raise UserError(
            f"{folder} has quantized weights ({name}), which cannot be trained: use the bfloat16 "
            "weights of this model"
        )
    if not (files := weight_files(folder)):
        raise UserError(f"{folder} has no model.safetensors: save the weights as safetensors")
    return files


def write_model(
    model: Any,
    original: Path,
    folder: Path,
    requested: Mapping[str, Any] | None = None,
    gathered: dict[str, Any] | None = None,
) -> None:
    """Write the files of the original with the model's weights, in their original types.

    The requested entries go into generation_config.json; `gathered` are the weights of a model that
    is sharded.
    """
    weights = revert_weight_conversion(model, gathered or model.state_dict())
    left, copied = set(weights) - set(model.all_tied_weights_keys), []
    for path in plain_weights(original):
        tensors = {}
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensors[name] = file.get_tensor(name)
                if name in weights:
                    # A copy: tied weights that were stored twice are stored twice.
                    new = weights[name].detach().to("cpu", tensors[name].dtype, copy=True)
                    tensors[name] = new.contiguous()
                    left.discard(name)
                else:
                    copied.append(name)
        save_file(tensors, folder / path.name, {"format": "pt"})
    if left:
        raise UserError(
            f"{len(left)} weights of the trained model, such as {min(left)}, are not in the files "
            f"of {original}: load it with transformers, save it, and fine-tune the result"
        )
    if copied:
        print(
            f"copied unchanged: {len(copied)} tensors that transformers does not load, such as "
            f"{copied[0]}"
        )
    copy_files(original, folder, _FILES)
    if requested:
        text = json.dumps({**_generation(original), **requested}, indent=2)
        atomic_text(folder / _GENERATION, text + "\n")


def copy_files(original: Path, folder: Path, patterns: tuple[str, ...] = _OF_TOKENIZER) -> None:
    """Copy the files with these names, by default the tokenizer's; never weights."""
    for path in original.iterdir():
        if path.is_file() and any(map(path.match, patterns)):
            shutil.copyfile(path, folder / path.name)
    if (original / _TEMPLATES).is_dir():
        shutil.copytree(original / _TEMPLATES, folder / _TEMPLATES)


def with_end(folder: Path, end: int | None) -> dict[str, list[int]]:
    """Return the entry of generation_config.json that ends answers at an id; {} if they end there.

    The ids at which the model's answers end remain in it.
    """
    ids = _generation(folder).get("eos_token_id")
    known = ids if isinstance(ids, list) else [] if ids is None else [ids]
    return {} if end is None or end in known else {"eos_token_id": [*known, end]}


def refuse_changes(original: Path, folder: Path, requested: Mapping[str, Any]) -> None:
    """Refuse an export whose JSON files differ in more than the requested entries of generation."""
    names = {path.name for path in folder.glob("*.json")} - {"adapter_config.json"}
    if "config.json" in names:
        names |= {path.name for path in original.glob("*.json")}
    wrong = []
    for name in sorted(names):
        before, now = (
            read_object(p) if p.is_file() else {} for p in (original / name, folder / name)
        )
        if name == _GENERATION and requested:
            before = {**_generation(original), **requested}
        # A null entry is not the same as no entry.
        nulls = ({k: "null" if v is None else v for k, v in one.items()} for one in (before, now))
        wrong += [f"{name}: {line}" for line in differences(*nulls)]
    if wrong:
        raise UserError(
            f"the export would differ from {original} ({'; '.join(wrong)}), so it is not written"
        )


def _generation(folder: Path) -> dict[str, Any]:
    if (folder / _GENERATION).is_file():
        return read_object(folder / _GENERATION)
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    made: dict[str, Any] = GenerationConfig.from_model_config(config).to_diff_dict()
    return made
