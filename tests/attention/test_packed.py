"""Packed documents in one call of a kernel that takes their boundaries, through its stand-in."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.attention import VARIANTS, attention
from megasink.attention.kernels import backend_named, transformer_engine
from tests.attention.attention_oracle import check, evaluate, make_case
from tests.attention.stand_ins import stand_in_for
from tests.attention.test_package_backends import _forget_choices, calls, kernel

__all__ = ["_forget_choices", "calls", "kernel"]  # fixtures

CU_SEQLENS = (0, 1, 9, 9, 20, 21, 29, 37)


@pytest.mark.parametrize("queries", [37, 36, 12, 1])
@pytest.mark.parametrize("window", [None, 1, 4])
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_are_one_call(variant, window, queries, kernel, calls):
    """Of five lengths; with fewer queries the first document may have begun before them."""
    case = make_case(batch=1, tokens=queries, keys=37)
    mask = {"window": window, "cu_seqlens": CU_SEQLENS}
    roundings = 4 if queries > 1 else 16  # of a difference that cancels
    check(case, torch.float32, variant, backend=kernel, roundings=roundings, **mask)
    assert backend_named(kernel).packs
    # cuDNN's kernels leave a single query to the eager one.
    eager = queries == 1 and kernel == "transformer-engine"
    assert [len(made) for made in calls.values()] == ([0, 0] if eager else [1, 1])


@pytest.mark.parametrize(
    ("version", "capability", "packed"),
    [
        (92600, (9, 0), True),
        (92600, (10, 3), True),
        (92500, (10, 0), False),
        (92600, (8, 0), False),
        (92600, (12, 0), False),
    ],
)
def test_cudnn_takes_packed_documents_where_it_can(version, capability, packed, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: version)
    monkeypatch.setattr(transformer_engine, "compute_capability", lambda device: capability)
    assert backend_named("transformer-engine").packs == packed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("variant", VARIANTS)
def test_packed_documents_are_those_of_the_path_document_by_document(
    variant, dtype, kernel, monkeypatch
):
    """Outputs and gradients, with a gradient of gate and LSE and without."""
    case = make_case(batch=1, tokens=64, dtype=dtype, groups=1)
    cu_seqlens = (0, 3, 30, 31, 32, 64)
    for absent in ((), ("grad_lse", "grad_gate")):
        given = case.with_(**dict.fromkeys(absent))
        options = {"backend": kernel, "cu_seqlens": cu_seqlens}
        packed = evaluate(attention, given, dtype, variant, **options)
        with monkeypatch.context() as patch:
            patch.setattr(type(backend_named(kernel)), "packs", False)
            alone = evaluate(attention, given, dtype, variant, **options)
        for name, value in packed.items():
            error = (value - alone[name]).norm()
            assert error <= 8 * torch.finfo(dtype).eps * alone[name].norm(), name


class _Through(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("variant", ["vanilla", "sink"])
def test_packed_documents_in_a_dispatch_mode_and_compiled(variant, monkeypatch):
    """The custom op takes boundaries too; a compiler traces one call per document."""
    stand_in_for(monkeypatch, "flash-attn-4")
    case, options = make_case(batch=1), {"backend": "flash-attn-4", "cu_seqlens": CU_SEQLENS}
    plain = evaluate(attention, case, torch.float32, variant, **options)
    with _Through():
        traced = evaluate(attention, case, torch.float32, variant, **options)
    compiled = torch.compile(attention, backend="aot_eager", fullgraph=True)
    whole = evaluate(compiled, case, torch.float32, variant, **options)
    for name, value in plain.items():
        assert torch.equal(traced[name], value)
        torch.testing.assert_close(whole[name], value, rtol=1e-4, atol=1e-5)


def test_the_wheel_of_flash_attention_4_compiles_for_an_h100():
    """With its sink and the gradient of the LSE, of one sequence and of 24 documents."""
    if importlib.util.find_spec("flash_attn") is None:
        pytest.skip("flash-attn-4 is not installed")
    names = {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a"}
    environment = os.environ | names | {"FLASH_ATTENTION_NUM_SMS": "132"}
    command = [sys.executable, "-m", "tests.attention.compiled_flash_attention_4"]
    run = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.splitlines()[-1] == "compiled"
