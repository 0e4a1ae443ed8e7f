"""The places of megatron.core that ask for CUDA in a way that ``torch.cuda`` cannot answer."""

import functools
import logging
from typing import Any

import torch

from megasink.platform.adam import GroupStepAdam
from megasink.platform.patching import replace, undo_by


def _get_state(
    device: Any = "cuda", clone: bool = False, graph_safe: bool = False
) -> torch.Tensor | torch.Generator:
    if graph_safe:  # upstream's is a generator that shares the state; whoever forks puts it back
        return torch.default_generator.clone_state()
    return torch.default_generator.get_state()


def _set_state(
    new_state: torch.Tensor | torch.Generator, device: Any = -1, graph_safe: bool = False
) -> None:
    if isinstance(new_state, torch.Generator):
        new_state = new_state.get_state()
    torch.default_generator.set_state(new_state)


class _DropForkWarning(logging.Filter):
    """random.py:333 warns whenever the CPU generator moves inside fork(): here it must."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


def _install_rng() -> None:
    from megatron.core.tensor_parallel import random

    why = "the CUDA generator of the tracker is the CPU's default generator"
    replace(random, "_get_cuda_rng_state", _get_state, upstream="random.py:104", reason=why)
    replace(random, "_set_cuda_rng_state", _set_state, upstream="random.py:136", reason=why)
    logger, drop = logging.getLogger(random.__name__), _DropForkWarning()
    logger.addFilter(drop)
    undo_by(lambda: logger.removeFilter(drop))


def _install_data() -> None:
    import torch.utils.data

    loader = torch.utils.data.DataLoader

    @functools.wraps(loader, updated=())
    class UnpinnedLoader(loader):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs | {"pin_memory": False})

    replace(
        torch.utils.data,
        "DataLoader",
        UnpinnedLoader,
        upstream="megatron/training/datasets/data_samplers.py:109",
        reason="it asks for pinned memory, and torch warns at every loader that there is none",
    )


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _install_experts() -> None:
    from megatron.core.transformer.moe import token_dispatcher

    replace(
        token_dispatcher,
        "maybe_move_tensor_to_cpu",
        _on_the_host,
        upstream="transformer/moe/moe_utils.py:1184",
        reason="sizes of messages become numbers only where they come from a CUDA tensor",
    )


def install_optimizer() -> None:
    """FusedAdam's stand-in, on any platform, where neither TransformerEngine nor apex is there."""
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER or optimizer.Adam is GroupStepAdam:
        return
    why = "checkpoints of the distributed optimizer load only with a step per parameter group"
    for owner, name, value in (
        (optimizer, "Adam", GroupStepAdam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
    ):
        replace(owner, name, value, upstream="distrib_optimizer.py:838,1025", reason=why)


def install() -> None:
    """Replace them. Imports megatron."""
    _install_rng()
    _install_data()
    _install_experts()
    install_optimizer()
