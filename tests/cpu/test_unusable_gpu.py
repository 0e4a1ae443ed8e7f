"""A GPU that PyTorch cannot use is named; the CPU platform does not take its place in silence."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megasink import cpu
from megasink.cli import doctor
from megasink.cli.device_flag import device_problems
from megasink.cpu import prepare_process
from megasink.errors import UserError

TOO_OLD = "The NVIDIA driver on your system is too old (found version 12080). Please update it."


@pytest.fixture
def driver(monkeypatch):
    """Makes torch.cuda.init raise; the environment hides no device."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(cpu, "_active", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    def fails_with(error):
        def init():
            raise error

        monkeypatch.setattr(torch.cuda, "init", init)

    return fails_with


def test_an_old_driver_is_refused(driver, monkeypatch):
    driver(RuntimeError(TOO_OLD + "\nand more lines"))
    monkeypatch.setattr(cpu, "activate", lambda: pytest.fail("fell back to the CPU"))
    with pytest.raises(UserError) as error:
        prepare_process.prepare_process()
    for part in ("found version 12080", "580 or later", "CUDA_VISIBLE_DEVICES=''"):
        assert part in str(error.value)
    assert "and more lines" not in str(error.value)


def test_the_cpu_can_be_asked_for(driver, monkeypatch):
    driver(RuntimeError(TOO_OLD))
    activated = []
    monkeypatch.setattr(cpu, "activate", lambda: activated.append(True))
    applied = SimpleNamespace(fix_upstream=lambda: None)
    monkeypatch.setitem(sys.modules, "megasink.upstream.apply_fixes", applied)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # so that it is restored
    prepare_process.prepare_process("cpu")
    assert activated


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Found no NVIDIA driver on your system. Please check"),
        RuntimeError("No CUDA GPUs are available"),
        RuntimeError("Cannot re-initialize CUDA in forked subprocess. To use CUDA"),
        AssertionError("Torch not compiled with CUDA enabled"),
    ],
    ids=["no driver", "no device", "fork", "CPU build"],
)
def test_without_a_gpu_nothing_is_reported(driver, error):
    driver(error)
    assert cpu.unusable_gpu() is None


@pytest.mark.parametrize("device", [None, "cuda", "cuda:3"])
def test_an_analysis_does_not_take_the_cpu_instead(driver, device):
    driver(RuntimeError(TOO_OLD))
    (problem,) = device_problems(device)
    assert "found version 12080" in problem
    assert device_problems("cpu") == []


@pytest.mark.parametrize(
    ("capability", "built", "fits"),
    [
        ((7, 0), "sm_75 sm_80 sm_90", False),
        ((8, 9), "sm_75 sm_86 sm_90a", True),
        ((8, 0), "sm_86 sm_90", False),
        ((10, 0), "sm_80 sm_90", False),
        ((10, 0), "sm_80 compute_90", True),
        ((12, 0), "sm_80 sm_120", True),
        ((9, 4), "gfx942", True),  # of another vendor
    ],
)
def test_a_gpu_that_pytorch_was_not_built_for(monkeypatch, capability, built, fits):
    """Its first kernel would end in "no kernel image is available for execution"."""
    monkeypatch.setattr(cpu, "_active", False)
    for name, value in {
        "is_available": True,
        "device_count": 1,
        "get_device_capability": capability,
        "get_arch_list": built.split(),
        "get_device_name": "some GPU",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reason = cpu.unusable_gpu(5)
    assert (reason is None) == fits
    if not fits:
        version = ".".join(map(str, capability))
        assert f"no kernels for some GPU, of compute capability {version}" in reason
        with pytest.raises(UserError, match="set CUDA_VISIBLE_DEVICES=''"):
            prepare_process.prepare_process()


def test_doctor_says_it(driver, capsys):
    driver(RuntimeError(TOO_OLD))
    assert doctor.main(["--no-self-test"]) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert f"FAIL PyTorch {torch.__version__} cannot use this machine's GPU: {TOO_OLD}" in printed
    assert "using the CPU platform" not in printed
