"""CPU time of packed documents on two context-parallel ranks over that of one rank.

Two gloo ranks of one thread each. In a turn each rank first runs a whole row forward and backward
by itself, then both run halves of the same row, with gathered keys and with scattered heads. The
ratio is the CPU time of both ranks over the mean of what each took by itself: 1 would be no
overhead.

    python benchmarks/packed_context.py --turns 15
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_model import SHAPE, VOCABULARY, gpt_config

from megasink import cpu
from megasink.megatron.context_parallel import own_chunks

ALONE, KINDS = "one rank", ("all_gather", "a2a")


def lengths(tokens: int, mean: int) -> list[int]:
    """Lognormal lengths of documents that fill a row, the last one cut."""
    draw = torch.distributions.LogNormal(torch.tensor(float(mean)).log() - 0.5, 1.0)
    found: list[int] = []
    while (left := tokens - sum(found)) > 0:
        found.append(min(left, max(1, int(draw.sample()))))
    return found


def stepper(name: str, row: list[int]) -> Callable[[], float]:
    """A function that runs this rank's tokens forward and backward and returns its CPU seconds."""
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasink.megatron.microbatch_documents import PackedRow, row_of_documents
    from megasink.megatron.model import MegasinkModelBuilder

    groups = ProcessGroupCollection.use_mpu_process_groups()
    if name == ALONE:
        groups.cp = parallel_state.get_tensor_model_parallel_group()  # of one rank
    ranks, rank, tokens = groups.cp.size(), groups.cp.rank(), sum(row)
    config = gpt_config(
        tokens,
        **SHAPE,
        attention_variant="sink",
        head_balance_coeff=1e-4,
        cp_comm_type=None if name == ALONE else name,
        context_parallel_size=ranks,
        use_cpu_initialization=True,
    )
    model = MegasinkModelBuilder(config).build_model(groups, pre_process=True, post_process=True)
    bounds = [0, *torch.tensor(row).cumsum(0).tolist()]
    documents = row_of_documents(bounds, device=torch.device("cpu"), ranks=ranks, rank=rank)
    params = PackedRow(max_seqlen_q=tokens, max_seqlen_kv=tokens, documents=documents)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCABULARY, (1, tokens + 1), generator=generator)
    inputs, labels = (own_chunks(x, ranks, rank, dim=1) for x in (text[:, :-1], text[:, 1:]))
    positions = documents.positions(text.device)[None]

    def step() -> float:
        torch.distributed.barrier()
        start = time.process_time()
        losses = model(inputs, positions, None, labels=labels, packed_seq_params=params)
        losses.mean().backward()
        return time.process_time() - start

    return step


def rank_of_two(rank: int, store: str, arguments: argparse.Namespace) -> None:
    """Measure; rank 0 prints the table."""
    torch.set_num_threads(1)
    cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2
    )
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(0)
    row = lengths(arguments.sequence, arguments.mean)
    steps = {name: stepper(name, row) for name in (ALONE, *KINDS)}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(arguments.turns + 2):
        for name, step in steps.items():
            both = torch.tensor(step(), dtype=torch.float64)
            torch.distributed.all_reduce(both)
            if turn >= 2:  # the first turns warm up
                seconds[name].append(both.item() / (2.0 if name == ALONE else 1.0))
    if rank == 0:
        report(row, seconds)
    torch.distributed.destroy_process_group()


def report(row: list[int], seconds: dict[str, list[float]]) -> None:
    """Print the table."""
    print(f"{len(row)} documents, the longest {max(row)}, in {sum(row)} tokens; {SHAPE}, fp32")
    print(f"torch {torch.__version__}, {len(seconds[ALONE])} turns\n")
    print("| | CPU us per token | ratio (median, quartiles) |\n|---|---|---|")
    for name, values in seconds.items():
        ratios = [value / alone for value, alone in zip(values, seconds[ALONE], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        each = 1e6 * statistics.median(values) / sum(row)
        print(f"| {name} | {each:.1f} | {middle:.3f} ({low:.3f} to {high:.3f}) |")


def main() -> None:
    """Start the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sequence", type=int, default=2048)
    parser.add_argument("--mean", type=int, default=200, help="length of the documents")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        torch.multiprocessing.spawn(rank_of_two, (store, arguments), nprocs=2)


if __name__ == "__main__":
    main()
