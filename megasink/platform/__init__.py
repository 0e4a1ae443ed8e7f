"""Megatron on a machine without CUDA: opt-in, every rank a gloo process on the CPU.

Megatron-Core asks ``torch.cuda`` for devices, streams, memory and random states, and builds its
tensors on ``"cuda"``. This package answers those questions for a CPU, so that the unmodified
training loop runs on a laptop. One file per upstream subsystem; patches.py declares every
replacement with the upstream lines that make it necessary, and ``tests/platform`` runs that
upstream code.

It replaces functions of ``torch.cuda`` for the whole process: call :func:`activate` in a process
of its own, before megatron is imported, and never on a machine that has a CUDA device.
"""

import os
import sys

from megasink.errors import UserError
from megasink.upstream.register import active, undo

_active = False
_DYNAMO = "TORCHDYNAMO_DISABLE"
_dynamo_before: str | None = None


def cuda_present() -> bool:
    """Whether a CUDA device is there (asked before anything is replaced)."""
    import torch

    return False if _active else torch.cuda.is_available()


def is_active() -> bool:
    """Whether this process runs on the CPU platform."""
    return _active


def describe() -> str:
    """One line for the log: which platform this process runs on."""
    if _active:
        return "platform: CPU (no CUDA device found): gloo ranks, local modules, no fused kernels"
    return "platform: CUDA"


def activate() -> None:
    """Make Megatron run on the CPU in this process. Idempotent.

    Raises:
        UserError: a CUDA device is present, or Megatron was imported before.
    """
    global _active, _dynamo_before
    if _active:
        return
    import torch

    if torch.cuda.is_available():
        raise UserError(
            "the CPU platform was asked for but a CUDA device is present; "
            'hide it (CUDA_VISIBLE_DEVICES="") or run without --cpu'
        )
    if "megatron.core.tensor_parallel.random" in sys.modules:
        raise UserError(
            "the CPU platform must be activated before megatron is imported: "
            "call megasink.platform.activate() first"
        )
    from megasink.platform import cuda_api, devices, patches

    # In processes that are started from here, too.
    _dynamo_before = os.environ.get(_DYNAMO)
    os.environ[_DYNAMO] = "1"
    patches.COMPILE.apply(disable=True)
    cuda_api.install()
    devices.install()
    _active = True
    # These import megatron, which asks torch.cuda while it is imported.
    from megasink.platform import megatron_core

    megatron_core.install()


def deactivate() -> None:
    """Undo every replacement (for tests)."""
    global _active
    undo(active("platform"))
    if _active:
        os.environ.pop(_DYNAMO)
        os.environ |= {} if _dynamo_before is None else {_DYNAMO: _dynamo_before}
    _active = False
