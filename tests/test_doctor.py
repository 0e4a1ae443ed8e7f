"""`megasink doctor`: what it says, and that what is wrong is a line and an exit code."""

import importlib.metadata
import json
import subprocess
import sys

import pytest
import torch
from packaging.requirements import Requirement

from megasink import cli
from megasink.attention import AttentionRequest, Choice, choose_backend
from megasink.attention.kernels.flash_attention import FlashAttention4Backend
from megasink.cli import doctor, doctor_self_test
from megasink.cli.doctor import BASE, packages
from megasink.upstream import fused_kernels
from tests.test_packaging import project, requirements


@pytest.fixture(autouse=True)
def metadata_of_this_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of an editable installation is as old as the installation."""
    table = project()["project"]
    texts = list(table["dependencies"])
    for extra, names in table["optional-dependencies"].items():
        texts += [f"{n}{' and' if ';' in n else ';'} extra == '{extra}'" for n in names]
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: texts)


HOPPER = AttentionRequest("cuda", torch.bfloat16, 64, compute_capability=(9, 0))


def test_a_faster_kernel_that_is_missing_has_the_command_of_its_extra():
    """Not where the device cannot run it, and by the extra's own bound."""
    if FlashAttention4Backend().supports(HOPPER) is None:
        pytest.skip("flash-attn-4 is installed")
    line = fused_kernels.faster(choose_backend(HOPPER))
    (extra,) = requirements("flash-attn-4")
    assert "flash-attn-4 should be faster here than flash-cuda" in line
    assert line.endswith(f"pip install '{extra}'")
    old = {"flash-attn-4": "it needs compute capability 9.0 or later, but the device has 8.0"}
    assert fused_kernels.faster(Choice("flash-cuda", old)) is None


def told(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict]:
    """Exit code and JSON; nothing else may be on stdout."""
    code = cli.main(["doctor", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


def test_it_says_what_runs_and_why_not_the_others(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # else the reasons are broken into many lines
    assert cli.main(["doctor", "--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert f"{importlib.metadata.version('torch')} (supported: <2.16,>=2.11)" in out
    assert "flash-cpu" in out
    assert "float16" in out
    assert "runs on CUDA" in out.replace("\n", " ")


def test_a_triton_that_was_not_compared_launches_slower(capsys, monkeypatch):
    triton = pytest.importorskip("triton")
    monkeypatch.setattr(doctor, "_device", lambda _: ("cuda", "a GPU"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    for version, slow in ((triton.__version__, False), ("3.99.0", True)):
        monkeypatch.setattr(triton, "__version__", version)
        assert cli.main(["doctor", "--no-self-test"]) == 0
        lines = capsys.readouterr().out.splitlines()
        found = [line for line in lines if line.startswith("gate kernels take longer to launch")]
        assert len(found) == slow
        assert all("3.99.0" in line for line in found)


def test_json_is_one_object_of_the_same(capsys):
    code, found = told(capsys, "--no-self-test")
    assert (code, found["ok"], found["problems"]) == (0, True, [])
    wanted = {Requirement(text).name for text in requirements()}
    listed = {each["name"]: each for each in found["packages"] if each["extra"] == BASE}
    assert listed.keys() == wanted
    assert listed["torch"]["installed"] == importlib.metadata.version("torch")
    (half,) = (k for k in found["kernels"] if "sink" in k["variants"] and k["dtype"] == "float16")
    assert half["attention"] == "eager"
    assert "float16 cannot hold" in half["not_attention"]["flash-cpu"]
    assert "self_test" not in found


@pytest.mark.parametrize(
    ("package", "version", "problem"),
    [
        (
            "transformers",
            "4.57.6",
            "transformers 4.57.6 is not supported: pip install 'transformer",
        ),
        ("torch", None, "torch is not installed: pip install 'torch<2.16,>=2.11'"),
        ("megatron-core", "0.18.1", "megatron-core 0.18.1 is not supported: pip install 'megatron"),
    ],
)
def test_what_does_not_fit_fails_with_the_line_that_fixes_it(
    capsys, monkeypatch, package, version, problem
):
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda n: version if n == package else real(n))
    code, found = told(capsys, "--no-self-test")
    assert code == 1
    assert len(found["problems"]) == 1
    assert found["problems"][0].startswith(problem)
    assert ("kernels" in found) == (package != "torch" or version is not None)


def test_an_extra_that_is_absent_is_no_failure(monkeypatch, capsys):
    real = doctor.version_of
    monkeypatch.setattr(doctor, "version_of", lambda n: None if n == "boto3" else real(n))
    assert "boto3" in {each.name for each in packages()}
    assert cli.main(["doctor", "--no-self-test"]) == 0
    line = "lacks boto3: pip install 'megasink[storage]'"
    assert line in " ".join(capsys.readouterr().out.split())


def test_a_kernel_that_loses_the_gradient_of_the_gate_fails(monkeypatch):
    """As flash kernels do; their forward pass is right."""
    real = doctor_self_test.attention

    def lossy(*tensors, **options):
        found = real(*tensors, **options)
        return found._replace(gate_BHT=found.gate_BHT.detach())

    doctor_self_test.attention_error("cpu", "sink", True, torch.float32, 32, None)
    monkeypatch.setattr(doctor_self_test, "attention", lossy)
    for dtype in (torch.float32, torch.bfloat16):
        with pytest.raises(AssertionError, match="rounding explains"):
            doctor_self_test.attention_error("cpu", "sink", True, dtype, 32, None)


def test_without_the_self_test_nothing_but_torch_is_slow():
    program = (
        "import json, sys\nfrom megasink.cli import main\nmain(['doctor', '--no-self-test'])\n"
        "slow = {'megatron', 'transformers', 'scipy', 'sklearn', 'matplotlib', 'pyarrow'}\n"
        "sys.exit(str(slow & set(sys.modules)) if slow & set(sys.modules) else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_whole_installation_passes():
    """The self-test in full, in a process of its own: Megatron's patches stay there."""
    done = subprocess.run(
        [sys.executable, "-m", "megasink", "doctor", "--json"],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, found["problems"]
    names = [check["name"] for check in found["self_test"]]
    assert "attention sink in bfloat16" in names
    assert names[-2:] == ["upstream lines that patches depend on", "training in Megatron"]
    assert all(check["passed"] for check in found["self_test"])
