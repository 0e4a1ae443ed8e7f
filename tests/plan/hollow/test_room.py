"""The hollow GPU itself: what torch sees of it, what is counted, and what the host reads back."""

import os
import subprocess
import sys

import pytest
import torch

from megasink.errors import UserError
from megasink.plan import hollow
from megasink.plan.hollow import compile_libraries
from megasink.plan.hollow.compile_libraries import library


@pytest.mark.parametrize(("capability", "processors"), [(80, 108), (90, 132)])
def test_the_device(gpu, capability, processors):
    found = gpu.run("room_tasks:device", capability=capability, gib=40)
    assert found["capability"] == [capability // 10, capability % 10]
    assert found["processors"] == processors
    assert found["total"] == 40 << 30
    assert found["allocated"] == 39 << 30  # more than this machine has
    assert "out of memory" in found["error"]


def test_what_is_counted(gpu):
    found = gpu.run("room_tasks:events")
    assert found["read back"] == [0.0, 1.0, 2.0, 3.0]
    assert found["computed"] == [0.0] * 4  # what a kernel would have written
    lines = {(name, text) for name, text in found["waits"]}
    assert lines == {
        ("to device, pageable", "there = host.cuda()"),
        ("cudaStreamSynchronize", "there = host.cuda()"),
        ("to host, pageable", "again = there.cpu()"),
        ("cudaStreamSynchronize", "again = there.cpu()"),
        ("to host, pageable", "read = added.tolist()"),
        ("cudaStreamSynchronize", "read = added.tolist()"),
        ("cudaDeviceSynchronize", "torch.cuda.synchronize()"),
    }
    assert found["copies"] == {"to device, pageable": 1, "to host, pageable": 2, "to device": 1}
    assert found["operations"] == [2 * 2 * 2 * 2]
    assert found["kernels"] == 3  # the sum, and each side of the product to float16


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_of_many(gpu, rank):
    found = gpu.run("room_tasks:collectives", rank=rank, ranks=8)
    assert found["agreed"] == 5.0
    assert found["everyone"] == [[1.0] * 3] * 8
    assert found["gathered"] == 8
    assert found["calls"] == [
        ["ncclAllReduce", 4, 8],
        ["ncclAllGather", 3 * 4 * 8, 8],
        ["ncclAllReduce", 8 * 4, 4],
    ]


# The second of two ranks of a host, and the thread of its heartbeat. The dump is a stand-in that
# asks an event, as that of torch's first NCCL backend does (c10d/FlightRecorder.cpp, update_state).
CONTEXTS = """
import ctypes, threading, torch
from torch._C import _distributed_c10d as c10d
from megasink.plan.hollow.compile_libraries import library
from megasink.training import heartbeat
torch.cuda.set_device(1)
event = torch.cuda.Event()
event.record()
c10d._dump_fr_trace_json = lambda **_: '{"entries": []}' if event.query() else ""
thread = threading.Thread(target=heartbeat.under_way)
opened = ctypes.CDLL(library()).hollow_contexts
print(opened())
thread.start()
thread.join()
print(opened())
"""


def test_the_heartbeat_opens_no_context_on_another_device(gpu):
    """A thread begins on device 0: on each host that would be one context for every rank."""
    variables = hollow.environment(hollow.Device(count=2)) | {"LOCAL_RANK": "1"}
    command = [sys.executable, "-c", CONTEXTS]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True)
    assert done.stdout.split() == ["2", "2"], done.stderr[-2000:]


def test_the_release_of_cuda_is_that_of_torch():
    assert compile_libraries._cuda_of_torch() == torch.version.cuda


def test_every_missing_part_is_named(monkeypatch):
    for function in (compile_libraries._compiler, compile_libraries._headers):
        function.cache_clear()
    with monkeypatch.context() as patch:
        patch.setenv("CXX", "no-such-compiler")
        assert "no-such-compiler was not found" in str(hollow.missing())
    compile_libraries._compiler.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compile_libraries, "_cuda_of_torch", lambda: None)
        assert "needs a CUDA build of torch" in str(hollow.missing())
    compile_libraries._headers.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(compile_libraries, "_cuda_of_torch", lambda: "99.1")
        assert "headers of the CUDA 99 runtime" in str(hollow.missing())
    compile_libraries._headers.cache_clear()


def test_a_compiler_that_fails_is_quoted(gpu, monkeypatch, tmp_path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\necho this compiler says no >&2\nexit 1\n")
    compiler.chmod(0o755)
    compile_libraries._compiler.cache_clear()
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    try:
        with pytest.raises(UserError, match="failed: this compiler says no"):
            compile_libraries.built.__wrapped__()
    finally:
        compile_libraries._compiler.cache_clear()
    assert list((tmp_path / "megasink/hollow").iterdir()) == []


def test_a_home_that_cannot_be_written_is_named(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/none")
    with pytest.raises(UserError, match="cannot be built in /proc/none/megasink/hollow: No such"):
        compile_libraries.built.__wrapped__()


def test_a_process_without_it_says_so():
    with pytest.raises(RuntimeError, match="does not run on the hollow GPU"):
        library()
