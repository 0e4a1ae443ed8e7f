"""Overhead of the head-balance loss and its statistics: step time with each scope over without.

The same model with sinks, through Megatron's schedule, DDP and optimizer; "without" counts no heads
and sends nothing. A model per configuration, in the same processes; before each step of one the
model without takes a step, and the ratio is the median over those pairs.

Without a CUDA device: two gloo ranks, data-parallel, one thread each. With one: the 0.6B shape of
the paper (20 layers, d 1280, 10 heads, S 2048) on one device in bf16; --attention-kernel takes one
kernel alone.

    python benchmarks/balance.py --turns 15
    python benchmarks/balance.py --attention-kernel flash-attn-4     on a GPU
"""

import argparse
import logging
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from bench_model import SHAPE, VOCABULARY, gpt_config

from megasink import cpu

WITHOUT = "without"
CONFIGURATIONS = (WITHOUT, "statistics alone", "global", "data-parallel", "microbatch")
GPU = {"num_layers": 20, "hidden_size": 1280, "num_attention_heads": 10, "bf16": True}
Step = Callable[[], tuple[float, float]]


def build(name: str, shape: dict[str, Any], arguments: argparse.Namespace, cuda: bool) -> Any:
    """(configuration, wrapped models) of one line of the table."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.distributed import finalize_model_grads as upstream
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megasink.megatron.core_attention import CoreAttention
    from megasink.megatron.model import MegasinkModelBuilder

    config = gpt_config(
        arguments.sequence,
        **shape,
        attention_variant=getattr(arguments, "attention_variant", "sink"),
        attention_kernel=arguments.attention_kernel,
        head_balance_coeff=0.0 if name in CONFIGURATIONS[:2] else 1e-4,
        head_balance_scope=name if name in CONFIGURATIONS[2:] else "global",
        params_dtype=torch.bfloat16 if shape.get("bf16") else torch.float32,
        use_cpu_initialization=not cuda,
    )
    config.finalize()
    models = MegasinkModelBuilder(config).build_distributed_models(
        ProcessGroupCollection.use_mpu_process_groups(),
        ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True),
    )
    config.transformer.finalize_model_grads_func = upstream
    if name == WITHOUT:
        config.transformer.statistics.reduce = lambda: None
        for module in (m for model in models for m in model.modules()):
            if isinstance(module, CoreAttention):
                module.counts_heads = False
    return config, models


def user_seconds() -> float:
    """CPU time of this process outside of the kernel, where gloo's ranks wait for each other."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_utime


def stepper(name: str, shape: dict[str, Any], arguments: argparse.Namespace, cuda: bool) -> Step:
    """A function that trains one step and returns its seconds and this process's user seconds."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func

    config, models = build(name, shape, arguments, cuda)
    transformer = config.transformer
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=1e-4, bf16=transformer.bf16, params_dtype=transformer.params_dtype
        ),
        models,
    )
    transformer.grad_scale_func = optimizer.scale_loss
    device = torch.device("cuda" if cuda else "cpu")
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    size = (arguments.micro_batch, arguments.sequence + 1)
    tokens = torch.randint(VOCABULARY, size, generator=generator).to(device)
    positions = torch.arange(arguments.sequence, device=device)[None].expand(size[0], -1)

    def forward_step(_: Iterator[Any], model: Any) -> Any:
        losses = model(tokens[:, :-1], positions, None, labels=tokens[:, 1:])

        def loss_function(losses_BS: Any) -> Any:
            loss = losses_BS.float().sum()
            count = torch.tensor(losses_BS.numel(), dtype=torch.int, device=device)
            return loss, count, {}

        return losses, loss_function

    def step() -> tuple[float, float]:
        torch.distributed.barrier()
        if cuda:
            torch.cuda.synchronize()
        start, start_cpu = time.perf_counter(), user_seconds()
        for model in models:
            model.zero_grad_buffer()
        optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(())],
            model=models,
            num_microbatches=arguments.microbatches,
            seq_length=arguments.sequence,
            micro_batch_size=arguments.micro_batch,
            forward_only=False,
        )
        optimizer.step()
        if cuda:
            torch.cuda.synchronize()
        return time.perf_counter() - start, user_seconds() - start_cpu

    return step


def worker(rank: int, world: int, store: str, arguments: argparse.Namespace, cuda: bool) -> None:
    """One rank; the first prints the table."""
    if not cuda:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
        cpu.activate()
    from megatron.core import parallel_state
    from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megasink.upstream.apply_fixes import fix_upstream

    logging.getLogger("megatron").setLevel(logging.ERROR)
    fix_upstream()
    torch.distributed.init_process_group(
        "nccl" if cuda else "gloo", init_method=f"file://{store}", rank=rank, world_size=world
    )
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    batch = arguments.micro_batch * arguments.microbatches * world
    init_num_microbatches_calculator(rank, None, batch, arguments.micro_batch, world)
    shape = GPU if cuda else SHAPE
    steps = {name: stepper(name, shape, arguments, cuda) for name in CONFIGURATIONS}
    pairs = measure(steps, arguments.turns)
    if rank == 0:
        report(pairs, shape, world, arguments, cuda)
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


Pair = tuple[tuple[float, float], tuple[float, float]]


def measure(steps: dict[str, Step], turns: int) -> dict[str, list[Pair]]:
    """{configuration: (times without, times with) of each turn}."""
    pairs: dict[str, list[Pair]] = {name: [] for name in steps if name != WITHOUT}
    for turn in range(turns + 2):
        for name, found in pairs.items():
            # Which one of a pair goes first changes, so that a drift of the machine cancels.
            if turn % 2:
                with_it = steps[name]()
                pair = (steps[WITHOUT](), with_it)
            else:
                pair = (steps[WITHOUT](), steps[name]())
            if turn >= 2:  # the first turns warm up
                found.append(pair)
    return pairs


def report(
    pairs: dict[str, list[Pair]],
    shape: dict[str, Any],
    world: int,
    arguments: argparse.Namespace,
    cuda: bool,
) -> None:
    """Print the table."""
    machine = torch.cuda.get_device_name() if cuda else f"{world} gloo ranks of one thread"
    print(f"{shape}, S {arguments.sequence}, {arguments.microbatches} microbatches of ", end="")
    print(f"{arguments.micro_batch}, {machine}, kernel {arguments.attention_kernel}, ", end="")
    print(f"torch {torch.__version__}, {arguments.turns} turns", end="")
    if not cuda:
        print(f", load {os.getloadavg()[0]:.1f}", end="")
    print("\n\n| scope | ms per step, without | ratio (median, quartiles) | of user CPU time |")
    print("|---|---|---|---|")
    for name, found in pairs.items():
        ratios = [with_it[0] / floor[0] for floor, with_it in found]
        low, middle, high = statistics.quantiles(ratios, n=4)
        cpu = statistics.median(with_it[1] / floor[1] for floor, with_it in found)
        floor_ms = 1e3 * statistics.median(floor[0] for floor, _ in found)
        spread = f"{middle:.3f} ({low:.3f} to {high:.3f})"
        print(f"| {name} | {floor_ms:.1f} | {spread} | {'-' if cuda else f'{cpu:.3f}'} |")


def main() -> None:
    """Start the ranks."""
    cuda = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--sequence", type=int, default=2048 if cuda else 1024)
    parser.add_argument("--micro-batch", type=int, default=4 if cuda else 1)
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--attention-kernel", default="auto")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        store, world = f"{folder}/store", 1 if cuda else 2
        if cuda:
            worker(0, world, store, arguments, cuda)
        else:
            torch.multiprocessing.spawn(worker, (world, store, arguments, cuda), nprocs=world)


if __name__ == "__main__":
    main()
