"""What an analysis depends on, so that only parts of the same one are ever put together."""

import argparse
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import megasink
from megasink.probe.inputs import Sample, data_hash

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READ = 4096
"""Elements of each weight that are read one by one; of all others the sum of their bits is."""


def weights_hash(module: torch.nn.Module) -> str:
    """SHA-256 over the sum of the bits, and 4096 evenly spaced elements, of each weight.

    Reads every weight once where it lies, and copies little: any step of training changes it.
    """
    digest = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        bits = flat.view(_BITS[flat.itemsize])
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(str(int(bits.sum(dtype=torch.int64))).encode())
        # An odd stride meets every column of a matrix, not the same few of every row.
        digest.update(bits[:: flat.numel() // _READ | 1].cpu().numpy().tobytes())
    return digest.hexdigest()


def identity(
    args: argparse.Namespace,
    module: torch.nn.Module,
    samples: Sequence[Sample],
    model: dict[str, Any],
    metrics: Iterable[str],
) -> dict[str, Any]:
    """The identity of an analysis: whatever changes a bit of what is measured.

    Args:
        args: of the command line.
        model: what results.json says about it.
    """
    return {
        "model": model["kind"],
        "weights": weights_hash(module),
        "data": data_hash(samples),
        "--data": [str(source) for source in args.data],
        "--batch-size": args.batch_size,
        "--positions": args.positions,
        "--columns": args.columns,
        "--no-loss": not args.loss,
        "dtype": model["dtype"],
        "attention": model["attention"],
        "device": str(args.device).partition(":")[0],
        "metrics": sorted(metrics),
        "megasink": megasink.__version__,
        "torch": torch.__version__,
    }
