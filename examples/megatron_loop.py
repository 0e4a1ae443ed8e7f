"""Sink attention and the head-balance loss in a bare Megatron-Core loop; mock data, a CPU will do.

    python examples/megatron_loop.py
    torchrun --nproc-per-node 2 examples/megatron_loop.py --tp 2      (or --pp 2, --cp 2, or none)

Nothing of ``megatron.training`` and of megasink's trainer. Lines with (1), (2), (3) are what
megasink adds; the rest is any loop over Megatron's schedules. docs/megatron.md has the formula.
"""

import argparse
import os
from collections.abc import Iterable, Iterator
from typing import Any

import torch

VOCABULARY, SEQUENCE, MICROBATCH, MICROBATCHES, SEED = 64, 64, 4, 4, 1234
Batch = dict[str, torch.Tensor]


def mock_batch(step: int, index: int) -> Batch:
    """A microbatch of counting sequences: each token is the one before plus a constant."""
    generator = torch.Generator().manual_seed(1000 * step + index)
    first, pace = torch.randint(1, VOCABULARY, (2, MICROBATCH, 1), generator=generator)
    text = (first + pace % 8 * torch.arange(SEQUENCE + 1)) % VOCABULARY
    positions = torch.arange(SEQUENCE).expand(MICROBATCH, -1)
    return {"tokens": text[:, :-1], "labels": text[:, 1:], "position_ids": positions}


def mock_step(step: int) -> Iterator[Batch]:
    """The microbatches of a step for this data-parallel rank."""
    from megatron.core import parallel_state as mpu

    ranks = mpu.get_data_parallel_world_size()
    return (mock_batch(step, i) for i in range(mpu.get_data_parallel_rank(), MICROBATCHES, ranks))


def forward_step(batches: Iterator[Batch], model: Any) -> Any:
    """One microbatch through this stage, for Megatron's schedules."""
    from megatron.core import parallel_state as mpu
    from megatron.core.utils import get_batch_on_this_cp_rank

    group = mpu.get_context_parallel_group()
    batch = get_batch_on_this_cp_rank(dict(next(batches)), is_hybrid_cp=False, cp_group=group)

    def loss_function(losses: torch.Tensor) -> Any:
        total, count = losses.float().sum(), losses.numel() * group.size()
        reported = torch.stack([total.detach(), torch.tensor(float(losses.numel())).to(total)])
        return total * group.size(), torch.tensor(count, dtype=torch.int).to(total.device), reported

    return model(
        batch["tokens"], batch["position_ids"], None, labels=batch["labels"]
    ), loss_function


def train(steps: Iterable[Iterator[Batch]], tp: int, pp: int, cp: int, **options: Any) -> list[Any]:
    """Train on the microbatches of every step.

    Args:
        tp, pp, cp: The layout; data parallelism takes the rest of the ranks.
        options: Of megasink.

    Returns:
        Loss, gradient norm and HeadStatistics of every step.
    """
    from megatron.core import parallel_state as mpu
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
    from megatron.core.transformer import TransformerConfig

    from megasink.layers.init import initialize_weights
    from megasink.megatron import HeadBalance, layer_spec  # (1)

    mpu.initialize_model_parallel(tp, pp, context_parallel_size=cp)
    model_parallel_cuda_manual_seed(SEED)
    config = TransformerConfig(
        **{"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 128},
        **{"hidden_dropout": 0.0, "attention_dropout": 0.0, "add_bias_linear": False},
        **{"normalization": "RMSNorm", "gated_linear_unit": True},
        activation_func=torch.nn.functional.silu,
        transformer_impl="local",
        tensor_model_parallel_size=tp,
        pipeline_model_parallel_size=pp,
        context_parallel_size=cp,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    balance = HeadBalance(config, **options)  # (2)
    model = GPTModel(
        config,
        layer_spec(config),  # (3)
        VOCABULARY,
        SEQUENCE,
        pre_process=mpu.is_pipeline_first_stage(),
        post_process=mpu.is_pipeline_last_stage(),
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    initialize_weights(model, SEED)  # the same model in every layout, which Megatron's is not
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model.cuda())
    optimizer = get_megatron_optimizer(OptimizerConfig(lr=3e-3), [wrapped])
    config.grad_scale_func = optimizer.scale_loss
    history = []
    for step, batches in enumerate(steps):
        wrapped.zero_grad_buffer()
        optimizer.zero_grad()
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=batches,
            model=wrapped,
            num_microbatches=MICROBATCHES // mpu.get_data_parallel_world_size(),
            seq_length=SEQUENCE,
            micro_batch_size=MICROBATCH,
            forward_only=False,
        )
        _, norm, _ = optimizer.step()
        total = sum(losses) if losses else torch.zeros(2, device=torch.cuda.current_device())
        torch.distributed.all_reduce(total)
        loss, last = float(total[0] / total[1]), balance.last
        history.append((loss, norm, last))
        if torch.distributed.get_rank() == 0:
            print(f"step {step:3d} | loss {loss:.4f} | head imbalance {last.imbalance:.4f}")
    return history


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("tp", "pp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    layout = vars(parser.parse_args())
    alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29511"}
    os.environ |= alone | os.environ
    if gpu := torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    else:
        from megasink import platform

        platform.activate()  # Megatron on a CPU
    torch.distributed.init_process_group("nccl" if gpu else "gloo")
    options = {"attention_variant": "sink", "head_balance_coeff": 1e-2}
    train((mock_step(step) for step in range(40)), **layout, **options)
    torch.distributed.destroy_process_group()
