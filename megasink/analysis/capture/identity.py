"""Identity of an analysis, so that only parts of the same analysis are combined."""

import argparse
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch

import megasink
from megasink.analysis.capture.inputs import Sample, data_hash

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_READ = 4096
"""Elements read individually per weight; all others enter only through the sum of their bits."""


def weights_hash(module: torch.nn.Module) -> str:
    """Return the SHA-256 of the bit sum and 4096 evenly spaced elements of each weight.

    Reads every weight once in place and copies little; any training step changes the hash.
    """
    digest = hashlib.sha256()
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        flat = tensor.detach().reshape(-1)
        if flat.is_complex():
            flat = torch.view_as_real(flat).reshape(-1)
        bits = flat.view(_BITS[flat.itemsize])
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        digest.update(str(int(bits.sum(dtype=torch.int64))).encode())
        # An odd stride reaches every column of a matrix, not the same few in every row.
        digest.update(bits[:: flat.numel() // _READ | 1].cpu().numpy().tobytes())
    return digest.hexdigest()


def identity(
    args: argparse.Namespace,
    module: torch.nn.Module,
    samples: Sequence[Sample],
    model: dict[str, Any],
    metrics: Iterable[str],
) -> dict[str, Any]:
    """Return the identity of an analysis: everything that can change a bit of the measurements."""
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
