"""The kernels of CUDA packages, driven on a CPU through stand-ins with upstream's parameters."""

import sys
from dataclasses import replace

import pytest
import torch

from megasink.attention import AttentionRequest, attention, choose_backend
from megasink.attention.kernels import backend_named
from megasink.errors import ConfigError
from tests.attention import upstream_kernels
from tests.attention.attention_oracle import check, make_case

STAND_INS = {
    "flash-attn-4": upstream_kernels.FlashAttention4,
    "flash-attn-3": upstream_kernels.FlashAttention3,
    "flash-attn-2": upstream_kernels.FlashAttention2,
    "transformer-engine": upstream_kernels.TransformerEngine,
}
H100 = AttentionRequest("cuda", torch.bfloat16, 128, compute_capability=(9, 0))
A100 = replace(H100, compute_capability=(8, 0))
B200 = replace(H100, compute_capability=(10, 0))


def _stand_in(monkeypatch, *names):
    """The packages of these backends are stand-ins, and the others cannot be imported."""
    for name, stand_in in STAND_INS.items():
        module = backend_named(name).module
        if name in names:
            public = [n for n in vars(stand_in) if not n.startswith("__")]
            attributes = {n: getattr(stand_in, n) for n in public}
            upstream_kernels.install(monkeypatch, {module: attributes})
        else:
            monkeypatch.setitem(sys.modules, module, None)
    choose_backend.cache_clear()


@pytest.fixture(autouse=True)
def _forget_choices():
    yield
    choose_backend.cache_clear()


@pytest.fixture(params=STAND_INS)
def kernel(request, monkeypatch):
    """A backend whose package is a stand-in, made willing to run on a CPU."""
    _stand_in(monkeypatch, request.param)
    monkeypatch.setattr(type(backend_named(request.param)), "supports", lambda *_: None)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["vanilla", "sink", "off-by-one"])
def test_outputs_and_gradients(variant, dtype, kernel):
    for groups, tokens, window in ((2, 37, None), (1, 33, 9), (4, 2, None), (2, 1, None)):
        case = make_case(groups=groups, tokens=tokens, dtype=dtype)
        check(case, dtype, variant, backend=kernel, window=window)
    check(make_case(tokens=12, keys=29, dtype=dtype), dtype, variant, backend=kernel)
    check(make_case(tokens=20, keys=9, dtype=dtype), dtype, variant, backend=kernel, causal=False)


@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_rows_without_output_gradient_and_tiny_gradients(variant, kernel):
    case = make_case()
    grad_out = case.grad_out * 1e-9
    grad_out[:, :, 3:20] = 0.0
    case = case.with_(
        grad_out=grad_out.float().double(),
        grad_lse=(case.grad_lse * 1e-9).float().double(),
        grad_gate=(case.grad_gate * 1e-9).float().double(),
    )
    check(case, torch.float32, variant, backend=kernel)


def test_megatron_layout(kernel):
    """Query, key and value as views of [s, b, h, d]: results lie the same way."""
    leaf = torch.randn(13, 2, 4, 8).permute(1, 2, 0, 3).requires_grad_()
    out, _, gate = attention(leaf, leaf, leaf, backend=kernel)
    (grad,) = torch.autograd.grad(out.square().sum() + gate.sum(), leaf)
    assert out.permute(2, 0, 1, 3).is_contiguous()
    assert grad.permute(2, 0, 1, 3).is_contiguous()


@pytest.mark.parametrize("extra", [0, 1, 4])
def test_views_that_are_not_aligned(kernel, extra):
    """Of a wider tensor, as a projection with more rows leaves them; and behind an odd offset."""
    width = 3 * 4 * 8 + extra
    mixed = torch.randn(13 * 2 * width + extra, dtype=torch.bfloat16)[extra:].view(13, 2, width)
    mixed.requires_grad_()
    heads = mixed[..., : 3 * 4 * 8].unflatten(-1, (3, 4, 8)).permute(2, 1, 3, 0, 4)
    results = []
    for query, key, value in (heads, heads.contiguous()):
        out, _, gate = attention(query, key, value, backend=kernel)
        (grad,) = torch.autograd.grad(out.float().square().sum() + gate.sum(), mixed)
        results.append((out, gate, grad))
    for odd, aligned in zip(*results, strict=True):
        torch.testing.assert_close(odd, aligned, rtol=0, atol=0)


def test_a_kernel_that_ignored_the_lse_gradient_would_be_caught(monkeypatch):
    backward = upstream_kernels.flash_backward
    monkeypatch.setattr(
        upstream_kernels,
        "flash_backward",
        lambda *args: backward(*args[:9]),  # dlse is the tenth
    )
    _stand_in(monkeypatch, "flash-attn-4")
    monkeypatch.setattr(type(backend_named("flash-attn-4")), "supports", lambda *_: None)
    for variant in ("vanilla", "sink"):
        with pytest.raises(AssertionError, match="d query"):
            check(make_case(), torch.float32, variant, backend="flash-attn-4")


@pytest.mark.parametrize(
    ("request_", "order"),
    [
        (H100, ["flash-attn-4", "flash-attn-3", "flash-attn-2", "flash-cuda"]),
        (B200, ["flash-attn-4", "flash-attn-2", "flash-cuda"]),
        (A100, ["flash-attn-2", "flash-cuda"]),
        (replace(H100, dtype=torch.float16), ["flash-attn-4", "eager"]),
        (replace(B200, head_dim=192), ["flash-attn-2", "flash-cuda"]),
    ],
)
def test_the_newest_kernel_that_can_is_chosen(monkeypatch, request_, order):
    """What "auto" takes as one package after another is missing, and why not what came before."""
    packages = list(STAND_INS)
    for name in order:
        present = packages[packages.index(name) :] if name in packages else []
        with monkeypatch.context() as patch:
            _stand_in(patch, *present)
            choice = choose_backend(request_)
        assert choice.name == name
        for missing in set(packages) - set(present):
            assert choice.reasons[missing] != f"{name} comes first"
        if "flash-attn-4" not in present and request_.compute_capability >= (9, 0):
            reason = choice.reasons["flash-attn-4"]
            assert "not installed" in reason or "head dim goes up to 128" in reason


@pytest.mark.parametrize(
    ("name", "request_", "reason"),
    [
        ("flash-attn-4", A100, "capability 9.0 or later, the device has 8.0"),
        ("flash-attn-4", replace(B200, head_dim=256), "up to 128, got 256"),
        (
            "flash-attn-4",
            replace(B200, compute_capability=(12, 0), deterministic=True),
            "capability 12 is not deterministic",
        ),
        ("flash-attn-4", H100, "the package flash-attn-4 is not installed"),
        ("flash-attn-3", B200, r"Hopper \(compute capability 9.0\)"),
        ("flash-attn-3", H100, "package flash_attn_3"),
        ("flash-attn-3", replace(H100, dtype=torch.float16), "float16 cannot hold"),
        ("flash-attn-2", replace(A100, dtype=torch.float16), "float16 cannot hold"),
        ("flash-attn-2", replace(A100, dtype=torch.float32), "not in torch.float32"),
        ("flash-attn-2", A100, "the package flash-attn is not installed"),
        ("transformer-engine", replace(A100, head_dim=256), "up to 128"),
        ("transformer-engine", A100, r"transformer-engine\[pytorch\] is not installed"),
    ],
)
def test_refusals(monkeypatch, name, request_, reason):
    _stand_in(monkeypatch)
    with pytest.raises(ConfigError, match=reason):
        choose_backend(request_, name)


def test_a_package_that_does_not_import_is_named(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libcudart.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="does not import: OSError: libcudart"):
        choose_backend(H100, "flash-attn-3")
