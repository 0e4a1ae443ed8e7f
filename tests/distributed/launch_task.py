"""Task: the entry point of training in a worker, with the variables that torchrun would set."""

import os
from unittest import mock

from tests.distributed.worker import forget


def train(flags: list[str], ranks: int, port: int) -> None:
    """Run ``megasink.training`` as one of ``ranks`` ranks; workers beyond them do nothing.

    Without the picture of the run, which takes as long as ten steps and has tests of its own.
    """
    rank = int(os.environ["POOL_RANK"])
    if rank >= ranks:
        return
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
    os.environ.update(address | {name: str(value) for name, value in numbers.items()})
    import torch

    from megasink.training.pretrain import pretrain

    try:
        with mock.patch("megasink.figures.run_figure.draw_run"):
            pretrain(flags)
    finally:
        forget()
        torch.use_deterministic_algorithms(False)  # --deterministic-mode is for the process
