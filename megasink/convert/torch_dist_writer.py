"""Write a torch_dist checkpoint tensor by tensor, in Megatron's own form.

torch.distributed.checkpoint writes the files; its planner requests one tensor at a time.
Every parallel layout can load the checkpoint.
"""

import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.mapping import ShardedObject
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter, SavePlan
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    BytesIOWriteData,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from megasink.convert.safetensors_files import write_json
from megasink.convert.weight_table import LAYERS, numbered


@dataclass(frozen=True)
class Part:
    """A weight, or one layer (and expert) of `sizes`, without the axes of `index`."""

    key: str
    index: tuple[int, ...]
    sizes: tuple[int, ...]
    tensor: Tensor

    def numbered(self) -> "Part":
        """Return it under a key with its layer's number, as Megatron does if layers differ."""
        if not self.index or not self.key.startswith(LAYERS):
            return self
        key = numbered(self.key, self.index[0])
        return Part(key, self.index[1:], self.sizes[1:], self.tensor)

    def item(self) -> WriteItem:
        """Return the planner's item for it."""
        ones = (1,) * len(self.index)
        chunk = ChunkStorageMetadata(
            torch.Size(self.index + (0,) * self.tensor.dim()), torch.Size(ones + self.tensor.shape)
        )
        properties, size = TensorProperties(dtype=self.tensor.dtype), self.sizes + self.tensor.shape
        data = TensorWriteData(chunk, properties, torch.Size(size))
        index = MetadataIndex(self.key, chunk.offsets)
        return WriteItem(index, WriteItemType.SHARD, tensor_data=data)


def write_checkpoint(
    folder: Path, parts: Sequence[Part], tensors: Iterable[Tensor], common: dict[str, Any]
) -> None:
    """Write a checkpoint into an existing empty folder."""
    items = [part.item() for part in parts]
    stored: dict[str, TensorStorageMetadata] = {}
    for item in items:
        data = item.tensor_data
        assert data is not None
        empty = TensorStorageMetadata(data.properties, data.size, [])
        stored.setdefault(item.index.fqn, empty).chunks.append(data.chunk)
    common_key = ShardedObject("common_state", None, (1,), (0,)).unique_key
    content = io.BytesIO()
    torch.save([common], content)
    size = BytesIOWriteData(content.tell())
    items.append(WriteItem(MetadataIndex(common_key), WriteItemType.BYTE_IO, bytes_io_data=size))
    # Tensors are on the CPU: with a GPU, the writer would copy ahead, and change their order.
    files = _Files(folder, per_thread_copy_ahead=0)
    files.set_up_storage_writer(True)
    # The writer keeps the last tensor of each name until its file is finished (filesystem.py, of
    # torch 2.13: tensor_dict): it gets numbers in their place, and knows one name.
    nameless = [replace(item, index=MetadataIndex("", index=i)) for i, item in enumerate(items)]
    (plan,) = files.prepare_global_plan([SavePlan(nameless)])
    results = files.write_data(plan, _Planner(items, tensors, content)).wait()
    written = [replace(result, index=_named(items, result.index)) for result in results]
    files.finish(Metadata({**stored, common_key: BytesStorageMetadata()}), [written])
    backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
    write_json(folder / "metadata.json", backend)


def _named(items: Sequence[WriteItem], number: MetadataIndex) -> MetadataIndex:
    """Return the index of an item that was written under its number only."""
    assert number.index is not None
    return items[number.index].index


class _Files(FileSystemWriter):
    def storage_meta(self) -> None:
        """Omit the path from the metadata: the bytes then depend only on the weights."""


class _Planner(DefaultSavePlanner):
    """Pass the tensors to the writer in the order in which it asks for them."""

    def __init__(self, items: Sequence[WriteItem], tensors: Iterable[Tensor], common: io.BytesIO):
        super().__init__()
        self._items, self._tensors, self._common = items, iter(tensors), common

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        data = write_item.tensor_data
        if data is None:
            return self._common
        tensor = next(self._tensors)
        if tensor.dtype != data.properties.dtype or tensor.numel() != data.chunk.sizes.numel():
            name = _named(self._items, write_item.index).fqn
            raise ValueError(f"{name} is {tensor.dtype} {list(tensor.shape)}")
        return tensor.contiguous().reshape(data.chunk.sizes)
