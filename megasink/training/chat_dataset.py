"""Samples of whole conversations, from the files of `megasink data --chat`.

Shapes: S sequence, N conversations.
"""

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.datasets.megatron_dataset import MegatronDataset
from megatron.core.datasets.utils import Split
from megatron.training import get_args
from numpy.typing import NDArray

from megasink.data.bins import best_fit
from megasink.data.output import LOSS_MASK
from megasink.errors import UserError
from megasink.training.checks.vocabulary import known_ids


class Conversations(NamedTuple):
    """The tokens of conversations, and the mask of their responses."""

    tokens: IndexedDataset
    loss_mask: IndexedDataset


class ChatDataset(MegatronDataset):
    """Packs conversations into samples of the context's length, none of them cut or left out.

    The last token of a conversation is a target alone: n tokens take n - 1 places. `best_fit`
    places them by their lengths, once. An epoch shuffles the conversations of each length among
    their places, and the samples; all epochs have the same number of samples. A sample depends on
    the seed and its number alone, so that a run resumes exactly, also with more steps.

    A sample has `tokens`, `labels`, `position_ids` [S] int64, `loss_mask` [S] float32 (1 if the
    label is a response's token), and, as Megatron's --dataloader-inter-document-masking:
    `cu_seqlens` [S + 1] int32, where its conversations begin, then S; padding is the last document.
    `real_tokens` [] int32 is the number of tokens before the padding.
    """

    def __init__(
        self,
        dataset: Conversations,
        dataset_path: str | None,
        indices: NDArray[np.integer],
        num_samples: int | None,
        index_split: Split,
        config: GPTDatasetConfig,
    ):
        super().__init__(dataset, dataset_path, indices, num_samples, index_split, config)
        self.vocabulary = known_ids(get_args())
        lengths = dataset.tokens.sequence_lengths
        if not np.array_equal(lengths, dataset.loss_mask.sequence_lengths):
            raise UserError(
                f"{dataset_path}{LOSS_MASK}.idx has other conversations than {dataset_path}.idx: "
                "make the data set again"
            )
        self._places_N = lengths[indices].astype(np.int64) - 1
        try:
            self._bins = best_fit(self._places_N, config.sequence_length)
        except ValueError as error:
            raise UserError(
                f"{dataset_path}.idx has conversations that --seq-length {config.sequence_length} "
                f"cannot hold ({error}): make the data set again"
            ) from error
        epochs = 1 if num_samples is None else max(1, -(-num_samples // max(len(self._bins), 1)))
        self._samples = epochs * len(self._bins)
        self._epoch: int | None = None
        self._report()

    def _report(self) -> None:
        if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
            return
        size = self.config.sequence_length
        full = self._places_N.sum() / max(len(self._bins) * size, 1)
        print(
            f"chat data: {self.dataset_path} ({self.index_split.name}): "
            f"{len(self.indices):,} conversations in {len(self._bins):,} samples of {size:,} "
            f"tokens, {full:.1%} full",
            flush=True,
        )

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: GPTDatasetConfig) -> Conversations:
        """Open the files of a prefix."""
        paths = (dataset_path, dataset_path + LOSS_MASK)
        return Conversations(*(IndexedDataset(p, mmap=config.mmap_bin_files) for p in paths))

    @staticmethod
    def numel_low_level_dataset(low_level_dataset: Conversations) -> int:
        """Return the number of conversations."""
        return len(low_level_dataset.tokens)

    def __len__(self) -> int:
        return self._samples

    def __getitem__(self, idx: int) -> dict[str, torch.Tensor]:
        epoch, number = divmod(int(idx), len(self._bins))
        if epoch != self._epoch:
            self._shuffle(epoch)
        ranks = self._bins[self._order_M[number]]
        size = self.config.sequence_length
        tokens, labels, positions = np.zeros((3, size), dtype=np.int64)
        loss_mask = np.zeros(size, dtype=np.float32)
        bounds = [0]
        for conversation in self.indices[self._item_N[ranks]]:
            ids, mask = self._read(int(conversation))
            part = slice(bounds[-1], bounds[-1] + len(ids) - 1)
            tokens[part], labels[part], loss_mask[part] = ids[:-1], ids[1:], mask[1:]
            positions[part] = np.arange(len(ids) - 1)
            bounds.append(part.stop)
        real = bounds[-1]
        positions[real:] = np.arange(size - real)
        cu_seqlens = np.full(size + 1, size, dtype=np.int32)
        cu_seqlens[: len(bounds)] = bounds
        longest = max(stop - start for start, stop in pairwise([*bounds, size]))
        return {
            "tokens": torch.from_numpy(tokens),
            "labels": torch.from_numpy(labels),
            "loss_mask": torch.from_numpy(loss_mask),
            "position_ids": torch.from_numpy(positions),
            "cu_seqlens": torch.from_numpy(cu_seqlens),
            "max_seqlen": torch.tensor(longest, dtype=torch.int32),
            "real_tokens": torch.tensor(real, dtype=torch.int32),
        }

    def _shuffle(self, epoch: int) -> None:
        """Draw which conversation of each length is where, and the order of the samples."""
        # numpy keeps the numbers of RandomState the same in all releases.
        random = np.random.RandomState([self.config.random_seed, self.index_split.value, epoch])
        shuffled_N = random.permutation(len(self._places_N))
        longest_first_N = np.argsort(-self._places_N[shuffled_N], kind="stable")
        self._item_N = shuffled_N[longest_first_N]
        self._order_M = random.permutation(len(self._bins))
        self._epoch = epoch

    def _read(self, conversation: int) -> tuple[NDArray[np.integer], NDArray[np.uint8]]:
        try:
            ids, mask = (part.get(conversation) for part in self.dataset)
        except (ValueError, IndexError, OverflowError) as error:
            raise UserError(
                f"{self.dataset_path}.bin: conversation {conversation} is incomplete ({error}): "
                "make the data set again"
            ) from error
        if mask.max(initial=0) > 1:
            raise UserError(
                f"{self.dataset_path}{LOSS_MASK}.bin: conversation {conversation} holds "
                f"{mask.max()}, which is neither 0 nor 1: make the data set again"
            )
        known = self.vocabulary
        if known is not None and (wrong := (ids < 0) | (ids >= known)).any():
            raise UserError(
                f"{self.dataset_path}.bin: conversation {conversation} holds the id "
                f"{ids[wrong][0]:,}, but the vocabulary has {known:,}: make the data set again, or "
                "give the tokenizer that it was made with"
            )
        return ids, mask
