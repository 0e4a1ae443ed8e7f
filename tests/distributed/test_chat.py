"""Training on conversations: packed as by themselves, in any layout, resumed as never stopped."""

import shutil
from itertools import pairwise

import numpy as np
import pytest

from megasink.data.corpus import Corpus
from megasink.data.output import LOSS_MASK
from megasink.data.preprocess import preprocess
from tests import runs
from tests.chats import chat_data, conversations, write_chats
from tests.distributed import merging
from tests.distributed.cases import TOLERANCE
from tests.distributed.layout import SINGLE, Layout
from tests.distributed.pool import Pool
from tests.distributed.test_data_path import MODEL, ROPE

TASKS, CHAT_TASKS = "tests.distributed.data_tasks", "tests.distributed.chat_tasks"
SIZE = 128
CHATS = conversations(50, exchanges=2, words=2)
NO_BALANCE = ["--head-balance-coeff", "0"]


@pytest.fixture(scope="module")
def pool():
    """Workers of its own: a run with a tokenizer leaves state that others must not meet."""
    with Pool(2) as workers:
        yield workers


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """A folder with the data, its tokenizer, and flags to train on it."""
    folder = tmp_path_factory.mktemp("chats")
    chat_data(folder, CHATS, SIZE)
    return folder


@pytest.fixture(scope="module")
def flags(data):
    own = ["--data-path", str(data / "chat"), "--tokenizer-model", str(data / "tokenizer")]
    length = ["--seq-length", str(SIZE), "--max-position-embeddings", str(SIZE)]
    return [*MODEL, *ROPE, *own, *length]


def test_packed_conversations_train_as_each_by_itself(pool, flags):
    (alone,) = pool.run(f"{CHAT_TASKS}:alone", SINGLE, argv=[*flags, *NO_BALANCE])
    assert alone["conversations"] >= 6  # in 4 samples
    packed = pool.once(f"{TASKS}:one_step", SINGLE, argv=[*flags, *NO_BALANCE])
    assert merging.loss(packed) == pytest.approx(merging.loss([alone]), rel=TOLERANCE)
    merging.assert_same_gradients(packed, [alone], TOLERANCE)


@pytest.mark.parametrize(
    ("layout", "parallel"),
    [
        (Layout(dp=2), []),
        (Layout(pp=2), ["--pipeline-model-parallel-size", "2"]),
        (Layout(cp=2), ["--context-parallel-size", "2", "--cp-comm-type", "all_gather"]),
        (Layout(cp=2), ["--context-parallel-size", "2", "--cp-comm-type", "a2a"]),
    ],
    ids=str,
)
def test_uneven_masks_count_each_target_once_in_every_layout(pool, flags, layout, parallel):
    whole = pool.once(f"{TASKS}:one_step", SINGLE, argv=flags)
    found = pool.run(f"{TASKS}:one_step", layout, argv=[*flags, *parallel])
    assert merging.loss(found) == pytest.approx(merging.loss(whole), rel=TOLERANCE)
    merging.assert_same_gradients(found, whole, TOLERANCE)


def test_every_epoch_has_every_conversation_once_in_another_order(pool, flags, data):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    tokens = IndexedDataset(str(data / "chat"))
    masks = IndexedDataset(str(data / "chat") + LOSS_MASK)
    wanted = sorted((t[:-1].tolist(), m[1:].tolist()) for t, m in zip(tokens, masks, strict=True))
    (many,) = pool.run(f"{CHAT_TASKS}:samples", SINGLE, argv=flags, wanted=80)
    read, per_epoch = [], None
    for number, sample in enumerate(many, 1):
        real = int(sample["real_tokens"])
        bounds = sorted({int(end) for end in sample["cu_seqlens"] if end <= real})
        for start, stop in pairwise(bounds):
            part = slice(start, stop)
            read.append((sample["tokens"][part].tolist(), sample["loss_mask"][part].tolist()))
            assert sample["tokens"][start + 1 : stop].tolist() == read[-1][0][1:]
            assert sample["labels"][start : stop - 1].tolist() == read[-1][0][1:]
            assert sample["position_ids"][part].tolist() == list(range(stop - start))
        assert not sample["loss_mask"][real:].any()
        if per_epoch is None and len(read) >= len(wanted):
            assert len(read) == len(wanted)
            per_epoch = number
    assert per_epoch is not None
    epochs = [read[i : i + len(wanted)] for i in range(0, len(read), len(wanted))]
    assert [sorted(epoch) for epoch in epochs[:2]] == [wanted, wanted]
    assert epochs[0] != epochs[1]
    # A sample does not depend on how many are asked for; it does on the seed.
    (few,) = pool.run(f"{CHAT_TASKS}:samples", SINGLE, argv=flags, wanted=7)
    assert all(np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(few, many, strict=False))
    argv = [*flags, "--seed", "7"]
    (other,) = pool.run(f"{CHAT_TASKS}:samples", SINGLE, argv=argv, wanted=7)
    assert any(
        not np.array_equal(a["tokens"], b["tokens"]) for a, b in zip(few, other, strict=True)
    )


def test_several_prefixes_train_as_a_blend(pool, flags, data):
    path = write_chats(data / "b.jsonl", conversations(20, exchanges=1, words=2, seed=1))
    corpus = Corpus([path], chat=True)
    tokenizer = data / "tokenizer"
    preprocess(corpus, data / "other", tokenizer, seq_length=SIZE, workers=1, overwrite=True)
    argv = [*flags, "--data-path", "3", str(data / "chat"), "1", str(data / "other")]
    (found,) = pool.run(f"{CHAT_TASKS}:samples", SINGLE, argv=argv, wanted=40)
    assert np.bincount([sample["dataset_id"] for sample in found]).tolist() == [30, 10]
    assert all(sample["loss_mask"].any() for sample in found)


def test_a_run_resumes_as_if_it_had_never_stopped(pool, flags, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    base = [*flags, "--num-workers", "0", "--eval-iters", "0", "--log-interval", "1"]
    base += ["--train-iters", "4", "--lr-decay-style", "constant", "--save-interval", "2"]
    pool.train([*base, "--run-dir", str(whole)])
    shutil.copytree(whole, parts)
    shutil.rmtree(parts / "checkpoints/iter_0000004")
    (parts / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    kept = (parts / "metrics.jsonl").read_text().splitlines(keepends=True)[:2]
    (parts / "metrics.jsonl").write_text("".join(kept))
    pool.train([*base, "--run-dir", str(parts), "--resume"])
    assert runs.resumed_from(parts) == [None, 2]
    losses = [[step["lm_loss"] for step in runs.steps(run)] for run in (whole, parts)]
    assert losses[0] == losses[1]
    assert len(set(losses[0])) == 4
