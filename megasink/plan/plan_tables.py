"""The tables of ``megasink plan``, and the same numbers for JSON."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.console import Console
from rich.table import Table

from megasink.plan import whole_job
from megasink.plan.whole_job import DEVICES, GPU, Record, Stage
from megasink.training.checks.host_memory import CHECKPOINT_BYTES

_GIB = 2**30
_WORDS = {"component", "for", "group", "what", "layers", "attention", "window", "MLP", "norms"}
_PARTS = {
    "parameters": "weights",
    "gradients": "grads",
    "optimizer": "optim.",
    "buffers": "other",
    "activations": "activ.",
    "working": "working",
    "peak": "peak",
    "reserved": "reserved",
}
_SIZES = (("tensor", "TP"), ("pipeline", "PP"), ("context", "CP"), ("data", "DP"), ("expert", "EP"))


def as_json(records: Sequence[Record], gpu: GPU, utilization: float) -> dict[str, Any]:
    """Return every number of the plan; bytes, FLOPs, seconds."""
    facts = records[0]["job"]
    return {
        "job": dict(facts),
        "tokens_per_step": _tokens(facts),
        "seconds_per_step": whole_job.seconds(facts, gpu, utilization),
        "parameters": whole_job.parameters(records),
        "stages": [asdict(stage) for stage in whole_job.memory(records)],
        "checkpoint_host_bytes": _gathered(whole_job.memory(records), facts),
        "communication": [asdict(row) for row in whole_job.communication(records)],
        "layers": [layer for record in records for layer in record["layers"]],
    }


def show(records: Sequence[Record], device: str, utilization: float) -> None:
    """Print the tables."""
    console, facts, gpu = Console(), records[0]["job"], DEVICES[device]
    _say_job(console, facts, device, utilization)
    console.print()
    console.print(_parameters(whole_job.parameters(records)))
    stages = whole_job.memory(records)
    console.print()
    console.print(_memory(stages, gpu))
    _say_memory(console, stages, facts, device)
    console.print(_communication(whole_job.communication(records)))
    console.print()
    console.print(_layers(records))
    console.print()
    for title, choice in facts["kernels"].items():
        console.print(f"attention: {title} on {choice}", highlight=False, markup=False)
    console.print(facts["fused"], highlight=False, markup=False)


def _tokens(facts: Record) -> int:
    return int(facts["global_batch_size"] * facts["seq_length"])


def _say_job(console: Console, facts: Record, device: str, utilization: float) -> None:
    gpu, tokens = DEVICES[device], _tokens(facts)
    layout = " x ".join(f"{name} {facts[key]}" for key, name in _SIZES[:4] if facts[key] > 1)
    virtual = f", {facts['virtual']} virtual stages" if facts["virtual"] > 1 else ""
    experts = f", EP {facts['expert']}" if facts["expert"] > 1 else ""
    seconds = whole_job.seconds(facts, gpu, utilization)
    lines = [
        f"{facts['ranks']:,} x {device}: {layout or 'one rank'}{virtual}{experts}",
        f"step: {tokens:,} tokens, {facts['microbatches']} microbatches of "
        f"{facts['micro_batch_size']} x {facts['seq_length']:,} on each replica",
        f"      {facts['flops']:.3g} FLOPs: {seconds:.3g} s at {utilization:.0%} of "
        f"{gpu.teraflops:,.0f} TFLOP/s, {tokens / seconds:,.0f} tokens/s",
    ]
    if steps := facts["train_iters"]:
        hours = steps * seconds / 3600
        lines.append(
            f"run:  {steps:,} steps, {steps * tokens:.3g} tokens, {steps * facts['flops']:.3g} "
            f"FLOPs: {hours:,.1f} hours, {hours * facts['ranks']:,.0f} GPU hours"
        )
    for line in lines:
        console.print(line, highlight=False)


def _parameters(components: Mapping[str, int]) -> Table:
    table, total = _table("parameters", "component", "number", "share"), sum(components.values())
    for name, number in sorted(components.items(), key=lambda item: -item[1]):
        table.add_row(name, f"{number:,}", f"{number / total:.2%}")
    table.add_section()
    table.add_row("all", f"{total:,}", "")
    return table


def _memory(stages: Sequence[Stage], gpu: GPU) -> Table:
    table = _table("memory per rank, GiB")
    table.add_column("stage")
    table.add_column("layers", no_wrap=True)
    for title in _PARTS.values():
        table.add_column(title, justify="right", style="bold" if title == "peak" else None)
    table.add_column("GPU", justify="right")
    for stage in stages:
        sizes = [_gib(stage.memory[part]) for part in _PARTS]
        share = stage.memory["reserved"] / _GIB / gpu.gib
        name = str(stage.stage) if stage.rank is not None else f"({stage.stage})"
        color = "red" if share > 1 else None
        table.add_row(name, _ranges(stage.layers), *sizes, f"{share:.0%}", style=color)
    return table


def _say_memory(console: Console, stages: Sequence[Stage], facts: Record, device: str) -> None:
    full = max(stages, key=lambda stage: stage.memory["peak"])
    unit = "microbatch" if full.in_flight == 1 else "microbatches"
    unit += " of a virtual stage" if facts["virtual"] > 1 else ""
    stepped = [str(stage.rank) for stage in stages if stage.rank is not None]
    between = "; stages in parentheses are interpolated" if len(stepped) < len(stages) else ""
    fits = max(stage.memory["reserved"] for stage in stages) <= DEVICES[device].gib * _GIB
    console.print(
        f"{'fits' if fits else 'DOES NOT FIT'} in {DEVICES[device].gib:.0f} GiB; CUDA and NCCL "
        f"take 1 to 3 GiB more. Activations of stage {full.stage}: {full.in_flight} {unit} of "
        f"{_gib(full.per_microbatch)} GiB.\n"
        f"Ranks that ran a step: {', '.join(stepped)}{between}.\n",
        highlight=False,
    )
    if gathered := _gathered(stages, facts):
        console.print(
            f"A checkpoint that any layout can load needs {_gib(gathered)} GiB of host memory per "
            f"rank ({_gib(8 * gathered)} for 8 ranks) to save or load. If this is more than half "
            "of the free memory, training saves shards instead. Shards need no additional memory, "
            "but with them only the data-parallel size may change.\n",
            highlight=False,
        )


def _gathered(stages: Sequence[Stage], facts: Record) -> int:
    """Return the host memory in bytes that a rank needs to gather the optimizer's state."""
    return CHECKPOINT_BYTES * max(stage.parameters for stage in stages) if facts["gathers"] else 0


def _communication(rows: Sequence[whole_job.Traffic]) -> Table:
    columns = ("for", "group", "ranks", "what", "stage", "calls", "messages", "sent")
    table = _table("communication per rank and step", *columns)
    for row in rows:
        numbers = f"{row.calls:,}", _bytes(row.messages), _bytes(row.sent)
        table.add_row(row.purpose, row.group, f"{row.ranks:,}", row.kind, str(row.stage), *numbers)
    return table


def _layers(records: Sequence[Record]) -> Table:
    columns = ("layers", "attention", "window", "MLP", "norms")
    table = _table("layers of the ranks that ran a step", *columns)
    layers = sorted((la for r in records for la in r["layers"]), key=lambda la: la["layer"])

    def modules(layer: Mapping[str, Any]) -> list[str]:
        window = "all" if layer["window"] is None else f"{layer['window']:,}"
        attention, mlp = (", ".join(layer[key]) for key in ("attention", "mlp"))
        return [attention, window, mlp, ", ".join(layer["norms"])]

    for texts, run in groupby(layers, modules):
        table.add_row(_ranges([layer["layer"] for layer in run]), *texts)
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="left" if name in _WORDS else "right")
    return table


def _ranges(numbers: Sequence[int]) -> str:
    """Return "1-4, 9-12" for sorted numbers."""
    ranges = []
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        part = [number for _, number in run]
        ranges.append(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]))
    return ", ".join(ranges)


def _gib(size: int) -> str:
    return f"{size / _GIB:.2f}"


def _bytes(size: int) -> str:
    for unit, name in ((_GIB, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
