"""Every call of attention that the host side can show, forward and backward."""

import pytest


@pytest.mark.parametrize(
    "every",
    [7, pytest.param(1, marks=pytest.mark.later)],  # 7: of no axis is a value left out
)
@pytest.mark.parametrize(
    ("backend", "dtype"),
    [
        ("flash-cuda", "bfloat16"),
        ("eager", "bfloat16"),
        ("eager", "float32"),
        ("eager", "float16"),
        ("auto", "bfloat16"),
    ],
)
def test_every_call(gpu, backend, dtype, every):
    """No check of a kernel refuses it, and the host never waits for the device."""
    found = gpu.run("attention_tasks:all_calls", backend=backend, dtype=dtype, every=every)
    assert found["calls"] == -(-400 // every)
    assert found["problems"] == {}


@pytest.mark.parametrize("extra", [0, 1, 4, 8])
def test_kernels_are_given_whole_vectors(gpu, extra):
    assert gpu.run("attention_tasks:given_rows", backend="flash-cuda", extra=extra) == []


def test_the_doctor_sees_that_nothing_is_computed(gpu):
    """Every variant and type fails; a comparison on the device would find no difference."""
    passed, details = gpu.run("attention_tasks:self_tests")
    assert passed == []
    assert len(details) == 9


def test_a_kernel_is_launched_again_as_triton_would(gpu):
    """Without Triton's lookup, with the same grid, program, tensors, numbers and constants."""
    first, again = gpu.run("attention_tasks:launched_again")
    assert first["lookups"] > 0
    assert again["lookups"] == 0
    assert len(first["launches"]) > 20
    assert first["launches"] == again["launches"]
