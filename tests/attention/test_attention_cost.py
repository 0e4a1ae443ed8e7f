"""What is launched around a flash kernel, counted by benchmarks/attention_cost.py; its page."""

import importlib.util
from pathlib import Path

import pytest

from megasink.attention.call import Slot
from megasink.attention.gate_kernels import choose_gate_kernels, fused

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cost():
    """The benchmark as a module, where Triton's kernels can be chosen."""
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("cost", ROOT / "benchmarks/attention_cost.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "_toolchain_reason", lambda: None)
        choose_gate_kernels.cache_clear()
        yield module
    choose_gate_kernels.cache_clear()


# The most that the sink may add to the plain kernel's time, by the benchmark's model.
GOALS = {("A100", 4096): 0.04, ("A100", 8192): 0.02, ("H100", 4096): 0.08, ("H100", 8192): 0.04}


@pytest.mark.parametrize(("device", "tokens"), GOALS)
def test_a_sink_costs_little_where_sequences_are_long(cost, device, tokens):
    bandwidth, rate = cost.DEVICES[device]
    kernel = 3.5 * 2 * tokens**2 * 16 * 128 / rate
    count = cost.softmax_gate(Slot.GIVEN, "triton", (tokens, 16, 128))
    assert count.seconds(bandwidth) / kernel <= GOALS[device, tokens]


def test_the_launches_of_a_sink(cost):
    """O read, Y written; dO and Y read, sectors of Y written and put back; few numbers per row."""
    tokens, heads, head_dim = 1024, 16, 128
    count = cost.softmax_gate(Slot.GIVEN, "triton", (tokens, heads, head_dim))
    assert count.launches == 4
    rows = tokens * heads
    assert 4 * rows * head_dim * 2 < count.bytes < 4.7 * rows * head_dim * 2


def test_the_page_has_what_is_counted(cost):
    page = (ROOT / "megasink/attention/gate_kernels/README.md").read_text()
    shape = (4096, 16, 128)
    for name, run in {
        "sink": lambda gates: cost.softmax_gate(Slot.GIVEN, gates, shape),
        "vanilla": lambda gates: cost.softmax_gate(Slot.FIRST_KEY, gates, shape),
        "gated, headwise": lambda gates: cost.explicit_gate(1, gates, shape),
        "gated, elementwise": lambda gates: cost.explicit_gate(128, gates, shape),
    }.items():
        counts = [run(gates) for gates in ("torch", "triton")]
        launches = ", ".join(str(count.launches) for count in counts)
        size = ", ".join(f"{count.bytes / 2**20:,.0f}" for count in counts)
        assert f"| {name} | 4,096 | {launches} | {size} |" in page
