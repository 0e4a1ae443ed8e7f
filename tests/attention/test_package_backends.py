"""The kernels of CUDA packages, driven on a CPU through stand-ins with upstream's parameters."""

from dataclasses import replace

import pytest
import torch

from megasink.attention import (
    VARIANTS,
    AttentionRequest,
    attention,
    choose_backend,
    choose_gate_kernels,
    reference_attention,
    reference_slot_attention,
    slot_attention,
)
from megasink.attention.gate_kernels import OWN, triton_gate_kernels
from megasink.attention.kernels import backend_named
from megasink.errors import ConfigError
from tests.attention import upstream_kernels
from tests.attention.attention_oracle import (
    assert_at_most_twice_plain_error,
    check,
    evaluate,
    make_case,
)
from tests.attention.stand_ins import STAND_INS, forget_choices, stand_in_for, stand_in_packages

OWN_SINK = ("flash-attn-4", "transformer-engine")
H100 = AttentionRequest("cuda", torch.bfloat16, 128, compute_capability=(9, 0))
A100 = replace(H100, compute_capability=(8, 0))
B200 = replace(H100, compute_capability=(10, 0))


@pytest.fixture(autouse=True)
def _forget_choices(monkeypatch):
    monkeypatch.setattr(triton_gate_kernels, "_toolchain_reason", lambda: "not in these tests")
    yield
    forget_choices()


@pytest.fixture(params=STAND_INS)
def kernel(request, monkeypatch):
    """A backend whose package is a stand-in, made willing to run on a CPU."""
    stand_in_for(monkeypatch, request.param)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["vanilla", "sink", "off-by-one"])
def test_outputs_and_gradients(variant, dtype, kernel):
    for groups, tokens, window in ((2, 37, None), (1, 33, 9), (4, 2, None), (2, 1, None)):
        case = make_case(groups=groups, tokens=tokens, dtype=dtype)
        check(case, dtype, variant, backend=kernel, window=window)
    check(make_case(tokens=12, keys=29, dtype=dtype), dtype, variant, backend=kernel)
    check(make_case(tokens=20, keys=9, dtype=dtype), dtype, variant, backend=kernel, causal=False)


@pytest.mark.parametrize("variant", ["vanilla", "sink", "off-by-one"])
def test_narrower_values_get_zeros_unless_the_kernel_takes_them(variant, kernel, monkeypatch):
    backend, widths = backend_named(kernel), []
    launch = backend.launch_forward
    monkeypatch.setattr(
        backend,
        "launch_forward",
        lambda *args: (widths.append(args[2].shape[-1]), launch(*args))[1],
    )
    for head_dim, value_dim in ((24, 16), (192, 128)):
        case = make_case(head_dim=head_dim, value_dim=value_dim, tokens=13)
        check(case, torch.float32, variant, backend=kernel)
    assert widths == [24, 128 if kernel == "flash-attn-4" else 192]


@pytest.fixture
def calls(kernel, monkeypatch):
    """The calls of the kernel's forward and backward, by name, as (queries, keys)."""
    calls = {"launch_forward": [], "launch_backward": []}
    backend = backend_named(kernel)
    for name, made in calls.items():
        launch = getattr(backend, name)

        def counted(*arguments, launch=launch, made=made):
            query, key = arguments[:2] if len(arguments) == 4 else arguments[0][1:3]
            made.append((query.shape, key.shape, arguments[-1].causal))
            return launch(*arguments)

        monkeypatch.setattr(backend, name, counted)
    return calls


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("variant", VARIANTS)
def test_fewer_queries_than_keys_are_one_call(variant, window, kernel, calls):
    """Queries of a context-parallel chunk: these kernels align the causal mask bottom right."""
    check(make_case(tokens=12, keys=29), torch.float32, variant, backend=kernel, window=window)
    assert backend_named(kernel).bottom_right
    assert [len(made) for made in calls.values()] == [1, 1]


def test_cudnn_before_9_7_gets_blocks(monkeypatch):
    backend = stand_in_for(monkeypatch, "transformer-engine")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 90600)
    assert not backend.bottom_right
    check(make_case(tokens=12, keys=29), torch.float32, "sink", backend="transformer-engine")


@pytest.mark.parametrize("variant", VARIANTS)
def test_one_query_is_one_unmasked_call(variant, kernel, calls):
    check(make_case(tokens=1, keys=29), torch.float32, variant, backend=kernel)
    assert [len(made) for made in calls.values()] in ([1, 1], [1, 0])  # cuDNN's backward is eager
    assert not any(causal for made in calls.values() for *_, causal in made)


@pytest.fixture(params=OWN_SINK)
def own_sink(request, monkeypatch):
    """A backend with a sink of its own, whose package is a stand-in, and the sinks it was given."""
    backend, given = stand_in_for(monkeypatch, request.param), []
    for name in ("launch_forward", "launch_backward"):
        launch = getattr(backend, name)
        monkeypatch.setattr(
            backend, name, lambda *args, f=launch: (given.append(args[-1].sink_H), f(*args))[1]
        )
    return request.param, given


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", ["sink", "off-by-one"])
def test_a_kernel_with_a_sink_of_its_own_gets_it(variant, dtype, own_sink):
    """Off-by-one's backward needs no gradient of its sink, and passes none."""
    name, given = own_sink
    for groups, tokens, window in ((2, 37, None), (1, 33, 9), (4, 2, None)):
        case = make_case(groups=groups, tokens=tokens, dtype=dtype)
        check(case, dtype, variant, backend=name, window=window)
        forward, backward = given[-2:]
        wanted = case.sink.float() if variant == "sink" else torch.zeros(4)
        assert torch.equal(forward, wanted)
        assert torch.equal(backward, wanted) if variant == "sink" else backward is None


@pytest.mark.parametrize("absent", [(), ("grad_lse",), ("grad_gate",), ("grad_lse", "grad_gate")])
@pytest.mark.parametrize("sink", [-30.0, 8.0, 30.0])
def test_large_sinks_in_the_kernel(sink, absent, own_sink):
    """The gate's error is that of its LSE, absolute; so is that of its gradient to the sink."""
    name, given = own_sink
    case = make_case(sink=sink).with_(**dict.fromkeys(absent))
    ours, plain = (
        evaluate(f, case, torch.float32, "sink", **options)
        for f, options in ((attention, {"backend": name}), (reference_attention, {}))
    )
    exact = evaluate(reference_attention, case, torch.float64, "sink")
    assert all(sink_H is not None for sink_H in given)
    epsilon, rows = torch.finfo(torch.float32).eps, case.key.shape[2] * 2
    rounding = epsilon * max(abs(sink), 1.0)
    assert (ours["gate"] - exact["gate"]).abs().max() <= 4 * rounding
    each = epsilon if case.grad_gate is None else rounding
    torch.testing.assert_close(ours["d sink"], exact["d sink"], rtol=1e-5, atol=rows * each)
    for results in (ours, plain, exact):
        del results["gate"], results["d sink"]
    assert_at_most_twice_plain_error(ours, plain, exact, torch.float32, roundings=4)


def test_other_slots_and_other_masks_stay_outside_the_kernel(own_sink):
    """A sink by token, a slot with a value, a prefix; and gate kernels that were asked for."""
    name, given = own_sink
    tensors = [torch.randn(1, 2, 9, 8) for _ in range(3)]
    by_head, by_token, value = torch.zeros(1, 2, 1), torch.zeros(1, 2, 9), torch.ones(1, 2, 1, 8)
    for slot, options in (
        ((by_token,), {}),
        ((by_head, value), {}),
        ((by_head,), {"prefix": 4}),
        ((by_head,), {"backend": f"{name}+torch"}),
    ):
        ours = slot_attention(*tensors, *slot, **{"backend": name, **options})
        options.pop("backend", None)
        expected = reference_slot_attention(*tensors, *slot, **options)
        for found, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(found, wanted)
    assert given
    assert given.count(None) == len(given)


def test_a_wheel_without_the_backward_of_its_sink_is_named(monkeypatch):
    """4.0.0b20: the sink stays outside of the kernel."""

    def backward(*, dlse=None, **options):
        """Has no learnable_sink."""

    monkeypatch.setattr(upstream_kernels.FlashAttention4, "_flash_attn_bwd", staticmethod(backward))
    stand_in_packages(monkeypatch, "flash-attn-4")
    choice = choose_gate_kernels(replace(H100, variant="sink"))
    assert choice.name != OWN
    assert (
        "has no backward pass for its sink: install flash-attn-4>=4.0.0b26" in choice.reasons[OWN]
    )


def test_the_choice_of_a_sink_in_the_kernel(monkeypatch):
    stand_in_packages(monkeypatch, "flash-attn-4")
    sink = replace(H100, variant="sink")
    assert choose_gate_kernels(sink).name == OWN
    assert choose_gate_kernels(H100).name == "torch"
    for request_, kernel, reason in (
        (sink, "flash-attn-4+torch", "other kernels were requested"),
        (sink, "flash-cuda", "flash-cuda does not implement sinks"),
        (replace(sink, compute_capability=(12, 0)), "auto", "for compute capability 9 to 11"),
    ):
        choice = choose_gate_kernels(request_, kernel)
        assert choice.name == "torch"
        assert reason in choice.reasons[OWN]


@pytest.mark.parametrize(
    ("version", "deterministic", "reason"),
    [
        (91300, False, "its sink needs cuDNN 9.13.1 or later, but 91300 is installed"),
        (91301, True, "the gradient of its sink is not deterministic"),
        (91301, False, None),
    ],
)
def test_the_sink_of_transformer_engine(monkeypatch, version, deterministic, reason):
    """Where it is refused, the sink stays outside of the kernel."""
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    request = replace(A100, variant="sink", deterministic=deterministic)
    assert backend_named("transformer-engine").sink_reason(request) == reason


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


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_window_is_one_call(variant, kernel, calls):
    check(make_case(), torch.float32, variant, backend=kernel, window=9)
    assert [len(made) for made in calls.values()] == [1, 1]


def test_a_kernel_that_ignored_the_lse_gradient_would_be_caught(monkeypatch):
    backward = upstream_kernels.flash_backward
    monkeypatch.setattr(
        upstream_kernels,
        "flash_backward",
        lambda *args: backward(*args[:9]),  # dlse is the tenth
    )
    stand_in_for(monkeypatch, "flash-attn-4")
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
        (
            replace(B200, head_dim=192, value_dim=128),
            ["flash-attn-4", "flash-attn-2", "flash-cuda"],
        ),
    ],
)
def test_the_newest_kernel_that_can_is_chosen(monkeypatch, request_, order):
    """What "auto" takes as one package after another is missing, and why not what came before."""
    packages = list(STAND_INS)
    for name in order:
        present = packages[packages.index(name) :] if name in packages else []
        with monkeypatch.context() as patch:
            stand_in_packages(patch, *present)
            choice = choose_backend(request_)
        assert choice.name == name
        for missing in set(packages) - set(present):
            assert choice.reasons[missing] != f"{name} comes first"
        if "flash-attn-4" not in present and request_.compute_capability >= (9, 0):
            reason = choice.reasons["flash-attn-4"]
            assert "not installed" in reason or "head dim is at most 128" in reason


@pytest.mark.parametrize(
    ("name", "request_", "reason"),
    [
        ("flash-attn-4", A100, "capability 9.0 or later, but the device has 8.0"),
        ("flash-attn-4", replace(B200, head_dim=256), "at most 128, got 256"),
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
        ("transformer-engine", replace(H100, head_dim=264), "up to 256"),
        ("transformer-engine", A100, r"transformer-engine\[pytorch\] is not installed"),
    ],
)
def test_refusals(monkeypatch, name, request_, reason):
    stand_in_packages(monkeypatch)
    with pytest.raises(ConfigError, match=reason):
        choose_backend(request_, name)


def test_a_package_that_does_not_import_is_named(monkeypatch, tmp_path):
    (tmp_path / "flash_attn_interface.py").write_text("raise OSError('libcudart.so: no such file')")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        ConfigError,
        match=r"flash_attn_3 \(unknown version\) cannot be imported \(OSError: libcudart",
    ):
        choose_backend(H100, "flash-attn-3")
