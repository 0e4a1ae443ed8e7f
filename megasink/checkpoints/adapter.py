"""The adapter of a LoRA run and its base: what is stored where, without Megatron.

A LoRA run's checkpoints hold what it trained. The weights of the base stay in the base's own
checkpoint; config.json records its folder and fingerprint.
"""

import functools
import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasink.checkpoints.find import Checkpoint, find_checkpoint, is_legacy, stored_shapes
from megasink.checkpoints.stored_tensor import find_tensor
from megasink.checkpoints.torch_metadata import read_metadata
from megasink.errors import UserError
from megasink.json_file import read_object
from megasink.lora.merge import Adapter
from megasink.lora.targets import BASE, is_lora, scaling_of

_HEAD_STATE = ".head_counter."
_STATES = ("chained_", "rng_state", "rerun_state", "common_state", "opt_param_sched")


def find_base(path: Path) -> Checkpoint:
    """Resolve --pretrained-checkpoint: a run, checkpoint or iteration folder of a whole model.

    Raises:
        UserError: there is no such checkpoint, or it is of another kind.
    """
    found = find_checkpoint(path)
    if is_legacy(found.folder):
        raise UserError(
            f"{path} is saved with --ckpt-format torch, which LoRA does not read: export and "
            "import it (megasink convert-to-hf, convert-from-hf)"
        )
    if is_lora(read_object(found.config).get("arguments", {})):
        raise UserError(
            f"{path} is a LoRA run, whose checkpoints hold an adapter alone: merge it first "
            "(megasink convert-to-hf, then convert-from-hf)"
        )
    return found


@functools.cache
def fingerprint(checkpoint: Path) -> str:
    """Return a SHA-256 of the weights in a torch_dist checkpoint of a whole model.

    It is made of the names, places, dtypes and CRC-32 that the checkpoint stores, so nothing is
    read in full. A copy of the folder has the same; the same weights saved from another layout,
    not.

    Raises:
        UserError: the checkpoint is incomplete or untrusted.
    """
    digest = hashlib.sha256()
    shapes = stored_shapes(checkpoint)
    stored = read_metadata(checkpoint).storage_data
    entries = sorted(
        (index.fqn, tuple(index.offset or ()), where)
        for index, where in stored.items()
        if index.fqn in shapes and not _is_state(index.fqn)
    )
    for key, offset, where in entries:
        tensor = _find(checkpoint, key, where)
        digest.update(repr((key, offset, tensor.shape, str(tensor.dtype), tensor.crc)).encode())
    return digest.hexdigest()


def base_of(config: Path) -> Path:
    """Return the base's checkpoint of a LoRA run.

    Raises:
        UserError: it is gone, or not the one that the adapter was trained on.
    """
    recorded = read_object(config).get(BASE) or {}
    folder = Path(str(recorded.get("checkpoint")))
    if not folder.is_dir():
        raise UserError(
            f"{config}: the adapter's base {folder} is gone: put it back (a link will do)"
        )
    if fingerprint(folder) != recorded.get("fingerprint"):
        raise UserError(
            f"{config}: the weights in {folder} are not those that the adapter was trained on: "
            "put the base back"
        )
    return folder


def read_adapter(found: Checkpoint, saved: Mapping[str, Any], sizes: Any) -> Adapter:
    """Read the adapter of a LoRA run.

    Args:
        saved: the run's arguments.
        sizes: `megasink.lora.merge.Sizes` of the model.

    Raises:
        UserError: the checkpoint is damaged or untrusted.
    """
    scaling = scaling_of(int(saved["lora_rank"]), saved.get("lora_alpha"))
    return Adapter(_read_tensors(found.folder), scaling, sizes)


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    shapes, metadata = stored_shapes(folder), read_metadata(folder)
    tensors = {
        key: torch.zeros(shape, dtype=metadata.state_dict_metadata[key].properties.dtype)
        for key, shape in shapes.items()
        if not _is_state(key)
    }
    for index, where in metadata.storage_data.items():
        if index.fqn not in tensors:
            continue
        stored = _find(folder, index.fqn, where)
        part = torch.empty(stored.shape, dtype=stored.dtype)
        try:
            stored.read_into((), part)
        except (OSError, ValueError) as error:
            raise UserError(f"{folder} cannot be read ({index.fqn}): {error}") from error
        whole = tensors[index.fqn]
        missing = whole.dim() - part.dim()  # a layer may be stored without the axis of layers
        part = part.reshape((1,) * missing + tuple(part.shape))
        box = zip(index.offset, part.shape, strict=True)
        whole[tuple(slice(at, at + size) for at, size in box)] = part
    return tensors


def _find(folder: Path, key: str, where: Any) -> Any:
    try:
        return find_tensor(folder / where.relative_path, where.offset, where.length)
    except Exception as error:  # corrupt data raises anything
        raise UserError(f"{folder} cannot be read ({key}): {error}") from error


def _is_state(key: str) -> bool:
    return key.startswith(_STATES) or _HEAD_STATE in key
