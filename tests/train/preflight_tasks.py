"""Run by the workers of tests/distributed/pool.py."""

import contextlib
import io
import time
from typing import Any

import torch.distributed as dist

from megasink.train import preflight
from megasink.train.preflight import ON_CPU, Times
from tests.distributed.launch_task import train


def times(slow_product: int | None = None, slow_link: int | None = None) -> Times:
    """The times, with one rank slow at one thing: its product, or what it sends."""
    rank = dist.get_rank()
    product, send = preflight._product, dist.send

    def slow(act: Any) -> Any:
        def wrapper(*args: Any) -> Any:
            time.sleep(0.3)
            return act(*args)

        return wrapper

    if rank == slow_product:
        preflight._product = lambda *args: product(*args) + 0.3
    if rank == slow_link:
        dist.send = slow(send)
    try:
        return preflight.measure(ON_CPU)
    finally:
        preflight._product, dist.send = product, send


def said(flags: list[str], ranks: int, port: int) -> str:
    """Train, and return what this rank printed."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train(flags, ranks, port)
    return out.getvalue()
