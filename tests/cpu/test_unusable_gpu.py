"""A GPU that PyTorch cannot use is named; the CPU platform does not take its place in silence."""

import sys
from types import SimpleNamespace

import pytest
import torch

from megasink import cpu
from megasink.cli import doctor
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


def test_doctor_says_it(driver, capsys):
    driver(RuntimeError(TOO_OLD))
    assert doctor.main(["--no-self-test"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "found version 12080" in printed
    assert "using the CPU platform" not in printed
