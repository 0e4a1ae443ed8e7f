"""The whole job, from the records of the ranks that were built and stepped."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

BALANCE = "head-balance loss"
_SUMS = ("calls", "messages", "sent")
Record = Mapping[str, Any]
Key = tuple[str, int, str, str]


@dataclass(frozen=True)
class GPU:
    """A GPU, from its vendor's data sheet."""

    teraflops: float  # Peak dense bfloat16 rate of the tensor cores, 10^12 FLOP/s
    gib: float  # Memory in GiB (2^30 bytes), as the driver reports it at most
    capability: int  # Compute capability without the point


# The SXM modules; rates without sparsity.
DEVICES = {
    "a100-40gb": GPU(312.0, 40.0, 80),
    "a100": GPU(312.0, 80.0, 80),
    "h100": GPU(989.4, 80.0, 90),
    "h200": GPU(989.4, 141e9 / 2**30, 90),
    "b200": GPU(2250.0, 180e9 / 2**30, 100),
}


@dataclass(frozen=True)
class Stage:
    """A rank of a pipeline stage: all ranks of a stage use the same memory."""

    stage: int  # 0-based
    # The rank that was built and stepped; None if two others with equal modules were.
    rank: int | None
    layers: list[int]  # Numbers of its layers, from 1
    parameters: int  # Number of parameters that the rank holds
    # Bytes: parameters, gradients, optimizer, buffers (other tensors that stay), activations (held
    # for backward passes), working (above all of these at the peak), peak (their sum), reserved (by
    # the allocator, with its gaps, at the peak).
    memory: dict[str, int]
    in_flight: int  # Most forward passes (of a virtual stage each) that await their backward
    per_microbatch: int  # Bytes held by one of them


@dataclass(frozen=True)
class Traffic:
    """Communication of one step of one rank."""

    # group, ranks, kind, purpose: See `megasink.plan.collectives`.
    group: str
    ranks: int
    kind: str
    purpose: str
    stage: int  # Pipeline stage of the rank, the one that sends most of this
    # calls, messages, sent: number of calls, bytes of the messages, bytes that the rank sends.
    calls: int
    messages: int
    sent: int


def stages_to_step(facts: Record) -> list[int]:
    """Return the pipeline stages to step, from which all others follow, in order."""
    # Of stages with equal modules the first and the last, between which memory falls linearly; all
    # stages if a step is too short to fill the pipeline.
    stages, pipeline = facts["stages"], facts["pipeline"]
    if facts["microbatches"] < pipeline * (2 if facts["virtual"] > 1 else 1):
        return list(range(pipeline))
    alike: dict[str, list[int]] = {}
    for index, modules in enumerate(stages):
        alike.setdefault(str(modules), []).append(index)
    return sorted({end for indices in alike.values() for end in (indices[0], indices[-1])})


def rank_of(stage: int, facts: Record, *, last: bool) -> int:
    """Return the first rank of a stage, or the job's last rank for the last stage if `last`."""
    if last and stage == facts["pipeline"] - 1:
        return int(facts["ranks"]) - 1
    inside = facts["tensor"] * facts["context"]
    return int(stage * (inside if facts["pipeline_before_data"] else facts["of_stage"]))


def parameters(records: Sequence[Record]) -> dict[str, int]:
    """Return the number of the model's parameters by component."""
    facts = records[0]["job"]
    modules = {str(facts["stages"][r["stage"]]): r["parameters_of_stage"] for r in records}
    total: Counter[str] = Counter()
    for stage in facts["stages"]:
        total.update(modules[str(stage)])
    return dict(total)


def memory(records: Sequence[Record]) -> list[Stage]:
    """Return every pipeline stage; some are interpolated between two that were stepped."""
    facts = records[0]["job"]
    stages = {record["stage"]: stage_of(record) for record in records}
    alike: dict[str, list[int]] = {}
    for index in sorted(stages):
        alike.setdefault(str(facts["stages"][index]), []).append(index)
    for indices in alike.values():
        for first, last in pairwise(indices):
            for between in range(first + 1, last):
                if str(facts["stages"][between]) == str(facts["stages"][first]):
                    stages.setdefault(between, _between(stages[first], stages[last], between))
    return [replace(stages[index], layers=blocks) for index, blocks in enumerate(facts["blocks"])]


def stage_of(record: Record) -> Stage:
    """Return the stage of a stepped rank, in the step with the higher peak."""
    step = max(record["steps"], key=lambda step: step["peak"])
    state = dict(record["training_state"])
    # Without memory that the step frees before its first pass, such as the last step's gradients.
    state["buffers"] = step["start"] - sum(state.values())
    state["activations"] = step["held"]
    state["working"] = step["peak"] - step["start"] - step["held"]
    return Stage(
        stage=record["stage"],
        rank=record["rank"],
        layers=[layer["layer"] for layer in record["layers"]],
        parameters=sum(record["parameters_here"].values()),
        memory=state | {"peak": step["peak"], "reserved": step["reserved"]},
        in_flight=step["in_flight"],
        per_microbatch=step["each"],
    )


def _between(first: Stage, last: Stage, stage: int) -> Stage:
    share = (stage - first.stage) / (last.stage - first.stage)

    def mix(a: int, b: int) -> int:
        return round(a + share * (b - a))

    return replace(
        first,
        stage=stage,
        rank=None,
        memory={part: mix(first.memory[part], last.memory[part]) for part in first.memory},
        in_flight=mix(first.in_flight, last.in_flight),
        per_microbatch=mix(first.per_microbatch, last.per_microbatch),
    )


def communication(records: Sequence[Record]) -> list[Traffic]:
    """Return the communication of a step, each row for the stage that sends most of it."""
    most: dict[Key, Traffic] = {}
    for record in records:
        for what, sums in step_traffic(record).items():
            row = Traffic(*what, record["stage"], *(sums[name] for name in _SUMS))
            if what not in most or row.messages > most[what].messages:
                most[what] = row
    return sorted(most.values(), key=lambda row: (row.purpose != BALANCE, -row.sent, -row.messages))


def step_traffic(record: Record) -> dict[Key, Counter[str]]:
    """Return {(group, ranks, kind, purpose): sums} of a rank's whole step."""
    few, many = record["steps"]
    every = record["job"]["microbatches"]
    more = many["microbatches"] - few["microbatches"]
    times = (every - few["microbatches"]) / more if more else 0.0
    tables = [{_key(call): call for call in step["calls"]} for step in (few, many)]
    traffic: dict[Key, Counter[str]] = {}
    for what in {**tables[0], **tables[1]}:
        a, b = (table.get(what, dict.fromkeys(_SUMS, 0)) for table in tables)
        traffic[what] = Counter({n: round(a[n] + times * (b[n] - a[n])) for n in _SUMS})
    return traffic


def _key(call: Mapping[str, Any]) -> Key:
    return call["group"], call["ranks"], call["kind"], call["purpose"]


def seconds(facts: Record, gpu: GPU, utilization: float) -> float:
    """Return the time of a step at a share of the peak rate, by Megatron's count of FLOPs."""
    return float(facts["flops"] / (facts["ranks"] * gpu.teraflops * 1e12 * utilization))
