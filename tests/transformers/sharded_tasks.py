"""Steps of a wrapped model on gloo ranks, for the workers of the pool, and on one process."""

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import megasink.transformers  # noqa: F401  registers the attention
from megasink.transformers.balance_loss import HeadBalanceLoss
from tests.analysis.capture.tiny_models import tiny_model
from tests.transformers.balance_oracle import take_gradients, tokens, without_grouped_experts

COEFF, MICROBATCHES = 0.5, 4
# Padded tokens of the first row of each microbatch of two steps; the ranks take turns.
PADDED = ((0, 4, 0, 0), (0, 5, 0, 2))


def batch(seed: int, padded: int) -> dict[str, Tensor]:
    """Two rows of 12 tokens, the first with padding on the left."""
    ids = tokens(seed)
    mask = torch.ones_like(ids)
    mask[0, :padded] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def results(
    wrapper: str, scope: str, rank: int, ranks: int, checkpointing: str = "", late: bool = False
) -> tuple[dict[str, Tensor], Tensor]:
    """Return the gradients of the second step, and its importance."""
    model: Any = without_grouped_experts(tiny_model("gpt-oss", "megasink")).double().train()
    if checkpointing:
        reentrant = {"use_reentrant": checkpointing == "reentrant"}
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=reentrant)
    balance = None if late else HeadBalanceLoss(model, COEFF, scope=scope)
    wrapped = wrap(model, wrapper, ranks)
    balance = balance or HeadBalanceLoss(model, COEFF, scope=scope)
    own = range(rank, MICROBATCHES, ranks)
    for step, padded in enumerate(PADDED):
        for index in own:
            with accumulating(wrapped, wrapper) if index != own[-1] else contextlib.nullcontext():
                if wrapper == "fsdp2":
                    wrapped.set_requires_gradient_sync(index == own[-1])
                loss = wrapped(**batch(10 * step + index, padded[index])).loss
                (loss / len(own)).backward()
        if step == 0:
            wrapped.zero_grad()
            balance.finish_step()
    return gradients(wrapped, model, wrapper), balance.finish_step().importance_LH


def wrap(model: Any, wrapper: str, ranks: int) -> Any:
    """Wrap the model, and with FSDP each of its layers."""
    layer = type(model.model.layers[0])
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    if wrapper == "fsdp1":
        policy, device = ModuleWrapPolicy({layer}), torch.device("cpu")
        return FullyShardedDataParallel(
            model, auto_wrap_policy=policy, device_id=device, use_orig_params=True
        )
    if wrapper == "fsdp2":
        mesh = init_device_mesh("cpu", (ranks,))
        for each in (*model.model.layers, model):
            fully_shard(each, mesh=mesh)
    return model


def accumulating(wrapped: Any, wrapper: str) -> Any:
    """Return the context of a microbatch that is not the last of its step."""
    return wrapped.no_sync() if wrapper in ("ddp", "fsdp1") else contextlib.nullcontext()


def gradients(wrapped: Any, model: Any, wrapper: str) -> dict[str, Tensor]:
    """Return the whole gradients by the names of the model."""
    if wrapper == "fsdp1":
        with FullyShardedDataParallel.summon_full_params(wrapped, with_grads=True):
            found = take_gradients(wrapped)
        return {name.replace("_fsdp_wrapped_module.", ""): grad for name, grad in found.items()}
    found = take_gradients(model)
    return {n: grad.full_tensor() if wrapper == "fsdp2" else grad for n, grad in found.items()}


def on_ranks(cases: list[dict[str, Any]]) -> list[Any]:
    """Return the results of each case on this rank."""
    rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return [results(rank=rank, ranks=ranks, **case) for case in cases]
