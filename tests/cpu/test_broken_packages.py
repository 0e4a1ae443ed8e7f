"""An optional package that is installed and broken is named, and counts as not installed.

Not covered: the real wheels, whose failures the fake ones repeat.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch  # noqa: F401  (the test's own imports are undone)

from megasink import cpu
from megasink.attention.kernels.cuda import package_reason
from megasink.cpu import broken_packages, prepare_process
from megasink.errors import UserError
from megasink.upstream.fused_kernels import FLASH_ATTENTION_4
from megasink.upstream.patch_register import Quote

ROOT = Path(__file__).parents[2]
FAILURES = {
    "AttributeError": "raise AttributeError(\"module 'cutlass.cute.core' has no 'ThrMma'\")",
    "RuntimeError": "raise RuntimeError('libcurand.so.10 not found\\n/one/path\\n/another')",
    "OSError": "import ctypes; ctypes.CDLL('libnone.so.1')",
    "SyntaxError": "def broken(:",
    "ImportError": "raise ImportError('undefined symbol: _ZN3c10')",
}
# Prints what the process makes of its packages, after Megatron was imported.
PROBE = """
import json, sys
from megasink.cpu.prepare_process import prepare_process
prepare_process("cpu")
import megatron.core.models.common.embeddings.rope_utils
import megatron.core.transformer.attention
from megasink.attention.kernels.cuda import package_reason
from megasink.cpu import broken_packages
from megasink.upstream.fused_kernels import FLASH_ATTENTION_4
from megasink.upstream.fused_kernels import TRANSFORMER_ENGINE
from megasink.upstream.versions import have_transformer_engine
import os, torch
print(json.dumps({
    "lines": list(broken_packages.describe()),
    "te": [have_transformer_engine(), TRANSFORMER_ENGINE.missing()],
    "fa4": package_reason("flash_attn.cute.interface", "flash-attn-4"),
    "half imported": "flash_attn.cute.helper" in sys.modules,
    "filled": torch.utils.deterministic.fill_uninitialized_memory,
    "cached": os.environ["FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"],
}))
"""


def install(folder, name, version, files):
    """A distribution in a folder of the path."""
    for file, text in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def probed(folder):
    environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROBE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_megatron_is_imported_beside_broken_packages(tmp_path):
    """One process, since Megatron's import takes seconds; each package fails in its own way."""
    install(tmp_path, "transformer-engine", "2.20.2", {"transformer_engine/__init__.py": ""})
    fails = tmp_path / "transformer_engine/pytorch/__init__.py"
    fails.parent.mkdir()
    fails.write_text(FAILURES["RuntimeError"])
    cute = {
        "flash_attn/cute/helper.py": "",
        "flash_attn/cute/__init__.py": "import flash_attn.cute.helper\n"
        + FAILURES["AttributeError"],
    }
    install(tmp_path, "flash-attn-4", "4.0.0b20", cute)
    found = probed(tmp_path)
    engine, flash = found["lines"]
    assert engine.startswith(
        "transformer-engine 2.20.2 cannot be imported (RuntimeError: libcurand"
    )
    assert "/one/path" not in engine
    assert "megasink[gpu]" in engine
    assert flash.startswith("flash-attn-4 4.0.0b20 cannot be imported (AttributeError: module")
    assert FLASH_ATTENTION_4.cure in flash
    # What a flag that asks for the package is refused with.
    assert found["te"][0] is False
    assert found["te"][1] == engine
    assert found["fa4"] == flash
    assert not found["half imported"]
    assert found["filled"] is False
    assert found["cached"] == "1"


@pytest.fixture
def path(tmp_path, monkeypatch):
    """A folder for packages that only this test can import."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(broken_packages, "_refusal", broken_packages._Refusal())
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.mark.parametrize("error", FAILURES)
def test_any_error_of_an_import_is_named(path, monkeypatch, error):
    optional = broken_packages.Optional(
        "fake_kernels.deep", "fake_kernels", ("fake-kernels",), "pip x"
    )
    monkeypatch.setattr(broken_packages, "OPTIONAL", (optional,))
    files = {"fake_kernels/__init__.py": "", "fake_kernels/deep.py": FAILURES[error]}
    install(path, "fake-kernels", "1.2", files)
    broken_packages.block_broken_packages()
    (line,) = broken_packages.describe()
    assert line.startswith(f"fake-kernels 1.2 cannot be imported ({error}: ")
    assert line.endswith("pip x, or pip uninstall fake-kernels")
    for module in ("fake_kernels", "fake_kernels.deep"):
        with pytest.raises(ModuleNotFoundError) as raised:
            __import__(module)
        assert str(raised.value) == line
    broken_packages.block_broken_packages()
    assert list(broken_packages.describe()) == [line]


def test_a_missing_dependency_is_not_a_missing_package(path, monkeypatch):
    optional = broken_packages.Optional("fake_kernels", "fake_kernels", ("fake-kernels",), "pip x")
    monkeypatch.setattr(broken_packages, "OPTIONAL", (optional,))
    broken_packages.block_broken_packages()
    assert list(broken_packages.describe()) == []
    install(path, "fake-kernels", "1.2", {"fake_kernels/__init__.py": "import absent_dependency"})
    broken_packages.block_broken_packages()
    assert "No module named 'absent_dependency'" in next(broken_packages.describe())


def test_a_blocked_package_has_no_lines_to_depend_on(path, monkeypatch):
    """Or a plan would end with the name of a patch and a file that no longer exists."""
    quote = Quote("fake_kernels.deep", "value = 3")
    optional = broken_packages.Optional("fake_kernels", "fake_kernels", ("fake-kernels",), "pip x")
    monkeypatch.setattr(broken_packages, "OPTIONAL", (optional,))
    assert not quote.is_installed()
    install(path, "fake-kernels", "1.2", {"fake_kernels/__init__.py": "raise OSError"})
    assert quote.is_installed()
    broken_packages.block_broken_packages()
    assert not quote.is_installed()


def test_a_package_that_imports_stays(path, monkeypatch):
    optional = broken_packages.Optional("fake_kernels", "fake_kernels", ("fake-kernels",), "pip x")
    monkeypatch.setattr(broken_packages, "OPTIONAL", (optional,))
    install(path, "fake-kernels", "1.2", {"fake_kernels/__init__.py": "value = 3"})
    broken_packages.block_broken_packages()
    import fake_kernels

    assert fake_kernels.value == 3
    assert list(broken_packages.describe()) == []


def test_a_broken_flash_attention_2_is_named_once(path):
    """FlashAttention 4 is below the same module, and installing it again would not help."""
    files = {"flash_attn/__init__.py": FAILURES["ImportError"], "flash_attn/cute/__init__.py": ""}
    install(path, "flash-attn", "2.8.3", files)
    install(path, "flash-attn-4", "4.0.0b36", {"flash_attn/cute/interface.py": ""})
    broken_packages.block_broken_packages()
    (line,) = broken_packages.describe()
    assert line.startswith("flash-attn 2.8.3 cannot be imported (ImportError: undefined symbol")
    assert "pip install --no-build-isolation --force-reinstall --no-deps flash-attn," in line
    assert package_reason("flash_attn.cute.interface", "flash-attn-4") == line


def test_a_broken_package_that_megatron_needs_is_one_line(monkeypatch):
    """Triton: Megatron imports it without asking whether it can."""
    (triton,) = (optional for optional in broken_packages.OPTIONAL if optional.needed)
    assert triton.module == "triton"
    needs = "megasink.upstream.apply_fixes"
    monkeypatch.setitem(sys.modules, needs, None)
    for name in ("block_broken_packages", "check_versions"):
        monkeypatch.setattr(prepare_process, name, lambda: None)
    monkeypatch.setattr(cpu, "activate", lambda: None)
    reason = f"import of {needs} halted; None in sys.modules"
    monkeypatch.setattr(prepare_process, "describe", lambda: iter([reason]))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(UserError, match=f"Megatron does not start: {reason}"):
        prepare_process.prepare_process()
    monkeypatch.setattr(prepare_process, "describe", lambda: iter(()))
    with pytest.raises(ModuleNotFoundError):
        prepare_process.prepare_process()
