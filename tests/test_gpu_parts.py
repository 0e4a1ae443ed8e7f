"""Parts of ``make gpu`` that run tests: continued test by test, past one that ends its process.

Not covered: a device that CUDA reports as broken; a stand-in of torch does.
"""

import os
import subprocess
import sys

from tests.test_gpu_report import MACHINE, ROOT, states
from tests.test_gpu_report import gpu as gpu  # a fixture


def test_a_stopped_part_continues_test_by_test(tmp_path):
    """The tests of one kernel; one that passed in an earlier call is not run again."""
    source = tmp_path / "test_some.py"
    source.write_text("""
import pytest
@pytest.mark.parametrize("kernel", ["one", "two"])
def test_of_kernels(kernel): pass
def test_of_none(): pass
def test_fails(): assert False
""")
    command = [sys.executable, "-m", "pytest", "-p", "tests.gpu.parts", "--noconftest"]
    command += ["-c", os.devnull, "-p", "no:cacheprovider", "-v", f"--rootdir={tmp_path}"]
    command += ["--passed", str(tmp_path / "passed"), str(source)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}

    def called(*options):
        line = [*command, *options]
        done = subprocess.run(line, env=environment, capture_output=True, text=True, check=False)
        return done.returncode, {
            line.split("::")[1].split()[0] for line in done.stdout.splitlines() if "%]" in line
        }

    assert called("--kernel", "two") == (0, {"test_of_kernels[two]"})
    assert called("--kernel", "two") == (0, set())
    assert called("--kernel", "none") == (1, {"test_of_none", "test_fails"})
    assert called("--kernel", "none") == (1, {"test_fails"})
    assert called() == (1, {"test_of_kernels[one]", "test_fails"})


def test_tests_go_on_after_one_that_breaks_the_device(gpu, tmp_path):
    """Or that hangs, or ends the process: the part fails, and all other tests run."""
    (tmp_path / "test_some.py").write_text("""
import os
import sys
import time
import pytest
from types import SimpleNamespace
@pytest.mark.parametrize("number", range(2))
def test_good(number): pass
def test_breaks():
    def lost(): raise RuntimeError("an illegal memory access was encountered")
    cuda = SimpleNamespace(is_initialized=lambda: True, synchronize=lost)
    sys.modules["torch"] = SimpleNamespace(cuda=cuda, manual_seed=lambda _: None)
    lost()
def test_after_it(): assert "torch" not in sys.modules
def test_hangs(): time.sleep(600)
def test_ends(): os._exit(0)
def test_fails(): assert False
def test_last(): pass
""")
    line = ("-m", "pytest", "-p", "tests.gpu.parts", "--noconftest", "-c", os.devnull, "-q")
    line += ("-p", "no:cacheprovider", f"--rootdir={tmp_path}", "--passed", "{folder}.passed")
    line += ("--running", "{folder}/running", "--hang=2", str(tmp_path / "test_some.py"))
    one = gpu.Part("some", "Some", line, 600)
    assert gpu.run_parts([one], tmp_path, MACHINE) == 1
    assert states(tmp_path) == {"some": "failed"}
    names = [line.split("::")[1] for line in (tmp_path / "some.passed").read_text().splitlines()]
    assert names == ["test_good[0]", "test_good[1]", "test_after_it", "test_last"]
    log = (tmp_path / "some.log").read_text()
    lost = log.split("ended the process or broke the device: ")[-1].splitlines()[0]
    assert [name.split("::")[1] for name in lost.split(", ")] == [
        "test_breaks",
        "test_ends",
        "test_hangs",
    ]
    assert "an illegal memory access" in log
    assert "in test_hangs" in log
