"""Process setup that must run before Megatron is imported."""

import logging
import os
import sys
import warnings

from megasink import cpu
from megasink.cpu.broken_packages import block_broken_packages, describe
from megasink.errors import UserError
from megasink.upstream.versions import check_versions


def prepare_process(device: str | None = None, *, forks: bool = False) -> None:
    """Choose the platform and make Megatron importable. Every rank calls this first."""
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    check_versions()
    # FlashAttention 4 otherwise compiles its kernels at every start, for 13 s and more.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
    # A dozen Megatron modules emit this warning on import.
    warnings.filterwarnings("ignore", message=".*(Transformer Engine|Apex).*not installed")
    block_broken_packages()
    if reason := cpu.unusable_gpu(None if forks else int(os.environ.get("LOCAL_RANK", "0"))):
        raise UserError(f"{reason}; to run on the CPU instead, set CUDA_VISIBLE_DEVICES=''")
    if not cpu.cuda_present():
        cpu.activate()
    try:
        from megasink.upstream.apply_fixes import fix_upstream  # it imports Megatron
    except ModuleNotFoundError as error:
        if str(error) in describe():
            raise UserError(f"Megatron does not start: {error}") from error
        raise
    fix_upstream()
    import torch

    # --deterministic-mode would fill every new tensor, which nearly doubles the launches of a step.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def prepare_quietly(*, cpu: bool) -> None:
    """Call `prepare_process` without Megatron's warnings, unless they were asked for."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")
        logging.getLogger("megatron").setLevel(logging.ERROR)
    prepare_process("cpu" if cpu else None)
