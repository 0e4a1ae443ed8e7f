"""Nothing of attention is tokens x tokens, by the peak memory of a process of its own."""

import subprocess
import sys

import pytest

GROWTH = """
import torch
from pathlib import Path
from megasink.attention import (
    attention, reference_attention, reference_similarity_attention, similarity_attention
)

def run(function, tokens, options):
    query, key, value = (torch.randn(1, 1, tokens, 8).requires_grad_() for _ in range(3))
    if options.get("variant") == "sink":
        options = options | {"sink_H": torch.zeros(1, requires_grad=True)}
    outputs = function(query, key, value, **options)
    sum(output.sum() for output in outputs if output.requires_grad).backward()

def peak():
    # Not ru_maxrss: a process started by a large one begins with the large one's.
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) // 1024

torch.set_num_threads(1)
sink = {"variant": "sink"}
for function, tokens, options in [
    (attention, 4096, {"backend": "flash-cpu"}),
    (attention, 4096, sink | {"backend": "flash-cpu", "window": 1500}),
    (attention, 4096, sink | {"backend": "eager"}),
    (similarity_attention, 6144, {"similarity": "sigmoid"}),
    (similarity_attention, 6144, {"similarity": "elu-plus-one", "window": 1500}),
    (similarity_attention, 6144, {"similarity": "identity"}),
    (reference_attention, 4096, sink),
    (reference_similarity_attention, 6144, {"similarity": "sigmoid"}),
]:
    run(function, 64, options)
    before = peak()
    for _ in range(3 if "similarity" in options else 1):  # the kernel may sample the peak
        run(function, tokens, options)
    print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_nothing_is_tokens_by_tokens():
    """A float32 tensor of 4096 x 4096 is 64 MiB and a mask of it 16; one of 6144 x 6144 is 144 MiB,
    of which the definition makes several, and a chunk of it 6, of which ours makes a dozen."""
    done = subprocess.run(
        [sys.executable, "-c", GROWTH], capture_output=True, text=True, check=True
    )
    flash, windowed, eager, *similarities, softmax, similarity = map(int, done.stdout.split())
    # The measurement sees such tensors: of the second definition, what is more than the first's.
    assert softmax > 64
    assert softmax + similarity > 288
    assert max(flash, windowed) < 12
    assert eager < 32  # three temporaries of 256 x 4096
    assert sum(similarities) < 144
