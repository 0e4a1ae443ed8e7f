"""Sink attention and the head-balance loss in a bare Megatron-Core loop; mock data, a CPU will do.

    python examples/megatron_loop.py
    torchrun --nproc-per-node 2 examples/megatron_loop.py --tp 2      (or --pp 2, --cp 2, or none)

Nothing of ``megatron.training`` and of megasink's trainer. The lines (1), (2) and (3) are what
megasink adds; the rest is any loop over Megatron's schedules. docs/megatron.md has the formula.
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
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from megatron.core.utils import get_batch_on_this_cp_rank

from megasink.megatron import HeadBalance, layer_spec  # (1)
from megasink.megatron.init import initialize_weights

VOCABULARY, SEQUENCE, MICROBATCH, MICROBATCHES, SEED = 64, 64, 4, 4, 1234
Batch = dict[str, torch.Tensor]


def mock_step(step: int) -> Iterator[Batch]:
    """Microbatches of a step for this data-parallel rank: each token is the last plus a number."""
    ranks, positions = mpu.get_data_parallel_world_size(), torch.arange(SEQUENCE + 1)
    for index in range(mpu.get_data_parallel_rank(), MICROBATCHES, ranks):
        generator = torch.Generator().manual_seed(1000 * step + index)
        first, pace = torch.randint(1, VOCABULARY, (2, MICROBATCH, 1), generator=generator)
        text = (first + pace % 8 * positions) % VOCABULARY
        where = positions[:-1].expand(MICROBATCH, -1)
        yield {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": where}


def forward_step(batches: Iterator[Batch], model: Any) -> Any:
    """Run one microbatch through this stage, for Megatron's schedules."""
    group = mpu.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(next(batches), is_hybrid_cp=False, cp_group=group)
    batch = {name: tensor.cuda() for name, tensor in batch.items()}

    def loss_function(losses: torch.Tensor) -> Any:
        loss, count = losses.float().sum(), torch.full((), losses.numel()).to(losses.device)
        return group.size() * loss, group.size() * count, torch.stack([loss.detach(), count])

    return model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"]
    ), loss_function


def train(steps: Iterable[Iterator[Batch]], tp: int, pp: int, cp: int, **options: Any) -> list[Any]:
    """Train, data-parallel on further ranks; return each step's loss, gradient norm, statistics."""
    mpu.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    model_parallel_cuda_manual_seed(SEED)
    layout = {"tensor_model_parallel_size": tp, "pipeline_model_parallel_size": pp}
    layout |= {"context_parallel_size": cp, "pipeline_dtype": torch.float32}
    shape = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128}
    block = {"normalization": "RMSNorm", "gated_linear_unit": True, "add_bias_linear": False}
    block |= {"activation_func": torch.nn.functional.silu, "transformer_impl": "local"}
    others = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "use_cpu_initialization": True}
    config = TransformerConfig(**layout, **shape, **block, **others)
    balance = HeadBalance(config, **options)  # (2)
    ends = {"pre_process": mpu.is_pipeline_first_stage()}
    ends |= {"post_process": mpu.is_pipeline_last_stage(), "position_embedding_type": "rope"}
    model = GPTModel(config, layer_spec(config), VOCABULARY, SEQUENCE, **ends)  # (3)
    initialize_weights(model, SEED)  # the same in every layout, which Megatron's are not
    settings = distributed.DistributedDataParallelConfig()
    model = distributed.DistributedDataParallel(config, settings, model.cuda())
    config.finalize_model_grads_func = distributed.finalize_model_grads
    settings = OptimizerConfig(lr=3e-3, weight_decay=0.0, adam_eps=1e-5)
    optimizer = get_megatron_optimizer(settings, [model])
    config.grad_scale_func = optimizer.scale_loss
    history = []
    for step, batches in enumerate(steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=model,
            num_microbatches=MICROBATCHES // mpu.get_data_parallel_world_size(),
            seq_length=SEQUENCE,
            micro_batch_size=MICROBATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        total = sum(losses) if losses else torch.zeros(2).cuda()  # the last stage has losses
        torch.distributed.all_reduce(total)
        history.append((float(total[0] / total[1]), norm, balance.last))
        if torch.distributed.get_rank() == 0:
            words = f"loss {history[-1][0]:.4f} | head imbalance {balance.last.imbalance:.4f}"
            print(f"step {step:2d} | {words}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    os.environ |= alone | os.environ
    torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    torch.distributed.init_process_group("nccl" if gpu else "gloo")
    options = {"attention_variant": "sink", "head_balance_coeff": 1e-2}
    train(map(mock_step, range(40)), **vars(parser.parse_args()), **options)
    torch.distributed.destroy_process_group()
