"""Sink attention and the head-balance loss in a bare Megatron-Core loop; mock data, a CPU will do.

    python examples/megatron_loop.py
    torchrun --nproc-per-node 2 examples/megatron_loop.py --tp 2      (or --pp 2, --cp 2, or none)

Megasink adds the lines (1), (2) and (3) to a loop over Megatron's schedules: docs/megatron.md.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

if not (gpu := torch.cuda.is_available()):
    from megasink import cpu

    cpu.activate()  # Megatron on a CPU: before its first import

from megatron.core import distributed
from megatron.core import parallel_state as mpu
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from megasink.megatron import HeadBalance, stack_spec  # (1)
from megasink.megatron.initial_weights import initialize_weights

VOCABULARY, SEQUENCE, MICROBATCH, MICROBATCHES, SEED = 64, 64, 4, 4, 1234


def mock_step(step: int) -> Iterator[dict[str, torch.Tensor]]:
    """Microbatches of a step for this data-parallel rank: each token is the last plus a number."""
    ranks, positions = mpu.get_data_parallel_world_size(), torch.arange(SEQUENCE + 1)
    for index in range(mpu.get_data_parallel_rank(), MICROBATCHES, ranks):
        generator = torch.Generator().manual_seed(1000 * step + index)
        first, pace = torch.randint(1, VOCABULARY, (2, MICROBATCH, 1), generator=generator)
        text = (first + pace % 8 * positions) % VOCABULARY
        where = positions[:-1].expand(MICROBATCH, -1)
        yield {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": where}


def forward_step(batches: Iterator[Any], model: Any) -> Any:
    """Run one microbatch through this stage, for Megatron's schedules."""
    group = mpu.get_context_parallel_group()
    batch = {name: tensor.cuda() for name, tensor in next(batches).items()}
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)

    def loss_function(losses: torch.Tensor) -> Any:
        loss, count = losses.float().sum(), torch.full((), losses.numel()).to(losses.device)
        return group.size() * loss, group.size() * count, torch.stack([loss.detach(), count])

    text = batch["tokens"], batch["position_ids"], None
    return model(*text, labels=batch["labels"]), loss_function


def train(steps: Iterable[Iterator[Any]], tp: int, pp: int, cp: int, **options: Any) -> list[Any]:
    """Train, data-parallel on further ranks; return each step's loss, gradient norm, statistics."""
    mpu.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    model_parallel_cuda_manual_seed(SEED)
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    layout |= {"context_parallel_size": cp, "pipeline_dtype": torch.float32}
    shape = {"num_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    block = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    block |= {"activation_func": torch.nn.functional.silu, "transformer_impl": "local"}
    others = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(**layout, **shape, **block, **others, is_hybrid_model=True)
    balance = HeadBalance(config, **options).install()  # (2)
    first, last = mpu.is_pipeline_first_stage(), mpu.is_pipeline_last_stage()
    ends = {"pre_process": first, "post_process": last, "position_embedding_type": "rope"}
    model = HybridModel(config, stack_spec(config), VOCABULARY, SEQUENCE, "*-*-", **ends)  # (3)
    initialize_weights(model, SEED)  # the same in every layout, which Megatron's are not
    ddp = distributed.DistributedDataParallelConfig()
    model = distributed.DistributedDataParallel(config, ddp, model.cuda())
    config.finalize_model_grads_func = distributed.finalize_model_grads
    adam = OptimizerConfig(lr=3e-3, weight_decay=0.0, adam_eps=1e-5)
    optimizer = get_megatron_optimizer(adam, [model])
    config.grad_scale_func = optimizer.scale_loss
    count, history = MICROBATCHES // mpu.get_data_parallel_world_size(), []
    for step, batches in enumerate(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        call = {"forward_step_func": forward_step, "data_iterator": batches, "model": model}
        call |= {"num_microbatches": count, "seq_length": SEQUENCE, "forward_only": False}
        losses = get_forward_backward_func()(**call, micro_batch_size=MICROBATCH)
        _, norm, _ = optimizer.step()
        total = sum(losses) if losses else torch.zeros(2).cuda()  # the last stage has losses
        torch.distributed.all_reduce(total)
        loss, found = float(total[0] / total[1]), balance.last
        history.append((loss, norm, found))
        if torch.distributed.get_rank() == 0:
            print(f"step {step:2d} | loss {loss:.4f} | head imbalance {found.imbalance:.4f}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    os.environ |= alone | os.environ
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.distributed.init_process_group("nccl" if gpu else "gloo")
    loss = {"attention_variant": "sink", "head_balance_coeff": 1e-2}
    train(map(mock_step, range(40)), **vars(parser.parse_args()), **loss)
    torch.distributed.destroy_process_group()
