"""Tasks for the workers: a tiny GPT through Megatron's own schedules, DDP and optimizers.

Shapes: B microbatch, S sequence, s the tokens of a context-parallel rank, L layers, H query heads.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
from megatron.core.fusions.fused_bias_geglu import quick_gelu
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config
from torch import Tensor

from megasink.balance.gate_sums import HeadSums
from megasink.balance.step import Phase
from megasink.megatron.block_stack import block_stack_spec
from megasink.megatron.config import MegasinkTransformerConfig
from megasink.megatron.core_attention import CoreAttention
from megasink.megatron.hybrid_pattern import blocks_of
from megasink.megatron.latent_config import LatentTransformerConfig
from megasink.megatron.model import MegasinkModelConfig
from megasink.megatron.model_of_arguments import pattern_of_blocks
from tests.distributed.gpt_model import GPTConfig
from tests.distributed.optimizer import optimizer_of
from tests.distributed.shards import gather_gradients, shards
from tests.distributed.skewed_gates import skew_gates, skew_sinks

SEQUENCE, VOCABULARY, MICROBATCH, MICROBATCHES = 32, 128, 2, 4
HEADS, HIDDEN = 4, 64
# Keys of 24 and values of 16, as 192 and 128.
LATENT = {
    "num_query_groups": None,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
    "rope_type": "rope",
    "qk_layernorm": True,
}


def model_config(
    *,
    tied: bool = False,
    fp16: bool = False,
    bf16: bool = False,
    position_embedding_type: str = "rope",
    pattern: str | None = None,
    gpt: bool = False,
    quick_geglu: bool = False,
    latent: bool = False,
    **options: Any,
) -> Any:
    """A tiny GPT in the layout that parallel_state holds.

    Args:
        tied: the output layer shares the embedding's weight.
        pattern: of its layers; None for that of two blocks in this layout.
        gpt: a GPTModel, not a HybridModel.
        quick_geglu: units of quick_gelu, as with the flag of that name.
        latent: latent attention, of the shapes in `LATENT`.
        options: of MegasinkTransformerConfig, in place of those here.
    """
    tp = parallel_state.get_tensor_model_parallel_world_size()
    pp = parallel_state.get_pipeline_model_parallel_world_size()
    vpp = parallel_state.get_virtual_pipeline_model_parallel_world_size()
    interleaved = vpp is not None
    dtype = torch.bfloat16 if bf16 else torch.float16 if fp16 else torch.float32
    kind = LatentTransformerConfig if latent else MegasinkTransformerConfig
    transformer = kind(
        **{
            "num_layers": 2 if pattern is None else len(blocks_of(pattern)),
            "hidden_size": HIDDEN,
            "num_attention_heads": HEADS,
            "num_query_groups": 2,
            "ffn_hidden_size": 96,
            "normalization": "RMSNorm",
            "gated_linear_unit": True,
            "activation_func": quick_gelu if quick_geglu else torch.nn.functional.silu,
            "add_bias_linear": False,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
            # Large, so that attention is far from uniform and queries and keys matter.
            "init_method_std": 0.2,
            "attention_variant": "sink",
            "head_balance_coeff": 1.0,
            "tensor_model_parallel_size": tp,
            "pipeline_model_parallel_size": pp,
            "context_parallel_size": parallel_state.get_context_parallel_world_size(),
            "virtual_pipeline_model_parallel_size": vpp,
            "expert_model_parallel_size": parallel_state.get_expert_model_parallel_world_size(),
            "expert_tensor_parallel_size": parallel_state.get_expert_tensor_parallel_world_size(),
            # Megatron's default for interleaved schedules, and the only choice for two stages:
            # in one batch of messages between two ranks activations and gradients are swapped.
            "overlap_p2p_comm": interleaved,
            "batch_p2p_comm": not interleaved,
            "pipeline_dtype": dtype,
            "params_dtype": dtype,
            "fp16": fp16,
            "bf16": bf16,
            "use_cpu_initialization": True,
            "transformer_impl": "local",
        }
        | (LATENT if latent else {})
        | options
    )
    same: dict[str, Any] = {
        "transformer": transformer,
        "vocab_size": VOCABULARY,
        "seq_length": SEQUENCE,
        "share_embeddings_and_output_weights": tied,
        "position_embedding_type": position_embedding_type,
    }
    if gpt:
        config: Any = GPTConfig(**same)
    else:
        pattern = pattern or pattern_of_blocks(transformer)
        same |= {"hybrid_stack_spec": block_stack_spec(transformer, pattern)}
        config = MegasinkModelConfig(hybrid_layer_pattern=pattern, **same)
    config.pre_wrap_hooks = [skew_sinks, skew_gates]
    config.finalize()
    return config


def build(config: MegasinkModelConfig, **ddp: Any) -> list[Any]:
    """The stages of this rank, wrapped as Megatron's training loop wraps them."""
    config.transformer.finalize_model_grads_func = finalize_model_grads
    with torch.random.fork_rng():
        return config.get_builder_cls()(config).build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(),
            ddp_config=DistributedDataParallelConfig(grad_reduce_in_fp32=True, **ddp),
        )


def batch(step: int, index: int, masked: bool = False) -> dict[str, Tensor]:
    """The microbatch ``index`` of the global batch of a step, the same in every layout.

    Args:
        masked: mask targets out of the loss, more in some microbatches and samples than in others.
    """
    generator = torch.Generator().manual_seed(1000 * step + index)
    text = torch.randint(VOCABULARY, (MICROBATCH, SEQUENCE + 1), generator=generator)
    mask = torch.ones(MICROBATCH, SEQUENCE)
    if masked:
        for sample, row in enumerate(mask):  # the answer begins here
            row[: 4 + 11 * sample + 5 * (index % 3)] = 0.0
    return {
        "tokens": text[:, :-1].contiguous(),
        "labels": text[:, 1:].contiguous(),
        "position_ids": torch.arange(SEQUENCE).expand(MICROBATCH, -1),
        "loss_mask": mask,
    }


def microbatches(step: int, masked: bool = False) -> Iterator[dict[str, Tensor]]:
    """Those of this data-parallel rank."""
    dp = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    for index in range(rank, MICROBATCHES, dp):
        yield batch(step, index, masked)


def forward_step(iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, Any]:
    """One microbatch through one stage; the loss as megasink.training.forward_step gives it."""
    data = next(iterator)
    targets = data["loss_mask"].sum()
    balance = get_model_config(model).statistics
    balance.set_targets(targets)
    data = get_batch_on_this_cp_rank(
        data, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group()
    )
    output = model(data["tokens"], data["position_ids"], None, labels=data["labels"])
    per_token = get_model_config(model).calculate_per_token_loss
    return balance.keep(output), loss_function(data["loss_mask"], targets, per_token)


def loss_function(mask_Bs: Tensor, targets: Tensor, per_token: bool) -> Callable[..., Any]:
    """The loss of a microbatch as megasink.training.forward_step gives it.

    Args:
        targets: of the microbatch, on all context-parallel ranks.
    """
    cp = parallel_state.get_context_parallel_world_size()

    def of_losses(losses_Bs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = (losses_Bs.float() * mask_Bs).sum()
        reported = torch.stack([loss.detach(), mask_Bs.sum()])
        if per_token:
            return loss, mask_Bs.sum().to(torch.int), reported
        return cp * loss, targets.to(torch.int), reported

    return of_losses


def train(
    steps: int = 3,
    distributed_optimizer: bool = False,
    overlap: bool = False,
    grad_scale: float | None = None,
    optimizer_options: dict[str, Any] | None = None,
    masked: bool = False,
    prepare: Callable[[Any], None] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Train, and report everything that must not depend on the layout.

    Args:
        overlap: overlap gradient reduction (and parameter gathering) with computation.
        grad_scale: a constant factor on the loss, as fp16 training has one.
        masked, options: of :func:`batch`, of :func:`model_config`, which `prepare` gets.

    Returns:
        per step: loss (None on ranks without it), statistics, gradient norm; the gradients of the
        second step; the initial and final weights; how often core attention ran. Tensors as
        :func:`shards` gives them.
    """
    config = model_config(**options)
    MTPLossLoggingHelper.tracker = {}  # as long as the first model of the process predicts
    if prepare is not None:
        prepare(config)
    transformer = config.transformer
    ddp = {"use_distributed_optimizer": distributed_optimizer, "overlap_grad_reduce": overlap}
    ddp["overlap_param_gather"] = overlap and distributed_optimizer
    models = build(config, **ddp)
    overlapped = {"overlap_param_gather": ddp["overlap_param_gather"], **(optimizer_options or {})}
    optimizer, scheduler = optimizer_of(config, models, distributed_optimizer, **overlapped)
    dp = parallel_state.get_data_parallel_world_size()
    init_num_microbatches_calculator(0, None, MICROBATCH * MICROBATCHES, MICROBATCH, dp)
    transformer.grad_scale_func = optimizer.scale_loss
    if grad_scale is not None:
        transformer.grad_scale_func = lambda loss: loss * grad_scale
    if overlap:
        hooks = [model.no_sync for model in models]
        transformer.no_sync_func = hooks[0] if len(models) == 1 else hooks
    report: dict[str, Any] = {"loss": [], "statistics": [], "grad_norm": []}
    report["forward_calls"] = count_forward_calls(models)
    report["initial"] = shards(models, "data")
    for step in range(steps):
        losses = run_step(models, optimizer, step, masked)
        report["loss"].append(losses)
        found = vars(statistics(transformer))
        report["statistics"].append({k: v for k, v in found.items() if k != "series"})
        # Not the first: the global scope has no balance gradient there. Not a later one: weights
        # that differ by rounding would be compared too.
        if step == min(1, steps - 1):
            if distributed_optimizer:
                gather_gradients(models)
            report["gradients"] = shards(models, "main_grad")
        succeeded, norm, _ = optimizer.step()
        assert succeeded
        report["grad_norm"].append(norm)
        scheduler.step(MICROBATCH * MICROBATCHES)
    if ddp["overlap_param_gather"]:
        for model in models:
            model.disable_forward_pre_hook(param_sync=True)
    report["final"] = shards(models, "data")
    return report


def run_step(
    models: list[Any], optimizer: Any, step: int, masked: bool = False
) -> tuple[float, float] | None:
    """Forward and backward of a global batch.

    Returns:
        on the last stage the sum of the losses of this rank's targets, and their number.
    """
    for model in models:
        model.train()
        model.zero_grad_buffer()
    optimizer.zero_grad()
    count = MICROBATCHES // parallel_state.get_data_parallel_world_size()
    losses = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[microbatches(step, masked) for _ in models],
        model=models,
        num_microbatches=count,
        seq_length=SEQUENCE,
        micro_batch_size=MICROBATCH,
        forward_only=False,
    )
    if not losses:
        return None
    total, targets = sum(losses).tolist()
    return total, targets


def statistics(transformer: MegasinkTransformerConfig) -> Any:
    """Those of the step, which the step of an optimizer has committed."""
    balance = transformer.statistics
    return balance.last if balance.phase is Phase.BETWEEN else balance.commit()


def recorded(transformer: MegasinkTransformerConfig) -> Tensor | None:
    """The sums of each layer since the last call: as `HeadSums` keeps them in a step."""
    statistics = transformer.statistics
    table = statistics.heads._take_table()
    statistics.heads = HeadSums(transformer.num_layers, transformer.num_attention_heads)
    return table


def count_forward_calls(models: list[Any]) -> list[int]:
    """A list of one number that counts how often core attention runs: recompute doubles it."""
    calls = [0]

    def count(*_: Any) -> None:
        calls[0] += 1

    for module in (m for model in models for m in model.modules()):
        if isinstance(module, CoreAttention):
            module.register_forward_hook(count)
    return calls
