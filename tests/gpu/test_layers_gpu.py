"""Models of Megatron layers on a GPU: loss and gradients against float32 on a CPU.

Every kernel in bfloat16 may have at most twice the error that the same model makes in bfloat16 on
the CPU, in Megatron's local modules and in TransformerEngine's. The step that follows must not wait
for the device.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from megasink.attention import AttentionRequest, backend_names
from megasink.attention.kernels import backend_named
from megasink.attention.kernels.cuda import at_runtime
from tests.gpu.model_steps import KINDS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def case(kind, dtype="bfloat16", kernel="auto", impl="local"):
    return json.dumps({"kind": kind, "dtype": dtype, "kernel": kernel, "impl": impl})


def gpu_cases():
    """What this machine can run, by test id."""
    if not torch.cuda.is_available():
        return {"none": case("sink")}
    request = at_runtime(AttentionRequest("cuda", torch.bfloat16, 64), 0)
    kernels = [n for n in backend_names() if backend_named(n).supports(request) is None]
    cases = {f"{kind}-auto": case(kind) for kind in KINDS}
    cases |= {f"sink-{name}": case("sink", kernel=name) for name in kernels}
    cases |= {f"headwise-{name}": case("headwise", kernel=name) for name in kernels}
    if find_spec("transformer_engine"):
        cases |= {f"{kind}-te": case(kind, impl="transformer_engine") for kind in KINDS}
    return cases


CASES = gpu_cases()


def results(device, cases, folder):
    path = folder / f"{device}.pt"
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    command = [sys.executable, "-m", "tests.gpu.model_steps", device, str(path), *cases]
    subprocess.run(command, check=True, env=os.environ | hidden)
    by_case = {}
    for name, tensor in torch.load(path, weights_only=True).items():
        text, _, parameter = name.rpartition("/")
        by_case.setdefault(text, {})[parameter] = tensor.double()
    return by_case


@pytest.fixture(scope="module")
def on_cpu(tmp_path_factory):
    cases = [case(kind, dtype) for kind in KINDS for dtype in ("float32", "bfloat16")]
    return results("cpu", cases, tmp_path_factory.mktemp("cpu"))


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory):
    """All cases in one process; each is run whether or not another one fails its comparison."""
    return results("cuda", list(dict.fromkeys(CASES.values())), tmp_path_factory.mktemp("gpu"))


@pytest.mark.parametrize("text", CASES.values(), ids=CASES.keys())
def test_loss_and_gradients(text, on_cpu, on_gpu):
    kind = json.loads(text)["kind"]
    exact, plain = on_cpu[case(kind, "float32")], on_cpu[case(kind)]
    assert text in on_gpu, "an error, in the output of the first test's setup"
    ours = on_gpu[text]
    assert ours.keys() == exact.keys()
    for name, tensor in exact.items():
        allowed = 2 * (plain[name] - tensor).norm() + 2**-8 * tensor.norm()
        assert (ours[name] - tensor).norm() <= allowed, name
