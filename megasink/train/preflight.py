"""Time every rank and every link before the first step, and name those that fall behind.

A job of many hosts is as fast as its slowest GPU and its slowest cable, which no step time names.

Shapes: W ranks.
"""

import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median_high
from typing import Any

import torch
import torch.distributed as dist

from megasink import platform
from megasink.train.stop import Told

SLOW_LINK = 2.0
"""A link is slow that takes so many times the median of its kind: within a host, or between."""
SLOW_RANK = 1.25
"""A rank is slow that takes so many times the median for its matrix product."""
_REPEATS = 3
_NAME = 64  # bytes of a host name that are told


@dataclass(frozen=True)
class Load:
    """What is timed: bytes of a message, and the sides and type of a square matrix product."""

    bytes: int
    side: int
    dtype: torch.dtype


ON_CUDA = Load(64 << 20, 8192, torch.bfloat16)
ON_CPU = Load(1 << 20, 256, torch.float32)


@dataclass(frozen=True)
class Times:
    """Seconds, the best of a few, on every rank.

    Attributes:
        hosts: of the ranks.
        links: of receiving a message from the rank before, in a ring; empty for a single rank.
        products: of a matrix product.
        all_reduce: of a message, over all ranks: that of the slowest; None for a single rank.
        load: what was timed.
    """

    hosts: Sequence[str]
    links: Sequence[float]
    products: Sequence[float]
    all_reduce: float | None
    load: Load


def preflight(models: Any) -> Any:
    """Time all ranks and print the result on rank 0: a hook before the model is wrapped."""
    before, started = Told.phase, time.monotonic()
    Told.phase = "in the preflight"
    times = measure(ON_CPU if platform.is_active() else ON_CUDA)
    if dist.get_rank() == 0:
        took = time.monotonic() - started
        for line in report(times, took):
            print(f"preflight: {line}", flush=True)
    Told.phase = before
    return models


def measure(load: Load) -> Times:
    """Time this rank and its links. Call on every rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    device = _device()
    mine = [_product(load, device), float("nan"), float("nan")]
    if world > 1:
        message = torch.zeros(load.bytes, dtype=torch.uint8, device=device)
        for sender, receiver in rounds(world, rank):
            seconds = _link_seconds(message, rank, sender, receiver)
            if rank == receiver:
                mine[1] = seconds
        mine[2] = _timed(lambda: dist.all_reduce(message), together=True)
    told = torch.tensor(mine, dtype=torch.float64, device=device)
    all_W3 = torch.empty(world, 3, dtype=torch.float64, device=device)
    dist.all_gather_into_tensor(all_W3.view(-1), told)
    products, links, reduces = all_W3.cpu().T.tolist()
    return Times(
        hosts=_hosts(device),
        links=links if world > 1 else [],
        products=products,
        all_reduce=max(reduces) if world > 1 else None,
        load=load,
    )


def rounds(world: int, rank: int) -> list[tuple[int, int]]:
    """Return this rank's link in each round, (-1, -1) if it waits: (sender, receiver).

    In a round every rank has one link at most, so that a slow one does not slow down another's.
    """
    ring = [(sender, (sender + 1) % world) for sender in range(world)]
    last = [] if world % 2 == 0 else [ring.pop()]
    parts = [ring[::2], ring[1::2], last]
    return [next((link for link in part if rank in link), (-1, -1)) for part in parts if part]


def _link_seconds(message: torch.Tensor, rank: int, sender: int, receiver: int) -> float:
    def act() -> None:
        if rank == sender:
            dist.send(message, receiver)
        elif rank == receiver:
            dist.recv(message, sender)

    return _timed(act, together=True)


def _product(load: Load, device: torch.device) -> float:
    left = torch.ones(load.side, load.side, dtype=load.dtype, device=device)
    return _timed(lambda: left @ left, together=False)


def _timed(act: Callable[[], Any], *, together: bool) -> float:
    """Return the seconds of the fastest repeat after one that does not count."""
    best = float("inf")
    for repeat in range(_REPEATS + 1):
        if together:
            _meet()
        torch.cuda.synchronize()
        began = time.perf_counter()
        act()
        torch.cuda.synchronize()
        if repeat:
            best = min(best, time.perf_counter() - began)
    return best


def _meet() -> None:
    dist.all_reduce(torch.zeros(1, device=_device()))


def _device() -> torch.device:
    return torch.device("cpu" if platform.is_active() else "cuda")


def _hosts(device: torch.device) -> list[str]:
    name = socket.gethostname().encode()[:_NAME].ljust(_NAME, b"\0")
    mine = torch.tensor(list(name), dtype=torch.uint8, device=device)
    world = dist.get_world_size()
    all_WN = torch.empty(world, _NAME, dtype=torch.uint8, device=device)
    dist.all_gather_into_tensor(all_WN.view(-1), mine)
    return [bytes(row).rstrip(b"\0").decode(errors="replace") for row in all_WN.cpu().tolist()]


def report(times: Times, took: float) -> list[str]:
    """Return what rank 0 prints: medians, the slowest, and a line per straggler."""
    hosts, world = times.hosts, len(times.hosts)
    flops = 2 * times.load.side**3 / 1e12
    product = median_high(times.products)
    lines = [
        f"{_count(world, 'rank')} on {_count(len(set(hosts)), 'host')} answered in {took:.1f} s; "
        f"matrix products {flops / product:.3g} TFLOP/s (median)"
    ]
    stragglers = [
        f"straggler: rank {rank} on {hosts[rank]}: matrix products {flops / seconds:.3g} TFLOP/s, "
        f"{product / seconds:.2f} of the median"
        for rank, seconds in enumerate(times.products)
        if seconds > SLOW_RANK * product
    ]
    gigabytes = times.load.bytes / 1e9
    for kind, inside in (("within a host", True), ("between hosts", False)):
        links = {
            receiver: seconds
            for receiver, seconds in enumerate(times.links)
            if (hosts[receiver - 1] == hosts[receiver]) == inside
        }
        if not links:
            continue
        median = median_high(links.values())
        slowest = max(links, key=lambda receiver: links[receiver])
        lines.append(
            f"links {kind}: {gigabytes / median:.3g} GB/s (median), slowest "
            f"{_link_name(slowest, hosts)} {gigabytes / links[slowest]:.3g} GB/s"
        )
        stragglers += [
            f"slow link: {_link_name(receiver, hosts)}: {gigabytes / seconds:.3g} GB/s, "
            f"{median / seconds:.2f} of the median"
            for receiver, seconds in links.items()
            if seconds > SLOW_LINK * median
        ]
    if times.all_reduce is not None:
        moved = 2 * (world - 1) / world * gigabytes
        lines.append(
            f"all-reduce of {times.load.bytes >> 20} MiB over all ranks: "
            f"{1000 * times.all_reduce:.3g} ms, {moved / times.all_reduce:.3g} GB/s"
        )
    return lines + stragglers


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"


def _link_name(receiver: int, hosts: Sequence[str]) -> str:
    sender = (receiver - 1) % len(hosts)
    return f"{sender} -> {receiver} ({hosts[sender]} -> {hosts[receiver]})"
