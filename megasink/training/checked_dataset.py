"""Megatron's GPTDataset with checks of every sample, in an order for runs of any length.

It also replaces tokens (--replace-tokens-at; P2.15, P2.16) before they become inputs and targets. A
sequence is the text that attention sees: a document under --dataloader-inter-document-masking,
otherwise the sample. A random token depends on the seed and the place of the sequence in the data
set alone.

Shapes: B microbatch, S sequence.
"""

import hashlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from megatron.core.datasets import gpt_dataset
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import _PAD_TOKEN_ID
from megatron.core.datasets.object_storage_utils import ObjectStorageConfig, is_object_storage_path
from megatron.training import get_args
from numpy.typing import NDArray
from torch import Tensor

from megasink.data.replaced_tokens import Replacement
from megasink.errors import UserError
from megasink.training.checks.vocabulary import known_ids, replacement_of
from megasink.upstream.epoch_shuffle import shuffling_each_epoch


def replace_in_sample(
    replacement: Replacement,
    ids: NDArray[np.int64],
    documents: Sequence[int],
    lengths: Sequence[int],
    offset: int,
    *,
    packed: bool,
) -> None:
    """Replace tokens of a sample's sequences, [S + 1] with padding at the end, in place."""
    # `lengths` has the tokens of each document here, the first from `offset` on.
    bounds = [0, *np.cumsum(lengths).tolist()] if packed else [0, sum(lengths)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        place = 0 if number else offset
        replacement.replace(ids[start:stop], int(documents[number]), place)


def text_targets(
    positions: Sequence[int], targets_BS: Tensor, cu_seqlens: Tensor | None, *, sink_token: bool
) -> Tensor:
    """Return which targets are text, [B, S] bool; replaced tokens have no bytes of text.

    `cu_seqlens` has the starts of documents, [B, S + 1] int32 padded with S; None for one sequence.
    The last target of a packed sample is False if either token that it may be is replaced.
    """
    rows, length = targets_BS.shape
    index_S = torch.arange(length, device=targets_BS.device)
    replaced = torch.tensor(list(positions), device=targets_BS.device)
    if cu_seqlens is None:
        position_S = index_S + (0 if sink_token else 1)
        return ~torch.isin(position_S, replaced).expand(rows, length)
    begins = torch.zeros(rows, length + 1, dtype=torch.long, device=targets_BS.device)
    begins.scatter_(1, cu_seqlens.long(), 1)
    index = torch.arange(length + 1, device=targets_BS.device)
    # Where the document of each token begins; the token after the sample still belongs to the last.
    begins[:, length] = 0
    start = (index * begins).cummax(dim=1).values
    dropped = torch.isin((index - start)[:, 1:], replaced)
    dropped[:, -1] |= 0 in positions
    return ~dropped


_BLOCK = 1 << 16  # bytes per request to S3; a sample is a few documents in order
_LENGTHS, _PLACES = 1 << 24, 1 << 10  # lengths to read from a data set, in this many places


class _WithoutPadding:
    """A data set in which every token is text: upstream drops the tokenizer's padding token."""

    # core/datasets/gpt_dataset.py:277; a BOS that serves as padding occurs in text.

    @property
    def _pad_token_id(self) -> int:
        return _PAD_TOKEN_ID  # fills the last sample, as upstream does without padding

    @_pad_token_id.setter
    def _pad_token_id(self, of_tokenizer: int) -> None:
        pass


class MockGPTDataset(_WithoutPadding, gpt_dataset.MockGPTDataset):
    """Upstream's mock data."""


class TextDataset(_WithoutPadding, gpt_dataset.GPTDataset):
    """Upstream's class with checks, shuffled by epoch."""

    # Cached sample indices are named by the lengths of the documents in place of paths: a rebuilt
    # data set gets new ones, and copies on other hosts share them.

    def __init__(self, dataset: IndexedDataset, dataset_path: str, *args: Any):
        self.vocabulary = known_ids(get_args())
        self.replacement = replacement_of(get_args())
        super().__init__(dataset, _contents(dataset.sequence_lengths), *args)

    @staticmethod
    def _key_config_attributes() -> list[str]:
        names: list[str] = gpt_dataset.GPTDataset._key_config_attributes()
        return [name for name in names if name != "tokenizer"]

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> IndexedDataset:
        """Read small blocks of objects: upstream's take 256 MiB for every sample, in any order."""
        if not is_object_storage_path(dataset_path):
            return gpt_dataset.GPTDataset.build_low_level_dataset(dataset_path, config)
        storage = ObjectStorageConfig(config.object_storage_cache_path, _BLOCK)
        return IndexedDataset(dataset_path, mmap=False, object_storage_config=storage)

    def _build_document_sample_shuffle_indices(self) -> Any:
        if not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0:
            self._remove_damaged_indices()
        with shuffling_each_epoch(self):
            return super()._build_document_sample_shuffle_indices()

    def _remove_damaged_indices(self) -> None:
        """Remove truncated indices: Megatron writes them in place, and a kill cuts them short."""
        prefix, kind = self.dataset.path_prefix, type(self).__name__
        folder = Path(self.config.path_to_cache or Path(prefix, "cache", f"{kind}_indices"))
        base = f"{self.unique_description_hash}-{kind}-{self.index_split.name}"
        # By name (core/datasets/gpt_dataset.py:478): a search would list a folder of thousands of
        # files once for each dataset.
        for name in ("document", "sample", "shuffle"):
            path = folder / f"{base}-{name}_index.npy"
            try:
                np.load(path, mmap_mode="r", allow_pickle=False)
            except FileNotFoundError:
                continue
            except (OSError, ValueError, EOFError):
                try:
                    path.unlink()
                except OSError as error:
                    raise UserError(f"{path} is damaged: remove it ({error.strerror})") from error

    def _query_document_sample_shuffle_indices(
        self, idx: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], list[int]]:
        prefix = self.dataset.path_prefix
        try:
            sample = super()._query_document_sample_shuffle_indices(idx)
        except (ValueError, IndexError, OverflowError) as error:
            raise UserError(
                f"{prefix}.bin: sample {idx} is incomplete ({error}): make the data set again and "
                f"remove {prefix}/cache"
            ) from error
        ids, documents, lengths = sample
        self._refuse_unknown_ids(*sample)
        if self.replacement is not None:
            offset = int(self.sample_index[self.shuffle_index[idx]][1])
            packed = self.config.inter_document_masking
            replace_in_sample(self.replacement, ids, documents, lengths, offset, packed=packed)
        return sample

    def _refuse_unknown_ids(
        self, ids: NDArray[np.int64], documents: NDArray[np.int64], lengths: list[int]
    ) -> None:
        if (known := self.vocabulary) is None:
            return
        prefix = self.dataset.path_prefix
        ids = ids[: sum(lengths)]  # padding follows
        wrong = (ids < 0) | (ids >= known)
        if wrong.any():
            at = int(np.flatnonzero(wrong)[0])
            place = int(np.searchsorted(np.cumsum(lengths), at, side="right"))
            raise UserError(
                f"{prefix}.bin: document {documents[min(place, len(documents) - 1)]} contains "
                f"the id {ids[at]:,}, but the vocabulary has only {known:,}: make the data set "
                "again, or pass the tokenizer with which it was made"
            )


def _contents(lengths_N: NDArray[np.int32]) -> str:
    """Return a digest of the lengths of N documents; for very many, of 1,024 blocks of them."""
    size = max(_LENGTHS // _PLACES, -(-len(lengths_N) // _PLACES))
    digest = hashlib.sha256(str(len(lengths_N)).encode())
    for start in range(0, len(lengths_N), size):
        digest.update(lengths_N[start : start + _LENGTHS // _PLACES].tobytes())
    return digest.hexdigest()


def read_batch(data_iterator: Iterator[Any]) -> Any:
    """Return the next batch, with a data loader worker's error reduced to its one line."""
    try:
        return next(data_iterator)
    except UserError as error:
        # torch prepends the worker's traceback (torch/_utils.py, ExceptionWrapper.reraise)
        message = str(error).rpartition("UserError: ")[2].removesuffix("\\n").strip()
        raise UserError(message) from None
