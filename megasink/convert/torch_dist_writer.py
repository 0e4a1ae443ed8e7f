"""A torch_dist checkpoint written tensor by tensor, as Megatron's own save would have left it.

The files are those of torch.distributed.checkpoint: each tensor (one layer of it, one expert of it)
is a ``torch.save`` at some offset of a .distcp file, and ``.metadata`` says which part of which
tensor it is. Any layout loads it.
"""

import json
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

_FILE_BYTES = 5 * 10**9


class TorchDistWriter(BackgroundWriter):
    """Writes one checkpoint folder; as a context: the end of the body ends the thread that writes.

    Args:
        folder: exists, and is empty.
    """

    def __init__(self, folder: Path):
        super().__init__()
        self._folder = folder
        self._tensors: dict[str, TensorStorageMetadata] = {}
        self._storage: dict[MetadataIndex, _StorageInfo] = {}
        self._count = 0
        self.total_bytes = 0

    def write(
        self, key: str, tensor: Tensor, index: tuple[int, ...] = (), sizes: tuple[int, ...] = ()
    ) -> None:
        """A weight, or one layer (and expert) of it.

        Args:
            key: as Megatron names it.
            tensor: without the axes of `index`.
            index: which layer, or layer and expert.
            sizes: how many there are of each.
        """
        part = tensor.contiguous().reshape((1,) * len(index) + tuple(tensor.shape))
        if part.untyped_storage().nbytes() > part.nbytes:
            part = part.clone()  # torch.save writes the whole storage of a view
        offset = torch.Size(index + (0,) * tensor.dim())
        if key not in self._tensors:
            self._tensors[key] = TensorStorageMetadata(
                TensorProperties(dtype=tensor.dtype),
                torch.Size(sizes + tuple(tensor.shape)),
                [],
            )
        self._tensors[key].chunks.append(ChunkStorageMetadata(offset, part.shape))
        self._background.run(part.nbytes, partial(self._store, MetadataIndex(key, offset), part))
        self.total_bytes += part.nbytes

    def finish(self, common: dict[str, Any]) -> None:
        """Write what is not a tensor, and the index.

        Args:
            common: Megatron's state outside of the model: plain values.
        """
        key = ShardedObject("common_state", None, (1,), (0,)).unique_key
        self._background.wait()
        self._store(MetadataIndex(key), [common])
        self._end_file()
        metadata = Metadata({**self._tensors, key: BytesStorageMetadata()}, None, self._storage)
        with (self._folder / ".metadata").open("wb") as file:
            pickle.dump(metadata, file)
            sync(file)
        with (self._folder / "metadata.json").open("wb") as file:
            content = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
            file.write(json.dumps(content).encode())
            sync(file)

    def _store(self, index: MetadataIndex, content: Any) -> None:
        if self._file is not None and self._file.tell() > _FILE_BYTES:
            self._end_file()
        name = f"__0_{self._count}.distcp"
        if self._file is None:
            self._file = (self._folder / name).open("xb")
        start = self._file.tell()
        torch.save(content, self._file)
        length = self._file.tell() - start
        self._storage[index] = _StorageInfo(name, start, length)
        self._background.wrote(self._file, length)

    def _end_file(self) -> None:
        if self._file is not None:
            self._close_file()
            self._count += 1
