"""Packages that import but are not those that the calls are made for: refused before a step."""

import contextlib
import sys
from dataclasses import replace

import pytest
import torch

from megasink.attention import choose_backend
from megasink.attention.kernels import backend_named, cuda
from megasink.errors import ConfigError
from tests.attention.attention_oracle import check, make_case
from tests.attention.stand_ins import STAND_INS, stand_in_for, stand_in_packages
from tests.attention.test_package_backends import A100, H100, _forget_choices

__all__ = ["_forget_choices"]  # a fixture


def first_wheel(q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0):
    """The backward of the copy in flash-attn 2.8."""


def without_window(q, k, v, dropout_p, softmax_scale, causal, window_size, return_softmax):
    """The forward of flash-attn 2.6."""


@pytest.mark.parametrize(
    ("name", "function", "wrong", "absent", "cure"),
    [
        (
            "flash-attn-4",
            "_flash_attn_bwd",
            first_wheel,
            "dlse, deterministic, window_size_left, cu_seqlens_q, max_seqlen_q, dq",
            "pip install 'flash-attn-4[cu13]>=4.0.0b30'",
        ),
        (
            "flash-attn-2",
            "_flash_attn_forward",
            torch.library.custom_op("megasink_tests::forward", mutates_args=(), schema="() -> ()")(
                without_window
            ),
            "softcap, window_size_left",
            "'flash-attn>=2.7'",
        ),
        ("flash-attn-3", "_flash_attn_backward", None, None, "release 3.0.0"),
        (
            "transformer-engine",
            "fused_attn_fwd",
            lambda is_training, softmax_type, window_size, fake_dtype: None,
            "softmax_offset, cuda_graph",
            "'transformer-engine[pytorch]>=2.20,<3'",
        ),
    ],
)
def test_a_release_with_other_functions_is_refused(
    name, function, wrong, absent, cure, monkeypatch
):
    """In the first step it would raise TypeError."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    stand_in_packages(monkeypatch, name)
    assert choose_backend(H100, name).name == name
    module = sys.modules[backend_named(name).module]
    if wrong is None:
        monkeypatch.delattr(module, function)
    else:
        monkeypatch.setattr(module, function, wrong)
    request = replace(H100, head_dim=64)
    reasons = choose_backend(request).reasons
    lacks = f"has no {function}" + (f"({absent})" if absent else "")
    assert f"(unknown version) {lacks}: " in reasons[name]
    assert cure in reasons[name]
    with pytest.raises(ConfigError, match="use 'flash-cuda'"):
        choose_backend(request, name)


@pytest.mark.parametrize("name", ["cudnn", "transformer-engine"])
def test_a_cudnn_that_pytorch_rejects_is_a_reason(name, monkeypatch):
    """PyTorch raises RuntimeError where another release comes first on the library path."""

    def version():
        raise RuntimeError("cuDNN version incompatibility: PyTorch was compiled against (9, 26, 0)")

    stand_in_packages(monkeypatch, "transformer-engine")
    monkeypatch.setattr(torch.backends.cudnn, "version", version)
    choice = choose_backend(A100)
    assert choice.name == "flash-cuda"
    assert "cannot load its cuDNN" in choice.reasons[name]


@pytest.mark.parametrize("name", STAND_INS)
def test_packages_launch_on_the_device_of_their_tensors(name, monkeypatch):
    """Where another device is current: CuTe and TransformerEngine launch on the current one."""
    backend, devices, inside = stand_in_for(monkeypatch, name), [], []

    @contextlib.contextmanager
    def device_of(tensor):
        devices.append(tensor.device)
        yield
        devices.pop()

    monkeypatch.setattr(cuda, "device_of", device_of)
    for launch in ("launch_forward", "launch_backward"):
        original = getattr(backend, launch)
        monkeypatch.setattr(
            backend, launch, lambda *args, f=original: (inside.append(len(devices)), f(*args))[1]
        )
    check(make_case(tokens=9), torch.float32, "sink", backend=name)
    assert inside == [1, 1]
