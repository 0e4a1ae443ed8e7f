"""The places of megatron.core that ask for CUDA in a way that ``torch.cuda`` cannot answer."""

import functools
import logging
from typing import Any

import torch

from megasink.platform.adam import GroupStepAdam
from megasink.platform.patching import replace


def _get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
    return torch.default_generator.get_state()


def _set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
    torch.default_generator.set_state(new_state)


class _DropForkWarning(logging.Filter):
    """random.py:369 warns whenever the CPU generator moves inside fork(): here it must."""

    def filter(self, record: logging.LogRecord) -> bool:
        return "CPU RNG state changed" not in record.getMessage()


def _install_rng() -> None:
    from megatron.core.tensor_parallel import random

    why = "the CUDA generator of the tracker is the CPU's default generator"
    replace(random, "_get_cuda_rng_state", _get_state, upstream="random.py:104", reason=why)
    replace(random, "_set_cuda_rng_state", _set_state, upstream="random.py:141", reason=why)
    logging.getLogger(random.__name__).addFilter(_DropForkWarning())


def _install_data() -> None:
    import torch.utils.data
    from megatron.training.datasets import data_samplers

    loader = torch.utils.data.DataLoader

    @functools.wraps(loader, updated=())
    class UnpinnedLoader(loader):  # type: ignore[misc, valid-type]
        def __init__(self, *args: Any, **kwargs: Any):
            kwargs["pin_memory"] = False
            super().__init__(*args, **kwargs)

    # data_samplers.py writes torch.utils.data.DataLoader(..., pin_memory=True)
    replace(
        torch.utils.data,
        "DataLoader",
        UnpinnedLoader,
        upstream="megatron/training/datasets/data_samplers.py:109",
        reason="the pinning thread asks for an accelerator",
    )
    assert data_samplers.torch.utils.data.DataLoader is UnpinnedLoader


def _install_optimizer() -> None:
    import megatron.core.optimizer as optimizer
    from megatron.core.optimizer import distrib_optimizer

    if not optimizer.USING_PYTORCH_OPTIMIZER:
        return
    why = "checkpoints of the distributed optimizer load only with a step per parameter group"
    for owner, name, value in (
        (optimizer, "Adam", GroupStepAdam),
        (optimizer, "USING_PYTORCH_OPTIMIZER", False),
        (distrib_optimizer, "Adam", GroupStepAdam),
        (distrib_optimizer, "HAVE_APEX_OR_TE", True),
        (distrib_optimizer, "USING_APEX_OPTIMIZER", True),
    ):
        replace(owner, name, value, upstream="distrib_optimizer.py:838,1025", reason=why)


def install() -> None:
    """Replace them. Imports megatron."""
    _install_rng()
    _install_optimizer()
    _install_data()
