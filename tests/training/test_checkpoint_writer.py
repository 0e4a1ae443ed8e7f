"""Parts of survival that need no run: copies of shared memory, a signal that one rank got."""

import signal

import torch

from megasink.training.async_checkpoint_process import with_own_memory
from tests.distributed.layout import Layout


def test_the_writer_copies_what_training_goes_on_changing():
    shared, own = torch.ones(3).share_memory_(), torch.ones(3)
    bucket = ("file", "key", ([], [("a", shared), ("b", own)]))
    ((_, _, (_, copies)),) = with_own_memory(lambda buckets: buckets)([bucket])
    shared.zero_()
    assert [(name, tensor.tolist()) for name, tensor in copies] == [
        ("a", [1.0] * 3),
        ("b", [1.0] * 3),
    ]
    assert copies[1][1] is own  # copied from a GPU already


def test_every_rank_knows_when_one_was_told_to_end(pool):
    found = pool.run("tests.training.signal_tasks:told_to_end", Layout(dp=2))
    # One step late, without a wait; at once in a step that waits anyway.
    assert found == [[(False, 0), (False, 0), (True, signal.SIGUSR2), (True, signal.SIGTERM)]] * 2
