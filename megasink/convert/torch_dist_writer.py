"""Write a torch_dist checkpoint tensor by tensor, in the form that Megatron itself saves.

The files are those of torch.distributed.checkpoint: each tensor (or one layer or expert of it) is a
``torch.save`` at some offset of a .distcp file, and ``.metadata`` maps it to its place in the whole
tensor. Every parallel layout can load it.
"""

import pickle
from functools import partial
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from megasink.atomic import sync
from megasink.convert.background import BackgroundWriter
from megasink.convert.safetensors_writer import write_json
from megasink.convert.table import LAYERS, numbered

_FILE_BYTES = 5 * 10**9


class TorchDistWriter(BackgroundWriter):
    """Writes a checkpoint folder. The end of the context ends the writing thread.

    Args:
        folder: an existing empty folder.
        numbers_layers: write each layer under a key of its own, as Megatron does where layers
            differ.
    """

    def __init__(self, folder: Path, *, numbers_layers: bool = False):
        super().__init__()
        self._numbers_layers = numbers_layers
        self._folder = folder
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._count = 0
        self.total_bytes = 0

    def write(
        self, key: str, tensor: Tensor, index: tuple[int, ...] = (), sizes: tuple[int, ...] = ()
    ) -> None:
        """Write a weight, or one layer (and expert) of it.

        Args:
            key: Megatron's name.
            tensor: the data, without the axes of `index`.
            index: the layer, or layer and expert.
            sizes: the number of layers, or of layers and experts.
        """
        if self._numbers_layers and index and key.startswith(LAYERS):
            key, index, sizes = numbered(key, index[0]), index[1:], sizes[1:]
        part = tensor.contiguous().reshape((1,) * len(index) + tuple(tensor.shape))
        if part.untyped_storage().nbytes() > part.nbytes:
            part = part.clone()  # torch.save writes all of a view's storage
        offset = torch.Size(index + (0,) * tensor.dim())
        if key not in self._tensors:
            self._tensors[key] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype),
                torch.Size(sizes + tuple(tensor.shape)),
                [],
            )
        self._tensors[key].chunks.append(ChunkStorageMetadata(offset, part.shape))
        self._run(part.nbytes, partial(self._store, MetadataIndex(key, offset), part))
        self.total_bytes += part.nbytes

    def finish(self, common: dict[str, Any]) -> None:
        """Write the index, and everything that is not a tensor.

        Args:
            common: Megatron's state outside of the model, as plain values.
        """
        key = ShardedObject("common_state", None, (1,), (0,)).unique_key
        self._wait()
        self._store(MetadataIndex(key), [common])
        self._close_file()
        metadata = Metadata({**self._tensors, key: BytesStorageMetadata()}, None, self._storage)
        with (self._folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
            sync(file)
        content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_json(self._folder / "metadata.json", content)

    def _store(self, index: MetadataIndex, content: Any) -> None:
        if self._file is not None and self._file.tell() > _FILE_BYTES:
            self._close_file()
            self._count += 1
        name = f"__0_{self._count}.distcp"
        if self._file is None:
            self._file = (self._folder / name).open("xb")
        start = self._file.tell()
        torch.save(content, self._file)
        length = self._file.tell() - start
        self._storage[index] = _StorageInfo(name, start, length)
        self._wrote(length)
