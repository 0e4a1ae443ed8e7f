"""The gate kernels in Triton: in its interpreter, compiled for A100 and H100, and as a choice.

No GPU is needed: the interpreter computes the numbers on a CPU, and the compiler counts registers,
spills and the width of memory accesses. What neither shows is for tests/gpu.
"""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megasink.attention import (
    AttentionRequest,
    attention,
    choose_backend,
    choose_gate_kernels,
    first_key_gate,
)
from megasink.attention.call import Arriving, AttentionCall, Results
from megasink.attention.gate_kernels import FirstKey, gate_kernels_named, triton_gate_kernels
from megasink.attention.kernels import forget_choices
from megasink.errors import ConfigError

BF16 = torch.bfloat16
A100 = AttentionRequest("cuda", BF16, 128, compute_capability=(8, 0))


@pytest.fixture(autouse=True)
def _forget_choices():
    forget_choices()
    yield
    forget_choices()


@pytest.mark.parametrize("tier", ["not later", "later"])
def test_in_tritons_interpreter(tier):
    """Numbers against PyTorch's and against float64, and whose memory is written."""
    pytest.importorskip("triton")
    names = ("interpreted_gate_kernels.py", "interpreted_memory.py", "interpreted_far.py")
    paths = [str(Path(__file__).with_name(name)) for name in names]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        *paths,
        "-m",
        tier,
    ]
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
    assert "skipped" not in run.stdout


# Registers of a thread: 128 of them in 8 and 4 blocks per SM.
LIMITS = {
    "close_slot_kernel": 64,
    "open_slot_kernel": 128,
    "restore_kernel": 64,
    "first_query_kernel": 64,
    "first_rows_kernel": 64,
    "share_kernel": 64,
    "apply_gate_kernel": 64,
    "apply_gate_backward_kernel": 128,
}


@pytest.fixture
def recorded(monkeypatch, tmp_path):
    """The kernels, each a recorder; Triton's cache is the test's own."""
    pytest.importorskip("triton")
    from megasink.attention.gate_kernels import (
        triton_explicit,
        triton_first_key,
        triton_shares,
        triton_slot,
    )
    from tests.attention.launched_kernels import Recorder

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    recorders = {}
    for name in LIMITS:
        modules = (triton_slot, triton_first_key, triton_shares, triton_explicit)
        module = next(module for module in modules if hasattr(module, name))
        recorders[name] = Recorder(getattr(module, name))
        monkeypatch.setattr(module, name, recorders[name])
    return recorders


def _tensors(head_dim, dtype, heads=6, tokens=130):
    """Query, out, incoming gradient: [s, b, h, d] seen as [b, h, s, d]."""
    shape = (tokens, 1, heads, head_dim)
    return (torch.zeros(shape, dtype=dtype).permute(1, 2, 0, 3) for _ in range(3))


def _launch_slot(head_dim, dtype, value):
    kernels = gate_kernels_named("triton")
    query, out, grad_out = _tensors(head_dim, dtype)
    statistics = torch.zeros(out.shape[:3])
    logit, slot_value = torch.zeros(1, 6, 1), torch.zeros(1, 6, 1, head_dim) if value else None
    results = kernels.slot_forward(query, out, statistics, logit, slot_value)
    assert results.out_BHTD.data_ptr() == out.data_ptr()  # in place
    arriving = Arriving(grad_out, statistics, statistics)
    with kernels.slot_backward(arriving, results, logit, slot_value, inject=True):
        pass


def _launch_first_key(head_dim, dtype, documents=None):
    kernels = gate_kernels_named("triton")
    query, rows, grad_out = _tensors(head_dim, dtype)
    first = FirstKey(query, query[:, ::3, :1], query[:, ::3, :1], keys=130, alone=1)
    if documents is not None:
        first = FirstKey(query, query[:, ::3], query[:, ::3], 130, 0, 0, documents)
    statistics, alone = torch.zeros(rows.shape[:3]), first.alone
    call = AttentionCall(None, scale=0.1)
    closed = kernels.first_key_forward(first, (rows[:, :, alone:], statistics[..., alone:]), call)
    arriving = Arriving(grad_out, None, statistics)
    around = kernels.first_key_backward(arriving, Results(*closed), first, 0.1, inject=True)
    with around as before:
        before.add_to_query(rows[:, :, alone:], torch.zeros_like(query))
        before.fill_first_rows(query[:, ::3], query[:, ::3])


def _assert_fast(recorders, capability, dtype):
    """Registers, spills, shared memory, and 16 bytes per access to what is D wide."""
    launched = {name: recorder for name, recorder in recorders.items() if recorder.launches}
    for name, recorder in launched.items():
        compiled = recorder.compile(capability)
        usage, (_, given, _) = compiled.usage, recorder.launches[-1]
        assert usage["REG"] <= LIMITS[name], (name, usage)
        assert usage["STACK"] == usage["LOCAL"] == 0, (name, usage)
        # As many programs fit an SM by their shared memory.
        assert compiled.shared <= 8192
        if name in ("restore_kernel", "first_rows_kernel") or (
            name == "share_kernel" and given["query"] is None
        ):
            continue
        # Of each tile a thread of 128 moves its share in instructions of 16 bytes.
        tile = given["ROWS"] * given["COLUMNS"] * dtype.itemsize // (128 * 16)
        wide = {"rows_out", "query", "grad_out", "x", "rows"}
        if name == "open_slot_kernel":
            wide.add("out")
        if given.get("ELEMENTWISE"):
            wide.add("score")
        loads = tile * sum(given.get(tensor) is not None for tensor in wide)
        assert compiled.accesses["ld", 16] >= loads, (name, compiled.accesses)
        if name == "share_kernel":
            loads = tile * (2 if given["starts"] is not None else 1)
        stores = {
            "first_query_kernel": 1,
            "close_slot_kernel": 1,
            "apply_gate_kernel": 1,
            "apply_gate_backward_kernel": 1,
        }
        if given.get("ELEMENTWISE") and name == "apply_gate_backward_kernel":
            stores[name] = 2
        assert compiled.accesses["st", 16] == tile * stores.get(name, 0)


@pytest.mark.parametrize(("head_dim", "capability"), [(64, 80), (128, 80), (128, 90)])
def test_compiled_for_the_slot(recorded, head_dim, capability):
    _launch_slot(head_dim, BF16, value=False)
    _assert_fast(recorded, capability, BF16)


@pytest.mark.parametrize(("head_dim", "dtype"), [(40, BF16), (128, torch.float32)])
def test_compiled_for_a_slot_with_a_value_and_other_head_dims(recorded, head_dim, dtype):
    _launch_slot(head_dim, dtype, value=True)
    _assert_fast(recorded, 80, dtype)


@pytest.mark.parametrize(("head_dim", "capability"), [(128, 80), (128, 90), (256, 80)])
def test_compiled_for_the_first_key(recorded, head_dim, capability):
    for documents in (None, (0, 50, 130)):
        _launch_first_key(head_dim, BF16, documents)
        _assert_fast(recorded, capability, BF16)


@pytest.mark.parametrize("capability", [80, 90])
def test_compiled_for_the_shares(recorded, capability, monkeypatch):
    """Of a sink that is in the LSE; of the first key, of one document and of several."""
    statistics, logit = torch.zeros(1, 6, 130), torch.zeros(1, 6, 1)
    gate_kernels_named("triton").shares(statistics, logit)
    _assert_fast(recorded, capability, BF16)
    monkeypatch.setattr("megasink.attention.lse_statistics._in_triton", lambda _: True)
    for cu_seqlens in (None, (0, 50, 130)):
        query, _, _ = _tensors(128, BF16)
        first_key_gate(query, query[:, ::3], statistics, cu_seqlens=cu_seqlens)
        _assert_fast(recorded, capability, BF16)


@pytest.mark.parametrize(("head_dim", "width"), [(128, 1), (128, 128), (40, 40)])
def test_compiled_for_an_explicit_gate(recorded, head_dim, width):
    x, grad_out, _ = _tensors(head_dim, BF16)
    score, _, _ = _tensors(width, BF16)
    leaves = [x.requires_grad_(), score.requires_grad_()]
    out, gate = gate_kernels_named("triton").gate_rows(*leaves, "sigmoid", "multiply")
    torch.autograd.grad([out, gate], leaves, [grad_out, torch.zeros_like(gate)])
    _assert_fast(recorded, 80, BF16)


def test_the_launches_of_a_forward_and_backward(recorded):
    """One after the forward, two around the backward, and the sum of the logit's gradient."""
    _launch_slot(128, BF16, value=False)
    assert [len(recorder.launches) for recorder in recorded.values()] == [1, 1, 1, *[0] * 5]


@pytest.fixture
def toolchain(monkeypatch):
    """Triton and what it needs are there."""
    pytest.importorskip("triton")
    monkeypatch.setattr(triton_gate_kernels, "_toolchain_reason", lambda: None)


@pytest.mark.usefixtures("toolchain")
def test_triton_is_chosen_on_a_gpu_and_pytorch_on_request():
    choice = choose_gate_kernels(A100)
    assert choice.name == "triton"
    assert choice.reasons == {"torch": "triton comes first"}
    for kernel in ("auto", "flash-cuda"):
        choice = choose_gate_kernels(A100, f"{kernel}+torch")
        assert choice.name == "torch"
        assert choice.reasons == {"triton": "torch was requested"}
        assert choose_backend(A100, f"{kernel}+torch").name == choose_backend(A100, kernel).name


@pytest.mark.usefixtures("toolchain")
@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (replace(A100, device_type="cpu"), "run on CUDA devices, not on cpu"),
        (replace(A100, compute_capability=(7, 5)), "8.0 or later, but the device has 7.5"),
        (replace(A100, dtype=torch.float64), "not in torch.float64"),
        (replace(A100, distance_bias=True), "do not support a distance bias"),
    ],
)
def test_refusals(request_, reason):
    choice = choose_gate_kernels(request_)
    assert choice.name == "torch"
    assert reason in choice.reasons["triton"]
    with pytest.raises(ConfigError, match=reason):
        choose_gate_kernels(request_, "auto+triton")


def test_a_machine_that_cannot_build_tritons_launcher_is_named(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(triton_gate_kernels.shutil, "which", lambda name: None)
    triton_gate_kernels._toolchain_reason.cache_clear()
    try:
        assert "C compiler: install gcc" in choose_gate_kernels(A100).reasons["triton"]
        triton_gate_kernels._toolchain_reason.cache_clear()
        forget_choices()
        monkeypatch.setattr(triton_gate_kernels.shutil, "which", lambda name: f"/usr/bin/{name}")
        monkeypatch.setattr(
            triton_gate_kernels.sysconfig, "get_paths", lambda: {"include": "/nowhere"}
        )
        assert "/nowhere/Python.h is missing" in choose_gate_kernels(A100).reasons["triton"]
    finally:
        triton_gate_kernels._toolchain_reason.cache_clear()


def test_without_triton(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    assert "triton is not installed" in choose_gate_kernels(A100).reasons["triton"]


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match=r"unknown gate kernels 'cuda': choose triton, torch"):
        attention(*torch.zeros(3, 1, 1, 2, 8), backend="auto+cuda")
