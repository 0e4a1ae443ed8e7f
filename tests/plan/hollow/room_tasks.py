"""Tasks for the server: what the hollow GPU itself answers and counts."""

import os
from collections import Counter
from typing import Any

import torch

from megasink.plan.hollow.compile_libraries import Device
from megasink.plan.hollow.lone_rank import be_rank
from tests.plan.hollow.events import Recording


def device(capability: int, gib: int) -> dict[str, Any]:
    """What torch sees of a device, and what happens where its memory ends."""
    os.environ |= Device(capability, gib).variables()
    found: dict[str, Any] = {
        "capability": torch.cuda.get_device_capability(),
        "processors": torch.cuda.get_device_properties(0).multi_processor_count,
        "total": torch.cuda.mem_get_info()[1],
    }
    kept = torch.empty(gib - 1, 1 << 30, dtype=torch.uint8, device="cuda")
    found["allocated"] = torch.cuda.memory_allocated()
    try:
        torch.empty(2 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        found["error"] = str(error)
    del kept
    return found


def events() -> dict[str, Any]:
    """The events of a few lines, and what the host reads back."""
    host = torch.arange(4.0)
    with Recording() as recording:
        there = host.cuda()
        again = there.cpu()
        added = there + 1.0
        read = added.tolist()
        product = there.view(2, 2).half() @ there.view(2, 2).half()
        pinned = host.pin_memory().to("cuda", non_blocking=True)
        torch.cuda.synchronize()
    assert product.shape == (2, 2)
    assert pinned.shape == (4,)
    waits = [
        (e.name, line.text if (line := e.line_in(__name__)) else "")
        for e in recording.events
        if e.waits
    ]
    return {
        "read back": again.tolist(),
        "computed": read,
        "waits": waits,
        "copies": Counter(e.name for e in recording.events if e.kind == "copy"),
        "operations": [e.first for e in recording.events if e.kind == "gemm"],
        "kernels": sum(e.kind == "launch" for e in recording.events),
    }


def collectives(rank: int, ranks: int) -> dict[str, Any]:
    """What a rank of many is answered, and which NCCL calls were made."""
    import torch.distributed as dist

    be_rank(rank, ranks)
    dist.init_process_group("nccl")
    half = dist.new_group(list(range(ranks // 2)) if rank < ranks // 2 else None)
    with Recording(["collective"]) as recording:
        mine = torch.full((1,), 5.0).cuda()
        dist.all_reduce(mine, op=dist.ReduceOp.MAX)
        agreed = mine.item()
        everyone = torch.empty(ranks, 3, device="cuda")
        dist.all_gather_into_tensor(everyone, torch.ones(3).cuda())
        gathered: list[Any] = [None] * ranks
        dist.all_gather_object(gathered, {"rank": rank})
        dist.all_reduce(torch.empty(8, device="cuda"), group=half)
    dist.destroy_process_group()
    return {
        "rank": [rank, ranks],
        "agreed": agreed,
        "everyone": everyone.tolist(),
        "gathered": len(gathered),
        "calls": [[e.name, e.first, e.second] for e in recording.events if e.first],
    }
