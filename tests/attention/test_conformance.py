"""The conformance of any attention: it passes what is right and finds every planted defect."""

import json
import math
from dataclasses import replace

import pytest
import torch
from rich.console import Console

from megasink import cli
from megasink.attention.conformance import (
    CASES,
    DROPPED,
    DTYPES,
    REFUSED,
    RIGHT,
    WRONG,
    check,
    kernel,
)
from megasink.attention.conformance import definition as exact
from megasink.attention.kernels import backend_names
from megasink.cli import doctor_attention
from megasink.errors import UserError
from tests.attention.conformance_page import PAGE, table
from tests.distributed.layout import SINGLE

SINKS = {case.name for case in CASES if case.sinks is not None}
WINDOWS = {case.name for case in CASES if case.window is not None}
GROUPS = {case.name for case in CASES if 1 < case.groups < 8}  # one group has no order
# Real queries never see padding after them.
LEFT = {case.name for case in CASES if case.documents[0][0][0]}
PACKED = {case.name for case in CASES if case.packed}
TWO_PACKED = {case.name for case in CASES if case.packed and case.rows > 1}
CAPPED = {case.name for case in CASES if case.softcap is not None}
DROPOUT = {case.name for case in CASES if case.dropout}
ALL = {case.name for case in CASES}


def verdicts(attend, dtype=torch.float32):
    return {case.name: check(attend, case, dtype, "cpu", 16) for case in CASES}


def definition(case, q, k, v, sink, heads=8):
    """The definition, with a draw of dropout."""
    drawn = torch.rand(q.shape[0], heads, q.shape[2], q.shape[2]).expand(-1, 8, -1, -1)
    return exact(replace(case, kept_BHTT=drawn >= case.dropout), q, k, v, sink)


def sinks_cut(case, q, k, v, sink):
    return definition(replace(case, sinks=None), q, k, v, None)


def zero_sinks_ignored(case, q, k, v, sink):
    ignored = sink is None or not sink.any()
    return definition(replace(case, sinks=None) if ignored else case, q, k, v, sink)


def sinks_added(case, q, k, v, sink):
    out, lse = definition(replace(case, sinks=None), q, k, v, None)
    return out if sink is None else out + sink[None, :, None, None], lse


def sinks_backwards(case, q, k, v, sink):
    return definition(case, q, k, v, None if sink is None else 2 * sink.detach() - sink)


def sinks_without_gradient(case, q, k, v, sink):
    return definition(case, q, k, v, None if sink is None else sink.detach())


def groups_interleaved(case, q, k, v, sink):
    k, v = (x.repeat(1, q.shape[1] // x.shape[1], 1, 1) for x in (k, v))
    return definition(case, q, k, v, sink)


def window_too_long(case, q, k, v, sink):
    window = case.window and case.window + 1
    return definition(replace(case, window=window), q, k, v, sink)


def window_ignored(case, q, k, v, sink):
    return definition(replace(case, window=None), q, k, v, sink)


def cap_ignored(case, q, k, v, sink):
    return definition(replace(case, softcap=None), q, k, v, sink)


def cap_before_scale(case, q, k, v, sink):
    cap = case.softcap and case.softcap * q.shape[-1] ** 0.5 * 1.01
    return definition(replace(case, softcap=cap), q, k, v, sink)


def dropout_ignored(case, q, k, v, sink):
    return definition(replace(case, dropout=0.0), q, k, v, sink)


def dropout_of_outputs(case, q, k, v, sink):
    out, lse = dropout_ignored(case, q, k, v, sink)
    return torch.nn.functional.dropout(out, case.dropout), lse


def dropout_doubled(case, q, k, v, sink):
    """With the scale of the right one."""
    out, lse = definition(replace(case, dropout=2 * case.dropout), q, k, v, sink)
    return out * (1 - 2 * case.dropout) / (1 - case.dropout), lse


def dropout_shared_by_heads(case, q, k, v, sink):
    return definition(case, q, k, v, sink, heads=1)


def whole(case):
    return replace(case, documents=case.whole)


def scale_ignored(case, q, k, v, sink):
    return definition(replace(case, scale=None), q, k, v, sink)


def padding_ignored(case, q, k, v, sink):
    return definition(case if case.packed else whole(case), q, k, v, sink)


def documents_mixed(case, q, k, v, sink):
    return definition(whole(case) if case.packed else case, q, k, v, sink)


def documents_of_one_row_alone(case, q, k, v, sink):
    """As transformers' flash attention reads position ids."""
    return definition(whole(case) if case.packed and case.rows > 1 else case, q, k, v, sink)


def lse_in_base_2(case, q, k, v, sink):
    out, lse = definition(case, q, k, v, sink)
    return out, lse / math.log(2)


def one_value_wrong(case, q, k, v, sink):
    out, lse = definition(case, q, k, v, sink)
    changed = torch.zeros_like(out)
    changed[0, 3, min(30, q.shape[2] - 1), 5] = 1e-3  # no padding in any case
    return out + changed, lse


def not_a_number(case, q, k, v, sink):
    out, lse = definition(case, q, k, v, sink)
    return out * torch.where(torch.arange(q.shape[2]) == q.shape[2] - 8, torch.nan, 1.0)[
        :, None
    ], lse


def other_layout(case, q, k, v, sink):
    out, lse = definition(case, q, k, v, sink)
    return out.transpose(1, 2), lse


DEFECTS = [
    (sinks_cut, DROPPED, SINKS),
    (zero_sinks_ignored, DROPPED, {"sinks of 0"}),
    (sinks_added, WRONG, SINKS),
    (sinks_backwards, WRONG, SINKS),
    (sinks_without_gradient, WRONG, SINKS),
    (groups_interleaved, WRONG, GROUPS),
    (window_too_long, WRONG, WINDOWS),
    (window_ignored, DROPPED, WINDOWS),
    (padding_ignored, DROPPED, LEFT),
    (scale_ignored, DROPPED, {"scale, sinks"}),
    (cap_ignored, DROPPED, CAPPED),
    (cap_before_scale, WRONG, CAPPED),
    (dropout_ignored, DROPPED, DROPOUT),
    (dropout_of_outputs, WRONG, DROPOUT),
    (dropout_doubled, WRONG, DROPOUT),
    (dropout_shared_by_heads, WRONG, DROPOUT),
    (documents_mixed, DROPPED, PACKED),
    (documents_of_one_row_alone, DROPPED, TWO_PACKED),
    (lse_in_base_2, WRONG, ALL),
    (one_value_wrong, WRONG, ALL),
    (not_a_number, WRONG, ALL),
    (other_layout, WRONG, ALL),
]


@pytest.mark.parametrize(
    ("defect", "verdict", "where"), DEFECTS, ids=[defect.__name__ for defect, *_ in DEFECTS]
)
def test_every_planted_defect_is_found_in_its_cases_alone(defect, verdict, where):
    found = verdicts(defect)
    assert {name for name, one in found.items() if one.verdict != RIGHT} == where
    for name in where:
        # Beside -20 only the gradient shows a sink.
        cut = defect is sinks_without_gradient and name == "sinks of -20"
        assert found[name].verdict == (DROPPED if cut else verdict), name
        assert found[name].detail, name


BROKEN = {
    "sinks": (sinks_cut, lambda case: case.sinks is not None),
    "window": (window_too_long, lambda case: case.window is not None),
    "GQA": (groups_interleaved, lambda case: 1 < case.groups < 8),
}
BESIDE = {
    "sinks": lambda case: case.sinks is not None,
    "window": lambda case: case.window is not None,
    "GQA": lambda case: case.groups < 8,
    "padding on the left": lambda case: case.documents[0][0][0] > 0,
    "padding on the right": lambda case: case.documents[0][-1][1] < case.tokens,
    "packed": lambda case: case.packed,
    "narrow values": lambda case: case.narrow,
    "several tiles": lambda case: case.tokens > 128,
}


@pytest.mark.parametrize(
    ("broken", "beside"),
    [
        (a, b)
        for a in BROKEN
        for b in BESIDE
        if a != b and (a, b) != ("GQA", "padding on the right")
    ],
)
def test_a_feature_that_is_wrong_beside_another_alone_is_found(broken, beside):
    defect, has = BROKEN[broken]
    cases = [case for case in CASES if has(case) and BESIDE[beside](case)]
    assert {check(defect, case, torch.float32, "cpu", 16).verdict for case in cases} - {RIGHT}


def test_the_detail_names_what_differs_or_was_dropped():
    found = verdicts(lse_in_base_2)["no sinks"].detail
    assert found.startswith("LSE is off by ")
    assert "output" not in found
    assert verdicts(window_ignored)["window, sinks"].detail == "window had no effect"

    def all_dropped(case, q, k, v, sink):
        return definition(replace(case, sinks=None, window=None), q, k, v, None)

    assert verdicts(all_dropped)["window, sinks"].detail == "sinks and window had no effect"
    assert "no gradient" in verdicts(lambda case, q, k, v, s: (q.detach(), None))["no sinks"].detail


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_definition_by_other_operations_is_right(dtype):
    """One softmax over keys and sink for the whole batch, with a mask; and no LSE."""

    def attend(case, q, k, v, sink):
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
        ids = torch.full((q.shape[0], q.shape[2]), -1)
        for row, documents in enumerate(case.documents):
            for number, (start, stop) in enumerate(documents):
                ids[row, start:stop] = number
        at = torch.arange(q.shape[2])
        seen = (at[:, None] >= at) & (ids[:, :, None] == ids[:, None])
        if case.window:
            seen &= at[:, None] - at < case.window
        scores = (q @ k.mT * (case.scale or q.shape[-1] ** -0.5)).float()
        if case.softcap:
            scores = case.softcap * torch.tanh(scores / case.softcap)
        scores = scores.masked_fill(~seen[:, None], -1e30)
        if sink is not None:
            slot = sink.float()[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat([scores, slot], -1)
        weights = scores.softmax(-1)[..., : q.shape[2]]
        weights = torch.nn.functional.dropout(weights, case.dropout)
        return weights.to(v.dtype) @ v, None

    found = verdicts(attend, dtype)
    assert {one.verdict for one in found.values()} == {RIGHT}, found


def test_an_attention_that_raises_is_one_line():
    def attend(case, q, k, v, sink):
        if sink is not None:
            raise RuntimeError("no sinks here:\n  use another kernel\n")
        return definition(case, q, k, v, sink)

    found = verdicts(attend)
    assert {name for name, one in found.items() if one.verdict == REFUSED} == SINKS
    assert found["GQA, sinks"].detail == "no sinks here: use another kernel"


def test_megasinks_kernels_are_right():
    assert {"flash-cpu", "eager"} <= {*backend_names()}
    for name in ("flash-cpu", "eager"):
        for dtype in DTYPES:
            found = verdicts(kernel(name), dtype)
            refused = {name for name, one in found.items() if one.verdict == REFUSED}
            assert {one.verdict for one in found.values()} == {RIGHT, REFUSED}, found
            assert refused == CAPPED | DROPOUT | {c.name for c in CASES if c.real_BT is not None}


def test_dropout_needs_outputs_that_show_every_weight():
    found = {case.name: check(definition, case, torch.float32, "cpu", 4) for case in CASES}
    assert {name for name, one in found.items() if one.verdict != RIGHT} == DROPOUT
    assert {found[name].detail for name in DROPOUT} == {"this case needs a head dim of 8 or more"}


def test_documents_and_padding_are_those_of_the_definition():
    """Positions, boundaries and masks that other attentions read are consistent."""
    for case in CASES:
        restarts = (case.positions_BT == 0).sum(1).tolist()
        assert restarts == [len(row) if case.packed else 1 for row in case.documents]
        if case.packed:
            assert len(case.boundaries) == sum(map(len, case.documents)) + 1
    (padded,) = (case for case in CASES if case.name == "padding on the left")
    assert padded.real_BT.sum(1).tolist() == [37, 48]


def test_the_table_of_the_documentation(pool):
    """Every attention that is installed here, by the command's own report."""
    (found,) = pool.run("tests.attention.conformance_page:columns", SINGLE)
    ours = found["megasink (attn_implementation)"]
    assert {name: REFUSED if name in CAPPED | DROPOUT else RIGHT for name in ALL} == ours
    page = PAGE.read_text()
    assert [line for line in table(found) if line not in page.splitlines()] == []


def test_the_command(capsys, monkeypatch):
    """Its exit codes, its object, and one line for an attention that cannot run."""

    def columns_of(name):
        code = cli.main(["doctor", "--attention", name, "--json"])
        return code, json.loads(capsys.readouterr().out)

    monkeypatch.setenv("COLUMNS", "200")
    assert cli.main(["doctor", "--attention", "flash-cpu"]) == 0
    assert "GQA, sinks" in capsys.readouterr().out
    monkeypatch.setattr(doctor_attention, "CASES", CASES[:2])
    code, found = columns_of("sdpa")
    assert code == 1
    assert [v["verdict"] for v in found["attn_implementation"]] == [RIGHT] * 2 + [DROPPED] * 2
    code, found = columns_of("eager")
    assert (code, [*found]) == (0, ["attn_implementation", "kernel"])
    assert cli.main(["doctor", "--attention", "someone/kernel"]) == 1
    out = capsys.readouterr().out
    assert "every case" in out
    assert "sinks of 0" not in out
    monkeypatch.setattr(
        doctor_attention.cpu, "cuda_present", lambda: True
    )  # without the CPU platform
    for name, words in (
        ("spda", "did you mean sdpa?"),
        ("math:sin", "not a class"),
        ("nowhere:Class", "No module named 'nowhere'"),
    ):
        with pytest.raises(UserError, match=words):
            doctor_attention.report(name, 16, Console(quiet=True))
