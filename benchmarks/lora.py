"""Cost of Eq. 8 in a LoRA step: CPU time of a step with the head-balance loss over one without.

The same frozen model with LoRA of rank 16 on all linear layers, through Megatron's schedule, DDP
and optimizer; one process, one thread. "full" trains all weights, for comparison. Pairs of steps
alternate, and the ratio is the median over the pairs. Wall time says nothing on a shared machine.

    python benchmarks/lora.py --turns 15
"""

import argparse
import os
import statistics
import tempfile
from typing import Any

import torch
from balance import measure, stepper

from megasink import cpu

SHAPE = {"num_layers": 6, "hidden_size": 512, "num_attention_heads": 8}
LORA = {"lora_rank": 16, "lora_alpha": 16.0}
# {name: (configuration of balance.py, more options)}; the first is what the others are compared to.
CONFIGURATIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "without": ("without", LORA),
    "Eq. 8": ("global", LORA | {"head_balance_shared_heads": 2}),
    "full": ("without", {}),
}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sequence", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--attention-variant", default="vanilla")
    parser.add_argument("--attention-kernel", default="auto")
    arguments = parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    torch.set_num_threads(1)
    cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megasink.upstream.mends import mend_upstream

    mend_upstream()
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=0, world_size=1
        )
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        batch = arguments.micro_batch * arguments.microbatches
        init_num_microbatches_calculator(0, None, batch, arguments.micro_batch, 1)
        steps = {
            name: stepper(kind, SHAPE | more, arguments, cuda=False)
            for name, (kind, more) in CONFIGURATIONS.items()
        }
        pairs = measure(steps, arguments.turns)
        torch.distributed.destroy_process_group()
    print(f"{SHAPE}, rank {LORA['lora_rank']}, S {arguments.sequence}, one thread, ", end="")
    print(f"{arguments.attention_variant}, torch {torch.__version__}, {arguments.turns} turns\n")
    print("| step | CPU ms without | ratio of CPU time (median, quartiles) |\n|---|---|---|")
    for name, found in pairs.items():
        low, middle, high = statistics.quantiles([w[1] / f[1] for f, w in found], n=4)
        floor = 1e3 * statistics.median(floor[1] for floor, _ in found)
        print(f"| {name} | {floor:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")


if __name__ == "__main__":
    main()
