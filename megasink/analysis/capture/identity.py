"""Identity of an analysis, so that only parts of the same analysis are combined."""

import hashlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

import megasink
from megasink.analysis.capture.inputs import Sample, data_hash
from megasink.analysis.metrics import metrics as registered
from megasink.analysis.options import AnalysisOptions

if TYPE_CHECKING:
    from megasink.analysis.capture.base import ProbedModel

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
    model: "ProbedModel",
    samples: Sequence[Sample],
    options: AnalysisOptions,
    metrics: Iterable[str] | None = None,
) -> dict[str, Any]:
    """Return the identity of an analysis: everything that can change a bit of the measurements.

    Args:
        metrics: see `measure`; derived ones change no measurement.
    """
    names = [name for name, entry in registered(metrics).items() if not entry.is_derived]
    return {
        "model": model.facts["kind"],
        "weights": weights_hash(model.module),
        "data": data_hash(samples),
        **options.by_flag("data", "batch_size", "positions", "columns", "loss"),
        "dtype": model.facts["dtype"],
        "attention": model.facts["attention"],
        "device": model.device.type,
        "metrics": sorted(names),
        "megasink": megasink.__version__,
        "torch": torch.__version__,
    }
