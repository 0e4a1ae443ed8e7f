"""What is launched around a flash kernel, counted by benchmarks/attention_cost.py; its page."""

import importlib.util
from pathlib import Path

import pytest

from megasink.attention.call import Slot
from megasink.attention.gate_kernels import triton_gate_kernels
from megasink.attention.kernels import forget_choices

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cost():
    """The benchmark as a module, where Triton's kernels can be chosen."""
    pytest.importorskip("triton")
    spec = importlib.util.spec_from_file_location("cost", ROOT / "benchmarks/attention_cost.py")
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        spec.loader.exec_module(module)
        patch.setattr(triton_gate_kernels, "_toolchain_reason", lambda: None)
        forget_choices()
        yield module
    forget_choices()


# The most that the sink may add to the plain kernel's time, by the benchmark's model.
GOALS = {("A100", 4096): 0.04, ("A100", 8192): 0.02, ("H100", 4096): 0.08, ("H100", 8192): 0.04}


@pytest.mark.parametrize(("device", "tokens"), GOALS)
def test_a_sink_costs_little_where_sequences_are_long(cost, device, tokens):
    shape = (tokens, 16, 128)
    count = cost.softmax_gate(Slot.GIVEN, "flash-cuda", shape)
    assert cost.share(count, device, shape) <= GOALS[device, tokens]


def test_the_launches_of_a_sink(cost):
    """O read, Y written; dO and Y read, sectors of Y written and put back; few numbers per row."""
    tokens, heads, head_dim = 1024, 16, 128
    count = cost.softmax_gate(Slot.GIVEN, "flash-cuda", (tokens, heads, head_dim))
    assert count.launches == 4
    rows = tokens * heads
    assert 4 * rows * head_dim * 2 < count.bytes < 4.7 * rows * head_dim * 2


def test_the_page_has_what_is_counted(cost):
    page = (ROOT / "megasink/attention/gate_kernels/README.md").read_text()
    shape = (4096, 16, 128)
    for name, run in {
        "sink": lambda gates: cost.softmax_gate(Slot.GIVEN, f"flash-cuda+{gates}", shape),
        "vanilla": lambda gates: cost.softmax_gate(Slot.FIRST_KEY, f"flash-cuda+{gates}", shape),
        "gated, headwise": lambda gates: cost.explicit_gate(1, gates, shape),
        "gated, elementwise": lambda gates: cost.explicit_gate(128, gates, shape),
    }.items():
        counts = [run(gates) for gates in ("torch", "triton")]
        launches = ", ".join(str(count.launches) for count in counts)
        size = ", ".join(f"{count.bytes / 2**20:,.0f}" for count in counts)
        assert f"| {name} | 4,096 | {launches} | {size} |" in page


# The most that a call may take over the plain kernel on an A100 and an H100, by the same model.
MOST = {
    ("sink", "flash-attn-4"): (None, 1.02),
    ("sink, no loss", "flash-attn-4"): (None, 1.01),
    ("sink", "transformer-engine"): (1.015, 1.03),
    ("sink, no loss", "transformer-engine"): (1.01, 1.01),
    ("vanilla", "flash-attn-2"): (1.08, 1.14),
    ("vanilla", "flash-attn-4"): (None, 1.14),
    ("vanilla, statistics", "flash-cuda"): (1.01, 1.02),
    ("sink, 512 queries of 4,096 keys", "flash-cuda"): (1.05, 1.11),
    ("off-by-one", "flash-cuda"): (1.03, 1.05),
    ("off-by-one", "flash-attn-4"): (None, 1.01),
}


def test_other_calls_are_on_the_page_and_cost_at_most_what_they_promise(cost):
    page = (ROOT / "megasink/attention/gate_kernels/README.md").read_text()
    totals = {}
    for row in cost.calls():
        assert row in page
        name, kernel, *_, a100, h100 = (cell.strip() for cell in row.strip("|").split("|"))
        totals[name, kernel] = (a100, h100)
    for call, most in MOST.items():
        for total, limit in zip(totals[call], most, strict=True):
            assert limit is None or float(total) <= limit


@pytest.mark.parametrize("slot", [Slot.GIVEN, Slot.FIRST_KEY])
def test_launches_of_packed_documents_do_not_depend_on_their_number(cost, slot):
    """Those of one sequence, and two for the LSE of the rows of first keys.

    TransformerEngine's LSE of packed documents [T, H, 1] is copied in the forward and the backward.
    """
    shape = (4096, 16, 128)
    for kernel in ("flash-cuda", "flash-attn-2", "flash-attn-4", "transformer-engine"):
        launches = {
            cost.softmax_gate(slot, kernel, shape, documents=documents).launches
            for documents in (cost.PACK, (0, 100, 4096))
        }
        (packed,) = launches
        alone = cost.softmax_gate(slot, kernel, shape).launches
        copies = 2 * (kernel == "transformer-engine")
        assert packed <= alone + 2 * (slot == Slot.FIRST_KEY) + copies
