"""Which backend runs, why not the others, and what is refused."""

from dataclasses import replace

import pytest
import torch

from megasink.attention import (
    AttentionRequest,
    attention,
    backend_names,
    choose_backend,
    gate_sum,
    register_backend,
)
from megasink.attention import kernels as registry
from megasink.attention.kernels import backend_named, cuda, forget_choices
from megasink.attention.kernels.cuda import at_runtime
from megasink.attention.kernels.eager import EagerBackend
from megasink.errors import ConfigError
from tests.attention.attention_oracle import check, make_case

CPU = AttentionRequest("cpu", torch.float32, 64)
CUDA = AttentionRequest("cuda", torch.bfloat16, 128, compute_capability=(8, 0))


def test_the_choice_gives_a_reason_for_every_other_backend():
    choice = choose_backend(CPU)
    assert choice.name == "flash-cpu"
    assert choice.reasons.keys() == set(backend_names()) - {"flash-cpu"}
    assert "not on cpu" in choice.reasons["flash-cuda"]
    assert choice.reasons["eager"] == "flash-cpu comes first"
    assert choose_backend(CPU, "eager").reasons["flash-cpu"] == "eager was requested"


@pytest.mark.parametrize(
    ("request_", "name", "other", "reason"),
    [
        (CUDA, "flash-cuda", "flash-cpu", "not on cuda"),
        (replace(CUDA, compute_capability=None), "flash-cuda", "flash-cpu", "not on cuda"),
        (replace(CUDA, compute_capability=(7, 5)), "eager", "flash-cuda", "8.0 or later"),
        (replace(CUDA, dtype=torch.float32), "eager", "flash-cuda", "not in torch.float32"),
        (replace(CUDA, head_dim=100), "eager", "flash-cuda", "multiple of 8"),
        (replace(CUDA, head_dim=264), "eager", "flash-cuda", "up to 256"),
        (replace(CUDA, dtype=torch.float16), "eager", "flash-cuda", "float16 cannot hold"),
        (replace(CPU, dtype=torch.float16), "eager", "flash-cpu", "float16 cannot hold"),
        (
            replace(CPU, dtype=torch.float16, needs_gate_gradient=False),
            "flash-cpu",
            "eager",
            "first",
        ),
        (replace(CPU, dtype=torch.float64, window=3), "flash-cpu", "eager", "first"),
    ],
)
def test_auto(request_, name, other, reason):
    choice = choose_backend(request_)
    assert choice.name == name
    assert reason in choice.reasons[other]


@pytest.mark.parametrize(
    ("request_", "requested", "messages"),
    [
        (CPU, "flash-cuda", ["'flash-cuda' cannot run", "not on cpu", "use 'flash-cpu'"]),
        (replace(CPU, dtype=torch.float16), "flash-cpu", ["float16 cannot hold", "use 'eager'"]),
        (CPU, "triton", ["unknown attention backend 'triton'", "flash-cpu", "eager"]),
        (
            replace(CPU, dropout=0.1),
            "auto",
            ["attention dropout 0.1", "set attention dropout to 0"],
        ),
        (replace(CPU, window=0), "auto", ["attention window 0", "use 1 "]),
        (replace(CPU, window=4, causal=False), "auto", ["needs the causal mask"]),
        (replace(CPU, variant="gated"), "auto", ["unknown attention variant 'gated'"]),
        (replace(CPU, dtype=torch.int64), "auto", ["attention dtype torch.int64"]),
        (replace(CPU, window=-1, dropout=0.5), "auto", ["2 problems", "window -1", "dropout 0.5"]),
    ],
)
def test_refusals_say_why_and_what_to_use(request_, requested, messages):
    with pytest.raises(ConfigError) as error:
        choose_backend(request_, requested)
    for message in messages:
        assert message in str(error.value)


@pytest.mark.parametrize(
    ("version", "capability", "refused"),
    [(91900, (9, 0), True), (92600, (9, 0), False), (91900, (8, 0), False)],
)
@pytest.mark.parametrize("name", ["cudnn", "transformer-engine"])
def test_cudnn_is_refused_on_hopper_before_its_fix(monkeypatch, name, version, capability, refused):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(cuda, "package_reason", lambda *_: None)
    reason = backend_named(name).supports(replace(CUDA, compute_capability=capability))
    assert (reason is not None) == refused
    assert not refused or ("needs cuDNN 9.26" in reason and "91900" in reason)


@pytest.mark.parametrize(("version", "refused"), [(90100, True), (90200, False)])
def test_windows_of_transformer_engine_need_a_newer_cudnn(monkeypatch, version, refused):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(cuda, "package_reason", lambda *_: None)
    backend = backend_named("transformer-engine")
    assert backend.supports(CUDA) is None
    reason = backend.supports(replace(CUDA, window=8))
    assert reason == (
        "a window needs cuDNN 9.2 or later, but 90100 is installed" if refused else None
    )


@pytest.mark.parametrize(
    ("name", "capability", "head_dim", "refused"),
    [
        ("cudnn", (9, 0), 64, "cuDNN's deterministic backward"),
        (
            "transformer-engine",
            (8, 0),
            64,
            "on GPUs before Hopper its backward pass is not deterministic",
        ),
        ("transformer-engine", (9, 0), 64, None),
        (
            "flash-attn-3",
            (9, 0),
            200,
            "its backward pass is deterministic up to head dim 192, got 200",
        ),
        ("flash-attn-3", (9, 0), 192, None),
    ],
)
def test_who_is_not_deterministic_says_so(monkeypatch, name, capability, head_dim, refused):
    monkeypatch.setattr(torch.backends.cudnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 92600)
    monkeypatch.setattr(cuda, "package_reason", lambda *_: None)
    request = replace(CUDA, head_dim=head_dim, compute_capability=capability)
    assert backend_named(name).supports(request) is None
    reason = backend_named(name).supports(replace(request, deterministic=True))
    assert reason is refused is None or refused in reason


@pytest.mark.parametrize("name", ["cudnn", "transformer-engine"])
def test_cudnn_is_not_called_for_a_single_key(monkeypatch, name):
    """It refuses one. These are the blocks of a vanilla model of two tokens and of window edges."""

    def refuse(*args):
        raise RuntimeError("key/value sequence length of 1")

    cudnn = backend_named(name)
    for method in ("launch_forward", "launch_backward"):
        monkeypatch.setattr(cudnn, method, refuse)
    monkeypatch.setattr(type(cudnn), "supports", lambda *_: None)
    forget_choices()
    check(make_case(groups=2, tokens=2), torch.float32, "vanilla", backend=name)
    with pytest.raises(RuntimeError, match="length of 1"):
        check(make_case(groups=2, tokens=3), torch.float32, "vanilla", backend=name)
    forget_choices()


def test_cudnns_backward_is_not_called_for_a_single_query(monkeypatch):
    """It gives NaN on Hopper where the LSE is far below 0."""
    cudnn = backend_named("cudnn")
    monkeypatch.setattr(type(cudnn), "supports", lambda *_: None)
    monkeypatch.setattr(cudnn, "launch_forward", EagerBackend().forward)
    monkeypatch.setattr(cudnn, "launch_backward", lambda *_: [torch.full((), torch.nan)] * 3)
    forget_choices()
    check(make_case(tokens=1, keys=128), torch.float32, "vanilla", backend="cudnn", causal=False)
    forget_choices()


def test_the_request_at_run_time_knows_about_determinism():
    assert not at_runtime(CPU, None).deterministic
    torch.use_deterministic_algorithms(True)
    try:
        assert at_runtime(CPU, None).deterministic
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_backend_joins_the_registry(monkeypatch):
    monkeypatch.setattr(registry, "_REGISTRY", dict(registry._REGISTRY))
    forget_choices()

    class Doubled(EagerBackend):
        name = "doubled"

        def supports(self, request):
            return "only for heads of 7" if request.head_dim != 7 else None

        def forward(self, *args, **kwargs):
            out, lse = super().forward(*args, **kwargs)
            return 2 * out, lse

    register_backend(Doubled(), before="flash-cpu")
    assert backend_names()[0] == "doubled"
    assert choose_backend(CPU).reasons["doubled"] == "only for heads of 7"
    query = torch.randn(1, 1, 4, 7)
    ours = attention(query, query, query, with_gate=False)
    plain = attention(query, query, query, with_gate=False, backend="eager")
    torch.testing.assert_close(ours.out_BHTD, 2 * plain.out_BHTD)
    monkeypatch.undo()
    forget_choices()


def test_float16_trains_on_the_backend_that_can():
    case = make_case(dtype=torch.float16)
    for variant in ("vanilla", "sink"):
        check(case, torch.float16, variant, window=9)
    tensors = [t.half().requires_grad_() for t in (case.query, case.key, case.value)]
    with pytest.raises(ConfigError, match="float16 cannot hold"):
        attention(*tensors, backend="flash-cpu")
    # Without the gate the kernel will do, until a gradient of the LSE arrives at it.
    out, lse, _ = attention(*tensors, backend="flash-cpu", with_gate=False)
    out.sum().backward(retain_graph=True)
    with pytest.raises(ConfigError, match="float16 cannot hold"):
        lse.sum().backward()


def test_a_request_at_run_time_is_refused_too():
    query = torch.randn(1, 2, 4, 8)
    with pytest.raises(ConfigError, match="not on cpu"):
        attention(query, query, query, backend="flash-cuda")
    with pytest.raises(ConfigError, match="needs the causal mask"):
        attention(query, query, query, window=2, causal=False)


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ([(1, 4, 5, 8), (1, 3, 5, 8), (1, 3, 5, 8)], "4 query heads are not a multiple of 3"),
        ([(1, 4, 5, 8), (2, 4, 5, 8), (2, 4, 5, 8)], "must agree"),
        ([(1, 4, 5, 8), (1, 4, 5, 8), (1, 4, 6, 8)], "must agree"),
        ([(1, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 16)], "head dim of values must be 1 to 8"),
        ([(1, 4, 5, 8), (1, 4, 5, 8), (1, 4, 5, 0)], "head dim of values must be 1 to 8"),
        ([(1, 4, 6, 8), (1, 4, 5, 8), (1, 4, 5, 8)], "6 queries .* not 5"),
        ([(1, 4, 0, 8), (1, 4, 0, 8), (1, 4, 0, 8)], "0, 8"),
        ([(4, 5, 8), (4, 5, 8), (4, 5, 8)], r"\[batch, heads, tokens, head dim\]"),
    ],
)
def test_shapes_that_do_not_fit(shapes, message):
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(shape) for shape in shapes))


def test_sinks_that_do_not_fit():
    query = torch.zeros(1, 2, 3, 8)
    with pytest.raises(ValueError, match="sink_H"):
        attention(query, query, query, variant="sink")
    with pytest.raises(ValueError, match="sink_H"):
        attention(query, query, query, sink_H=torch.zeros(2))
    with pytest.raises(ValueError, match=r"must be \[2\] in torch.float32"):
        attention(query, query, query, variant="sink", sink_H=torch.zeros(2).bfloat16())
    with pytest.raises(ValueError, match="have one dtype and device"):
        attention(query, query, query.double())


def test_gate_sum_counts_real_tokens_in_float32():
    gate = torch.rand(2, 3, 5).bfloat16()
    gate[1, :, 4] = torch.nan
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, 4] = False
    gate.requires_grad_()
    total = gate_sum(gate, mask)
    assert total.dtype is torch.float32
    torch.testing.assert_close(total, gate.detach().float()[:, :, :].nan_to_num(0).sum((0, 2)))
    total.sum().backward()
    assert torch.equal(gate.grad[:, 0].bool(), mask)
    assert torch.isnan(gate_sum(gate)).all()
