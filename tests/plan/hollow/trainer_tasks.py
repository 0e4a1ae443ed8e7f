"""Tasks for the server: one rank of the trainer, three steps, of which the second is recorded.

A step is everything from the beginning of Megatron's train_step to the beginning of the next:
forward, backward, optimizer, logging, the agreement on signals.
"""

import contextlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from megatron.training import get_args, training

from megasink.plan.hollow.compile_libraries import Device
from megasink.plan.hollow.lone_rank import be_rank
from megasink.plan.rank_step import share_tokens_equally
from megasink.training import pretrain
from megasink.training.parse_arguments import CHECKED, digest
from tests.plan.hollow.answers import say_documents
from tests.plan.hollow.events import Event, Recording
from tests.plan.hollow.given import watch_rows

RECORDED = 2


def step(
    flags: list[str],
    rank: int = 0,
    ranks: int = 1,
    device: dict[str, int] | None = None,
    checked: bool = False,
) -> dict[str, Any]:
    """Train three steps as a rank of `ranks`; describe the second.

    `checked`: without our checks, as if a launcher had made them.
    """
    os.environ |= Device(**device or {}).variables()
    flags = ["--train-iters", "3", *flags]
    if checked:
        os.environ[CHECKED] = digest(flags)
    be_rank(rank, ranks)
    if "alltoall" in flags:
        share_tokens_equally()
    if "--dataloader-inter-document-masking" in flags and "--tensor-model-parallel-size" in flags:
        say_documents()
    recording, misplaced, models, memory = Recording(), watch_rows(), [], []
    with _recorded_step(recording, models, memory):
        pretrain.pretrain(flags)
    events = recording.events
    assert events, "the step was not recorded"
    collectives = Counter(
        (e.name, e.first, e.second) for e in events if e.kind == "collective" and e.first
    )
    return {
        "counts": recording.counts(),
        "waits": _lines(e for e in events if e.waits),
        "crossings": _lines(e for e in events if e.crosses),
        "collectives": [[*what, count] for what, count in collectives.items()],
        "kernels": Counter(e.name for e in events if e.kind == "launch"),
        "misplaced": sorted(misplaced),
        "before": memory[0],
        "peak": memory[1],
        "began_at": get_args().iteration,
        "parameters": sum(p.numel() for model in models for p in model.parameters()),
    }


def _lines(events: Iterator[Event]) -> list[list[Any]]:
    """[what, module, source, count] of the innermost lines of megasink or Megatron."""
    found: Counter[tuple[str, str, str]] = Counter()
    for event in events:
        line = event.line_in("megasink", "megatron")
        found[event.name, line.module if line else "", line.text if line else ""] += 1
    return [[*where, count] for where, count in sorted(found.items())]


def _requested(which: str) -> int:
    """Bytes of all tensors; what is allocated rounds each block up, by as much as 1 MiB."""
    return int(torch.cuda.memory_stats()[f"requested_bytes.all.{which}"])


@contextlib.contextmanager
def _recorded_step(recording: Recording, models: list[Any], memory: list[int]) -> Iterator[None]:
    """Record from the beginning of a step to that of the next, and the memory at both."""
    inner, done = training.train_step, 0
    build = training.build_train_valid_test_data_iterators

    def build_iterators(*arguments: Any, **options: Any) -> Any:
        get_args().do_train = True  # which rank 0 tells the others
        return build(*arguments, **options)

    def train_step(*arguments: Any, **options: Any) -> Any:
        nonlocal done
        done += 1
        if done == RECORDED + 1:
            recording.__exit__()
            memory.append(_requested("peak"))
        if done == RECORDED:
            models.extend(arguments[2])
            torch.cuda.reset_peak_memory_stats()
            memory.append(_requested("current"))
            recording.__enter__()
        return inner(*arguments, **options)

    training.train_step = train_step
    training.build_train_valid_test_data_iterators = build_iterators
    yield


def main() -> None:
    """Print what `step` returns for the flags of the command line."""
    rank, ranks, *flags = sys.argv[1:]
    print(json.dumps(step(flags, int(rank), int(ranks)), indent=1))


if __name__ == "__main__":
    main()
