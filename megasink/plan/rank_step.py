"""One rank of the job: the cost of three steps of the trainer on the hollow GPU.

Runs in a process of its own, which it ends. The first step allocates persistent memory. The second
has just enough microbatches to fill the pipeline, and the third twice as many: their difference is
the growth per microbatch, so even a step of thousands needs no more.
"""

import contextlib
import os
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import megatron.core.tokenizers.text.libraries
import megatron.training.ft_integration  # noqa: F401  (for the forks)
import torch
from megatron.core import parallel_state
from megatron.core.num_microbatches_calculator import reconfigure_num_microbatches_calculator
from megatron.core.pipeline_parallel import schedules
from megatron.core.rerun_state_machine import RerunDataIterator
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.training import training
from megatron.training.training import num_floating_point_operations
from torch import Tensor
from triton.runtime.cache import triton_key

from megasink.attention.variants.variant_layers import layers_with_variant
from megasink.cpu.all_patches import TABLE
from megasink.megatron.argument_parser import parse_apart
from megasink.megatron.embedding_rows import counted_rows
from megasink.megatron.hybrid_pattern import PREDICTION, STAGE, block_of_layer, count_blocks
from megasink.plan import package_stand_ins, rank_memory
from megasink.plan.collectives import Collectives, group_names
from megasink.plan.hollow.lone_rank import be_rank
from megasink.training import loop, parse_arguments
from megasink.training.checks.kernels import kernel_choices
from megasink.upstream import fused_kernels

_NEVER = 1 << 40
Write = Callable[[dict[str, Any]], None]

Chunks = dict[tuple[int, int], tuple[str, list[int]]]


def step_as(rank: int, ranks: int | None, flags: Sequence[str], write: Write) -> None:
    """Build and step the trainer as a rank; pass its record to `write`, and end the process."""
    args = parse_arguments.read(flags)
    args.rank, args.world_size = rank, ranks or parse_arguments.replica_ranks(args)
    be_rank(rank, args.world_size)
    notes = [*args.flag_notes, *package_stand_ins.notes(args.hybrid_layer_pattern)]
    identity = parse_arguments.validate(args)
    # Nothing is read, and nothing written.
    args.save = args.load = args.tensorboard_dir = args.wandb_project = None
    args.eval_iters, args.num_workers, args.async_save = 0, 0, False
    args.check_weight_hash_across_dp_replicas_interval = None  # other ranks have no weights
    args.log_interval = _NEVER  # an ordinary step: logged steps send more
    share_tokens_equally()
    with _stepping(args, lambda record: write(record | {"notes": notes})):
        loop.run(args, identity)


def warm_up() -> None:
    """Do once what would take most of the time of each fork, and start CUDA."""
    parse_apart([])
    for patch in TABLE:
        patch.where()
    triton_key()
    # torch refuses to start in a fork, which would lose a driver. This one has nothing to lose.
    torch.cuda._queued_calls.clear()  # they query the device, which forks may choose
    torch.cuda.init()
    torch.cuda._is_in_bad_fork = lambda: False


@contextlib.contextmanager
def _stepping(args: Namespace, write: Write) -> Iterator[None]:
    inner, steps = training.train_step, list[dict[str, Any]]()
    every = int(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size))
    few = min(every, args.pipeline_model_parallel_size)  # fill it: no more are in flight at once
    plan = (few, few, min(2 * few, every))
    asked = args.train_iters or args.train_samples // args.global_batch_size
    args.train_iters, args.train_samples = max(asked, len(plan) + 1), None

    # From the beginning of a step to that of the next, including the loop's work in between.
    recording = contextlib.ExitStack()

    def train_step(*arguments: Any, **options: Any) -> Any:
        recording.close()
        if len(steps) == len(plan):
            models, optimizer, args.train_iters = arguments[2], arguments[3], asked
            write(_record(args, models, optimizer, steps[1:], every))
            os._exit(0)
        microbatches = plan[len(steps)]
        steps.append({"microbatches": microbatches})
        recording.enter_context(_recorded(steps[-1], schedules))
        _set_microbatches(args, microbatches)
        result = inner(*arguments, **options)
        _set_microbatches(args, every)  # the training loop refuses fewer
        return result

    def iterators(*_: Any) -> Any:  # for training, validation, test
        args.do_train, args.do_valid, args.do_test = True, False, False
        return RerunDataIterator(batches(args)), None, None

    training.train_step = train_step
    training.build_train_valid_test_data_iterators = iterators
    yield


def _set_microbatches(args: Namespace, number: int) -> None:
    reconfigure_num_microbatches_calculator(
        args.rank,
        None,
        number * args.micro_batch_size * args.data_parallel_size,
        args.micro_batch_size,
        args.data_parallel_size,
    )


@contextlib.contextmanager
def _recorded(record: dict[str, Any], schedules: Any) -> Iterator[None]:
    """Record the memory and the calls of a step in `record`."""
    originals = (schedules.forward_step, schedules.backward_step)
    passes = list[tuple[bool, int, int]]()

    def watched(inner: Any, forward: bool) -> Any:
        def run(*arguments: Any, **options: Any) -> Any:
            before = rank_memory.allocated()
            result = inner(*arguments, **options)
            passes.append((forward, before, rank_memory.allocated()))
            return result

        return run

    torch.cuda.reset_peak_memory_stats()
    record["before"] = rank_memory.allocated()
    schedules.forward_step, schedules.backward_step = (
        watched(inner, forward) for inner, forward in zip(originals, (True, False), strict=True)
    )
    with Collectives() as calls:
        yield
    schedules.forward_step, schedules.backward_step = originals
    # The allocator's memory on the device has gaps besides the tensors.
    reserved = int(torch.cuda.memory_stats()["reserved_bytes.all.peak"])
    record |= {"peak": rank_memory.allocated("peak"), "reserved": reserved}
    record |= rank_memory.held(passes) | {"calls": calls.table()}


def _record(
    args: Namespace, models: Sequence[Any], optimizer: Any, steps: list[dict[str, Any]], every: int
) -> dict[str, Any]:
    """Return everything that the plan needs from this rank, for JSON."""
    padding = args.padded_vocab_size - counted_rows(vars(args))
    here, stage = rank_memory.count(models, padding)
    softmax = args.attention_similarity == "softmax"
    choices = kernel_choices(args) if softmax else {}
    return {
        "rank": args.rank,
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "parameters_here": here,
        "parameters_of_stage": stage,
        "training_state": rank_memory.of_training_state(models, optimizer),
        "layers": list(rank_memory.describe(models)),
        "steps": steps,
        "groups": sorted(set(group_names().values())),
        "job": {
            "ranks": args.world_size,
            "tensor": args.tensor_model_parallel_size,
            "pipeline": args.pipeline_model_parallel_size,
            "virtual": args.virtual_pipeline_model_parallel_size or 1,
            "context": args.context_parallel_size,
            "data": args.data_parallel_size,
            "expert": args.expert_model_parallel_size,
            "of_stage": args.world_size // args.pipeline_model_parallel_size,
            "pipeline_before_data": bool(args.use_tp_pp_dp_mapping),
            "micro_batch_size": args.micro_batch_size,
            "global_batch_size": args.global_batch_size,
            "microbatches": every,
            "seq_length": args.seq_length,
            "train_iters": args.train_iters,
            "flops": num_floating_point_operations(args, args.global_batch_size),
            "packed": bool(args.dataloader_inter_document_masking),
            "attention_kernel": choices[args.attention_variant].name if softmax else "",
            "layers": count_blocks(vars(args)),
            "heads": args.num_attention_heads,
            "balance_scope": args.head_balance_scope,
            "balance_coeff": args.head_balance_coeff,
            "kernels": {title: str(choice) for title, choice in choices.items()},
            "fused": fused_kernels.describe(),
            "gathers": bool(args.use_distributed_optimizer),
            **stages(args),
        },
    }


def stages(args: Namespace) -> dict[str, list[list[Any]]]:
    """Return "stages", where equal entries have the same modules, and "blocks", from 1."""
    count, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    chunks, varied = _chunks(args.hybrid_layer_pattern, count), layers_with_variant(args)
    of_stages = [[chunks[stage, n] for n in range(virtual or 1)] for stage in range(count)]
    return {
        "stages": [
            [
                [[symbols, [varied[n - 1] for n in blocks]] for symbols, blocks in of_stage],
                stage == 0,
                stage == count - 1,
            ]
            for stage, of_stage in enumerate(of_stages)
        ],
        "blocks": [[n for _, blocks in of_stage for n in blocks] for of_stage in of_stages],
    }


def _chunks(pattern: str, stages: int) -> Chunks:
    """Return {(stage, virtual stage): (its layers, its blocks)}."""
    block_of = block_of_layer(pattern)
    chunks: Chunks = {}
    first = 0
    for index, symbols in enumerate(pattern.partition(PREDICTION)[0].split(STAGE)):
        blocks = {block_of[layer] + 1 for layer in range(first, first + len(symbols))}
        chunks[index % stages, index // stages] = (symbols, sorted(blocks))
        first += len(symbols)
    return chunks


_DOCUMENTS = 4
"""Documents per sample with --dataloader-inter-document-masking."""


def batches(args: Namespace) -> Iterator[dict[str, Tensor]]:
    """Yield the same microbatch without end, with the keys, shapes and dtypes of GPTDataset."""
    shape_BS = (args.micro_batch_size, args.seq_length)
    batch: dict[str, Tensor] = {
        "tokens": torch.zeros(shape_BS, dtype=torch.int64),
        "labels": torch.zeros(shape_BS, dtype=torch.int64),
        "loss_mask": torch.ones(shape_BS),
        "position_ids": torch.arange(args.seq_length).expand(shape_BS).contiguous(),
    }
    if args.dataloader_inter_document_masking:
        samples, length = shape_BS
        ends = torch.full((samples, length + 1), length, dtype=torch.int32)
        documents = min(_DOCUMENTS, length)
        ends[:, : documents + 1] = torch.linspace(0, length, documents + 1).to(torch.int32)
        batch["cu_seqlens"] = ends
        batch["max_seqlen"] = ends.diff(dim=1).max(dim=1).values
    batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
    while True:
        yield dict(batch)


def share_tokens_equally() -> None:
    """Let the router send equally many tokens to each expert: a hollow GPU computes no counts."""
    inner = MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize

    def copied(self: Any, point: str, tokens_per_expert: Any = None) -> Any:
        tokens_per_expert = inner(self, point, tokens_per_expert)
        if self.drop_and_pad or point != self.cuda_dtoh_point:
            return tokens_per_expert  # with padding the host knows the sizes
        self.num_out_tokens = self.routing_map.shape[0] * self.config.moe_router_topk
        of_expert = self.num_out_tokens // self.num_experts  # from each rank
        ranks, local = self.ep_size * self.tp_size, self.num_local_experts
        if ranks > 1:
            self.input_splits[:] = self.output_splits[:] = of_expert * local
            self.output_splits_tp[:] = of_expert * local * self.ep_size
        if local > 1:
            self.num_global_tokens_per_local_expert[:] = of_expert
        tokens_per_expert[:] = of_expert * ranks
        return tokens_per_expert

    MoEAlltoAllTokenDispatcher._maybe_dtoh_and_synchronize = copied
