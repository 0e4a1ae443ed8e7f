"""Step time of sink attention with the balance loss over plain vanilla attention.

One process, one model per configuration with equal weights, forward + backward + optimizer step;
the configurations take turns, and the ratio is the median over turns of the times of one turn.
On a CPU a small model in fp32; its last row drives the plain model with the CPU platform's
replacements taken out again. On a GPU the 0.6B shape of the example in bf16, with Megatron's local
modules and PyTorch's AdamW.

    python benchmarks/step_time.py --turns 15
    python benchmarks/step_time.py --device cuda
"""

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext

import torch
from bench_model import SHAPE, SHAPE_06B, VOCABULARY, gpt_config, one_process

from megasink.upstream.patch_register import suspended

BATCH = 1
VOCABULARY_06B = 32000
# What is run, as options of the model; the first is the floor.
CONFIGURATIONS: dict[str, dict[str, object]] = {
    "vanilla, no loss": {"attention_variant": "vanilla", "head_balance_coeff": 0.0},
    "vanilla + balance loss": {"attention_variant": "vanilla", "head_balance_coeff": 1e-4},
    "sink, no loss": {"attention_variant": "sink", "head_balance_coeff": 0.0},
    "sink + balance loss": {"attention_variant": "sink", "head_balance_coeff": 1e-4},
}
GATED: dict[str, dict[str, object]] = {
    "gated, no loss": {"attention_variant": "gated", "head_balance_coeff": 0.0},
    "gated + balance loss": {"attention_variant": "gated", "head_balance_coeff": 1e-4},
}
WITHOUT_PLATFORM = "vanilla, no loss, platform taken out"


def build(options: dict[str, object], sequence: int, device: str) -> torch.nn.Module:
    """A GPT of the device's shape, on one process."""
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasink.megatron.model import MegasinkModelBuilder

    if device == "cpu":
        config = gpt_config(sequence, **SHAPE, **options, use_cpu_initialization=True)
    else:
        dtype = {"bf16": True, "params_dtype": torch.bfloat16}
        config = gpt_config(sequence, vocabulary=VOCABULARY_06B, **SHAPE_06B, **dtype, **options)
    groups = ProcessGroupCollection.use_mpu_process_groups()
    model = MegasinkModelBuilder(config).build_model(groups, pre_process=True, post_process=True)
    # Norms too, as Megatron's Float16Module does: in float32 they take a slower kernel.
    return model if device == "cpu" else model.cuda().bfloat16()


def stepper(model: torch.nn.Module, sequence: int, device: str) -> Callable[[], float]:
    """A function that trains one step and returns its seconds."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(VOCABULARY, (BATCH, sequence + 1), generator=generator).to(device)
    positions = torch.arange(sequence, device=device)[None]
    wait = torch.cuda.synchronize if device == "cuda" else nullcontext

    def step() -> float:
        wait()
        start = time.perf_counter()
        optimizer.zero_grad()
        model(tokens[:, :-1], positions, None, labels=tokens[:, 1:]).mean().backward()
        model.config.statistics.reduce()
        optimizer.step()
        wait()
        return time.perf_counter() - start

    return step


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sequence", type=int, help="tokens; default 1024, on a GPU 4096")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args()
    cuda = args.device == "cuda"
    args.sequence = args.sequence or (4096 if cuda else 1024)
    one_process(args.threads, args.device)
    steps = {
        name: stepper(build(options, args.sequence, args.device), args.sequence, args.device)
        for name, options in (CONFIGURATIONS | (GATED if cuda else {})).items()
    }
    floor = next(iter(steps))
    times: dict[str, list[float]] = {name: [] for name in steps}
    if not cuda:
        times[WITHOUT_PLATFORM] = []
    for turn in range(args.turns + 2):
        for name, step in steps.items():
            seconds = step()
            if turn >= 2:  # the first turns warm up
                times[name].append(seconds)
        if cuda:
            continue
        # Taken out and put back within the turn, so that both see the same machine.
        with suspended():
            seconds = steps[floor]()
        if turn >= 2:
            times[WITHOUT_PLATFORM].append(seconds)
    where = f"{SHAPE}, fp32, {args.threads} threads"
    if cuda:
        where = f"{SHAPE_06B}, vocabulary {VOCABULARY_06B}, bf16, {torch.cuda.get_device_name()}"
    print(f"S {args.sequence}, B {BATCH}, {where}, torch {torch.__version__}, ", end="")
    print(f"{args.turns} turns\n")
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
