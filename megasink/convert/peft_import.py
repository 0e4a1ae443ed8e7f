"""Import an adapter in peft's format as a run folder, from which ``megasink train`` continues."""

import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

import megasink
from megasink.atomic import sync_folder
from megasink.checkpoints.adapter import find_base, fingerprint
from megasink.checkpoints.carried import KEY as CARRIED
from megasink.checkpoints.carried import carried
from megasink.checkpoints.find import Checkpoint
from megasink.checkpoints.intact import TRACKER, checkpoint_path
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.checkpoints.tokenizer import OWN
from megasink.convert.architecture import Architecture, architecture_of
from megasink.convert.from_hf import arguments_of
from megasink.convert.model_flags import as_line, model_flags
from megasink.convert.output import whole_folder
from megasink.convert.peft_names import CONFIG, FINGERPRINT, PREFIX, WEIGHTS, Place, places
from megasink.convert.safetensors_writer import write_json
from megasink.convert.targets import choose, named
from megasink.convert.to_hf import Say, refuse_nan
from megasink.convert.torch_dist_writer import TorchDistWriter
from megasink.errors import UserError
from megasink.json_file import read_object
from megasink.lora.targets import BASE, LINEARS, TARGETS, A, B, key_of
from megasink.printable import say as say_printable

_MATRIX = re.compile(r"(.*)\.(lora_[AB])(?:\.default)?\.weight")
_LAYER = re.compile(r"\.(\d+)\.")
# Values of peft's LoraConfig other than these change what an adapter computes, or the base.
_FINE: dict[str, tuple[Any, ...]] = {
    "peft_type": ("LORA",),
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "use_rslora": (False, None),
    "lora_bias": (False, None),
    "modules_to_save": (None, []),
    "rank_pattern": (None, {}),
    "alpha_pattern": (None, {}),
    "layers_to_transform": (None, []),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, []),
    "init_lora_weights": (True, False, "gaussian", "orthogonal", None),
}


@dataclass(frozen=True)
class AdapterSource:
    """An adapter in peft's format, and its base.

    Attributes:
        folder: of the adapter.
        base: the base's checkpoint.
        saved: the arguments of the base's run.
        model: its architecture.
        rank, alpha, dropout: of the adapter.
        tensors: {(target, matrix): one tensor per layer}, as Megatron has them.
    """

    folder: Path
    base: Checkpoint
    saved: dict[str, Any]
    model: Architecture
    rank: int
    alpha: float
    dropout: float
    tensors: dict[tuple[str, str], list[Tensor]]

    @property
    def targets(self) -> list[str]:
        """Names in --lora-targets."""
        return [name for name in TARGETS if (name, A) in self.tensors]


def source_of(folder: Path, base: Path) -> AdapterSource:
    """Read an adapter.

    Args:
        base: --pretrained-checkpoint: the run that has the adapter's base.

    Raises:
        UserError: it cannot be imported, for all the reasons listed, or is of another base.
    """
    found = find_base(base)
    saved = read_arguments(found.config)
    model, problems = architecture_of(saved, None)
    config = read_object(folder / CONFIG)
    problems += [
        f"{key} {config[key]!r} (not {fine[0]!r})"
        for key, fine in _FINE.items()
        if key in config and config[key] not in fine
    ]
    if model.variant_layers:
        problems.append("the base has --attention-variant-layers: its layers differ")
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if not isinstance(rank, int) or rank < 1 or not isinstance(alpha, int | float):
        problems.append(f"r {rank!r} and lora_alpha {alpha!r}")
    if problems:
        raise UserError(f"{folder} cannot be imported: {'; '.join(problems)}")
    of_export = folder / FINGERPRINT
    if of_export.is_file() and read_object(of_export).get("fingerprint") != fingerprint(
        found.folder
    ):
        raise UserError(f"{folder} is an adapter of another base than {base}: give that one")
    converted_from = read_object(found.config).get("converted_from")
    target = named(converted_from) if converted_from else choose(model, None)[0]
    tensors = _in_megatron(folder, places(target, model), model, int(rank or 0))
    dropout = float(config.get("lora_dropout") or 0.0)
    return AdapterSource(
        folder, found, saved, model, int(rank or 0), float(alpha or 0), dropout, tensors
    )


def _in_megatron(
    folder: Path, known: dict[str, Place], model: Architecture, rank: int
) -> dict[tuple[str, str], list[Tensor]]:
    try:
        stored = load_file(folder / WEIGHTS)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{folder / WEIGHTS} cannot be read: {error}") from error
    by_module = {place.module: place for place in known.values()}
    layers: dict[tuple[str, str], dict[int, Tensor]] = {}
    for name, tensor in stored.items():
        refuse_nan(name, tensor)
        matrix = _MATRIX.fullmatch(name.removeprefix(PREFIX))
        at = matrix[1] if matrix else ""
        number = _LAYER.search(at)
        place = by_module.get(_LAYER.sub(".{layer}.", at, count=1))
        if not matrix or not number or place is None:
            raise UserError(f"{folder}: {name} has no place in an adapter of megasink")
        if tensor.shape[0 if matrix[2] == A else 1] != rank:
            raise UserError(f"{folder}: {name} is {list(tensor.shape)}, but its rank is {rank}")
        made = tensor if matrix[2] == A else place.to_megatron(tensor, model)
        layers.setdefault((place.target, matrix[2]), {})[int(number[1])] = made
    for (target, matrix_name), of_layer in layers.items():
        both = all((target, m) in layers for m in (A, B))
        if not both or sorted(of_layer) != list(range(model.layers)):
            raise UserError(
                f"{folder}: {target}.{matrix_name} is not there for all {model.layers} layers"
            )
    if not layers:
        raise UserError(f"{folder}: {WEIGHTS} has no matrices")
    _check_shapes(folder, layers, known, model)
    return {key: [of_layer[i] for i in range(model.layers)] for key, of_layer in layers.items()}


def _check_shapes(
    folder: Path,
    layers: dict[tuple[str, str], dict[int, Tensor]],
    known: dict[str, Place],
    model: Architecture,
) -> None:
    heads, groups = model.heads * model.head_dim, model.groups * model.head_dim
    sizes = {  # inputs, outputs
        **{"q_proj": (model.hidden, heads), "o_proj": (heads, model.hidden)},
        **dict.fromkeys(("k_proj", "v_proj"), (model.hidden, groups)),
        **dict.fromkeys(("gate_proj", "up_proj"), (model.hidden, model.ffn)),
        "down_proj": (model.ffn, model.hidden),
    }
    for (target, matrix), of_layer in layers.items():
        axis = 1 if matrix == A else 0
        wanted = sizes[target][0 if matrix == A else 1]
        for layer, tensor in of_layer.items():
            if tensor.shape[axis] != wanted:
                at = known[target].module.format(layer=layer)
                raise UserError(
                    f"{folder}: {at}.{matrix} is {list(tensor.shape)}, for a layer with {wanted} "
                    f"{'inputs' if matrix == A else 'outputs'} in the base: it is an adapter of "
                    "another model"
                )


def import_adapter(source: AdapterSource, output: Path, *, say: Say = say_printable) -> None:
    """Write a run folder with the adapter alone.

    Args:
        output: must be missing or empty; it appears when everything is written.

    Raises:
        UserError: anything that the user can fix; no folder is left behind.
    """
    model = source.model
    dtype = getattr(torch, model.dtype)
    with whole_folder(output) as folder:
        checkpoint = checkpoint_path(folder / "checkpoints", 0)
        checkpoint.mkdir(parents=True)
        with TorchDistWriter(checkpoint) as writer:
            for (target, matrix), of_layer in source.tensors.items():
                (linear,) = (linear for linear, names in LINEARS.items() if target in names)
                key = key_of(linear, target, matrix)
                for layer, tensor in enumerate(of_layer):
                    writer.write(key, tensor.to(dtype), (layer,), (model.layers,))
            writer.finish({"checkpoint_version": 3.0, "iteration": 0})
        (folder / "checkpoints" / TRACKER).write_text("0")
        _write_beside(source, folder, output)
        sync_folder(checkpoint)
    say(
        f"adapter of rank {source.rank} on {', '.join(source.targets)}: "
        f"{writer.total_bytes / 1e6:,.2f} MB"
    )


def _write_beside(source: AdapterSource, folder: Path, output: Path) -> None:
    """Write the tokenizer, flags.txt and, last, config.json."""
    arguments = dict(source.saved)
    flags = model_flags(source.model)
    _, given = arguments_of(flags)
    own = source.base.config.parent / OWN
    if own.is_dir():
        shutil.copytree(own, folder / OWN)
        arguments["tokenizer_model"] = str(output / OWN)
        flags += ["--tokenizer-model", str(output / OWN)]
    base = source.base.folder.resolve()
    of_lora = {
        "lora_rank": source.rank,
        "lora_alpha": source.alpha,
        "lora_dropout": source.dropout,
        "lora_targets": source.targets,
        "lora_train": None,
    }
    flags += ["--pretrained-checkpoint", str(base), "--lora-rank", str(source.rank)]
    flags += ["--lora-alpha", f"{source.alpha:g}", "--lora-targets", *source.targets]
    if source.dropout:
        flags += ["--lora-dropout", f"{source.dropout:g}"]
    (folder / "flags.txt").write_text(as_line(flags))
    content = {
        "arguments": arguments | of_lora,
        "identity": given,
        "converted_from": "peft",
        CARRIED: carried(source.base.config),
        BASE: {"checkpoint": str(base), "fingerprint": fingerprint(source.base.folder)},
        "versions": {"megasink": megasink.__version__},
    }
    write_json(folder / "config.json", content)
