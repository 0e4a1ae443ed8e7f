"""What the tests of attention kernels on a GPU share.

tests/attention/test_seeded_defects.py calls the same tests on a CPU, for a stand-in of a kernel.
"""

from dataclasses import replace

import pytest
import torch

from megasink.attention.kernels import AttentionRequest, backend_named, backend_names
from megasink.attention.kernels.cuda import at_runtime
from tests.attention.attention_oracle import make_case

DEVICE = "cuda"
BF16 = torch.bfloat16
KERNELS = [name for name in backend_names() if name not in ("flash-cpu", "eager")]
INJECTED = [name for name in KERNELS if not backend_named(name).takes_lse_gradient]

MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(autouse=True)
def supported(request):
    """Skips a kernel that this device or build lacks, with the registry's own reason."""
    if "kernel" in request.fixturenames:
        needs(request.getfixturevalue("kernel"))


def needs(kernel, **facts):
    """Skip the test if the kernel refuses these facts of a request, with its own reason."""
    request = at_runtime(AttentionRequest(DEVICE, BF16, 64), 0 if DEVICE == "cuda" else None)
    if reason := backend_named(kernel).supports(replace(request, **facts)):
        pytest.skip(f"{kernel}: {reason}")


def cuda_case(**options):
    return make_case(**{"head_dim": 64, "dtype": BF16, "device": DEVICE, **options})
