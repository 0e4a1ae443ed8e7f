"""Which compiled Triton kernel a launch takes, without Triton's own lookup (no GPU)."""

import pytest
import torch

pytest.importorskip("triton")

from megasink.attention.gate_kernels import triton_launch
from megasink.attention.gate_kernels.triton_launch import Kernel


class Jitted(triton_launch.JITFunction):
    """Stands in for a kernel with a tensor, a stride and a constant: counts what it compiles."""

    def __init__(self, runtime=True):
        parameter = type("Parameter", (), {"do_not_specialize": runtime})
        self.params, self.arg_names = [parameter] * 2, ["x", "x_b", "D"]
        self.compiled = []

    def __getitem__(self, grid):
        def lookup(*arguments, **constants):
            self.compiled.append((arguments, constants))
            return Program(self)

        return lookup


class Program:
    function, packed_metadata = 7, None

    def __init__(self, jitted):
        self.launched = jitted.launched = []

    def run(self, *arguments):
        self.launched.append(arguments)


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    driver = type("Driver", (), {"active": type("Active", (), {"get_current_stream": lambda _: 5})})
    monkeypatch.setattr(triton_launch.triton.runtime, "driver", driver)
    kernel = object.__new__(Kernel)
    kernel.jitted, kernel._compiled = Jitted(), {}
    return kernel


X = torch.zeros(8)


def test_a_launch_of_the_same_kind_takes_the_program_with_its_own_arguments(kernel):
    kernel[(3,)](X, 4, D=8, num_warps=4)
    kernel[(2,)](X, 1, D=8, num_warps=4)
    assert len(kernel.jitted.compiled) == 1
    assert kernel.jitted.launched == [(2, 1, 1, 5, 7, None, None, None, None, X, 1, 8)]


@pytest.mark.parametrize(
    ("x", "stride", "constants"),
    [
        (X.half(), 4, {"D": 8}),
        (X[1:], 4, {"D": 8}),  # not at 16 bytes
        (None, 4, {"D": 8}),
        (X, 4.0, {"D": 8}),
        (X, 4, {"D": 16}),
    ],
    ids=["type", "alignment", "missing", "float", "constant"],
)
def test_another_kind_is_compiled(kernel, x, stride, constants):
    kernel[(3,)](X, 4, D=8)
    kernel[(3,)](x, stride, **constants)
    assert len(kernel.jitted.compiled) == 2
    assert kernel.jitted.launched == []


def test_a_number_of_more_than_31_bits_is_looked_up_by_triton(kernel):
    """A program reads it as 64 bits, and others as 32."""
    for _ in range(2):
        kernel[(3,)](X, 2**31, D=8)
    assert len(kernel.jitted.compiled) == 2


def test_a_number_that_triton_would_compile_in_is_refused(kernel):
    kernel.jitted = Jitted(runtime=False)
    with pytest.raises(AssertionError, match="compiled in"):
        kernel[(3,)](X, 4, D=8)


def test_constants_out_of_order_are_refused(kernel):
    kernel.jitted.arg_names = ["x", "x_b", "C", "D"]
    with pytest.raises(AssertionError, match="order"):
        kernel[(3,)](X, 4, D=8, C=1)


def test_the_installed_triton_was_compared_with_our_launches():
    """With the next one: run tests/plan/hollow/test_attention.py with it, then raise COMPARED."""
    assert triton_launch.looked_up_because() is None


@pytest.mark.parametrize("version", ["3.4.0", "3.5.1", "3.10.0", "4.0.0"])
def test_another_triton_launches_every_kernel_itself(kernel, monkeypatch, version):
    """Its hooks may be None (3.4), so not even these are read."""
    monkeypatch.setattr(triton_launch.triton, "__version__", version)
    reason = triton_launch.looked_up_because()
    assert reason == f"their fast launch was tested with triton>=3.6,<3.10, not with {version}"
    monkeypatch.setattr(triton_launch, "_LOOKED_UP", True)
    monkeypatch.setattr(triton_launch.knobs.runtime, "launch_enter_hook", None)
    for _ in range(2):
        kernel[(3,)](X, 4, D=8)
    assert len(kernel.jitted.compiled) == 2
    assert kernel.jitted.launched == []


@pytest.mark.parametrize("version", ["3.6.0", "3.7.1+git1", "3.9.0"])
def test_a_triton_that_was_compared_is_launched_fast(monkeypatch, version):
    monkeypatch.setattr(triton_launch.triton, "__version__", version)
    assert triton_launch.looked_up_because() is None


def test_on_rocm_a_program_depends_on_the_size_of_its_tensors(monkeypatch):
    """Above 2 GB Triton compiles another one, and the first would read elsewhere."""
    monkeypatch.setattr(torch.version, "hip", "7.0")
    assert "size of its tensors" in triton_launch.looked_up_because()
