"""Step time of sink attention with the balance loss over plain vanilla attention, on this CPU.

One process, one model per configuration with equal weights, forward + backward + optimizer step;
the configurations take turns, and the ratio is the median over turns of the times of one turn.
The last column drives the plain model with the CPU platform's replacements taken out again.

    python benchmarks/step_time.py --turns 15
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from bench_model import SHAPE, VOCABULARY, gpt_config, one_process

from megasink.upstream.register import suspended

BATCH = 1
# What is run, as options of the model; the first is the floor.
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "vanilla, no loss": {"attention_variant": "vanilla", "head_balance_coeff": 0.0},
    "vanilla + balance loss": {"attention_variant": "vanilla", "head_balance_coeff": 1e-4},
    "sink, no loss": {"attention_variant": "sink", "head_balance_coeff": 0.0},
    "sink + balance loss": {"attention_variant": "sink", "head_balance_coeff": 1e-4},
}
WITHOUT_PLATFORM = "vanilla, no loss, platform taken out"


def build(options: dict[str, object], sequence: int) -> torch.nn.Module:
    """A GPT of the shape above, on one process."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasink.layers.builder import MegasinkGPTBuilder

    config = gpt_config(sequence, **SHAPE, **options, use_cpu_initialization=True)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    return MegasinkGPTBuilder(config).build_model(groups, pre_process=True, post_process=True)


def stepper(model: torch.nn.Module, sequence: int) -> Callable[[], float]:
    """A function that trains one step and returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, sequence + 1), generator=generator)
    positions = torch.arange(sequence)[None]

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
        optimizer.step()
        return time.perf_counter() - start

    return step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    one_process(args.threads)
    steps = {
        name: stepper(build(options, args.sequence), args.sequence)
        for name, options in CONFIGURATIONS.items()
    }
    floor = next(iter(steps))
    times: dict[str, list[float]] = {name: [] for name in [*steps, WITHOUT_PLATFORM]}
    for turn in range(args.turns + 2):
        for name, step in steps.items():
            seconds = step()
            if turn >= 2:  # the first turns warm up
                times[name].append(seconds)
        # Taken out and put back within the turn, so that both see the same machine.
        with suspended():
            seconds = steps[floor]()
        if turn >= 2:
            times[WITHOUT_PLATFORM].append(seconds)
    print(f"S {args.sequence}, B {BATCH}, {SHAPE}, fp32, {args.threads} threads, ", end="")
    print(f"torch {torch.__version__}, {args.turns} turns\n")
    print("| configuration | ms per step | ratio to the floor (median, quartiles) |")
    print("|---|---|---|")
    for name, values in times.items():
        ratios = sorted(v / f for v, f in zip(values, times[floor], strict=True))
        low, middle, high = statistics.quantiles(ratios, n=4)
        milliseconds = 1e3 * statistics.median(values)
        print(f"| {name} | {milliseconds:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
