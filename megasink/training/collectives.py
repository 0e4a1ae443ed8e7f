"""Find the collective in which this rank waits, from torch's flight recorder (gloo, NCCL)."""

import json
import os
from typing import Any

_ENTRIES = "256"  # operations that the recorder keeps; unfinished ones are the newest


def record() -> None:
    """Turn the recorder on, before the process groups are made; a set variable is kept."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", _ENTRIES)


def under_way() -> str | None:
    """Describe the oldest unfinished operation: ``all_reduce 17 of GROUP (Float [100])``.

    17 is its number in the group. None if there is no such operation, or no recorder.
    """
    import torch
    from torch._C import _distributed_c10d as c10d

    if torch.cuda.is_initialized():
        # The dump may ask CUDA events, and a thread begins on device 0: it would open a context
        # there, on every host one for each rank. The same device as in Megatron's initialize.py.
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    active: list[dict[str, Any]] = []
    for dump in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        if hasattr(c10d, dump):  # the second one is NCCL's own
            text = getattr(c10d, dump)(includeCollectives=True, onlyActive=True)
            entries = json.loads(text).get("entries") or []
            active += [entry for entry in entries if not entry["retired"]]
    if not active:
        return None
    entry = min(active, key=lambda entry: int(entry["time_created_ns"]))
    operation = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    group = entry["process_group"][1] or entry["process_group"][0]
    first = zip(entry["input_dtypes"][:1], entry["input_sizes"][:1], strict=True)
    return f"{operation} {number} of {group}" + "".join(f" ({t} {s})" for t, s in first)
