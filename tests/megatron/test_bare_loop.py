"""The heart in a bare Megatron loop: the numbers of the trainer, and nothing silent."""

import subprocess
import sys

import numpy as np
import pytest

from tests.distributed.layout import Layout
from tests.distributed.pool import ROOT, free_port

TASKS = "tests.megatron.tasks"
LAYOUTS = {
    "one": {"tp": 1, "pp": 1, "cp": 1},
    "tp": {"tp": 2, "pp": 1, "cp": 1},
    "pp": {"tp": 1, "pp": 2, "cp": 1},
    "cp": {"tp": 1, "pp": 1, "cp": 2},
    "dp": {"tp": 1, "pp": 1, "cp": 1},
}
FLAGS = {
    "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size",
}
VARIANTS = ("sink", "vanilla", "gated")
SCOPES = ("global", "data-parallel", "microbatch")
COEFF = 1e3  # large: at the start heads hardly differ, and the loss must show in the gradient norm
# Every pair of layout, variant and scope; `make test-all` runs more than one of a layout.
PAIRS = [
    (where, variant, SCOPES[(i + j) % 3])
    for i, where in enumerate(LAYOUTS)
    for j, variant in enumerate(VARIANTS)
]
CASES = [
    pytest.param(*case, marks=[] if index % 3 == index // 3 % 3 else [pytest.mark.later])
    for index, case in enumerate(PAIRS)
]


@pytest.mark.parametrize(("where", "variant", "scope"), CASES)
def test_the_bare_loop_equals_the_trainer(pool, tmp_path, where, variant, scope):
    options = {"attention_variant": variant, "head_balance_scope": scope}
    _equals_the_trainer(pool, tmp_path, where, options, {})


@pytest.mark.parametrize(("where", "variant", "scope"), CASES)
def test_a_hybrid_model_of_blocks_equals_a_gpt_model_to_the_bit(pool, where, variant, scope):
    """Losses, gradient norms, importances and the balance loss of four steps."""
    options = {"attention_variant": variant, "head_balance_scope": scope}
    sizes = {"layout_": LAYOUTS[where], "ranks": 1 if where == "one" else 2}
    hybrid, gpt = (
        pool.run(
            f"{TASKS}:bare_loop",
            **sizes,
            **options,
            head_balance_coeff=COEFF,
            gpt=gpt,
            port=free_port(),
        )
        for gpt in (False, True)
    )
    assert hybrid == gpt
    assert len({step["grad_norm"] for step in hybrid[0]}) == 4


@pytest.mark.parametrize(
    ("where", "variant", "depths"),
    [("pp", "sink", 1), pytest.param("one", "gated", 2, marks=pytest.mark.later)],
)
def test_heads_of_multi_token_prediction_do_not_count(pool, tmp_path, where, variant, depths):
    """Megatron builds them from the last layer's spec, and numbers them from 1 again."""
    prediction = {"mtp_num_layers": depths}
    _equals_the_trainer(pool, tmp_path, where, {"attention_variant": variant}, prediction, gpt=True)


def _equals_the_trainer(pool, tmp_path, where, options, fields, gpt=False):
    layout, ranks = LAYOUTS[where], 1 if where == "one" else 2
    options = options | {"head_balance_coeff": COEFF}
    named = {name.replace("_", "-"): value for name, value in (options | fields).items()}
    flags = [word for name, value in named.items() for word in (f"--{name}", str(value))]
    flags += [word for name, size in layout.items() for word in (FLAGS[name], str(size))]
    sizes = {"ranks": ranks, "port": free_port()}
    more = {"fields": fields, "gpt": gpt}
    ours = pool.run(f"{TASKS}:bare_loop", layout_=layout, **more, **sizes, **options)
    sizes["port"] = free_port()
    theirs = pool.run(f"{TASKS}:trainer", flags=flags, run=str(tmp_path / "run"), **sizes)
    (wanted,) = [lines for lines in theirs if lines is not None]
    for found in ours[:ranks]:
        assert len(found) == len(wanted) == 4
        for mine, line in zip(found, wanted, strict=True):
            for name in ("lm_loss", "grad_norm"):
                assert mine[name] == pytest.approx(line[name], rel=2e-5), name
            loss, importance_LH = line["balance_loss"], np.array(line["importance"])
            # What is written has six digits.
            assert np.allclose(mine["importance"], importance_LH, rtol=1e-6, atol=5e-7)
            # An importance is rounded by 2^-24; the loss is coeff * sum of H * CV^2, CV its error.
            rounded = 2 * (loss * COEFF * importance_LH.size) ** 0.5 * 2**-24
            assert mine["balance_loss"] == pytest.approx(loss, rel=2e-5, abs=2 * rounded)


def test_steps_that_are_run_again_to_check_them_count_once(pool, tmp_path):
    """By Megatron's rerun machine, every step: the loss of each, and all that follows, is equal."""
    flags, lines = ["--head-balance-coeff", "1e3"], []
    for name, more in (("once", []), ("twice", ["--rerun-mode", "validate_results"])):
        run, port = str(tmp_path / name), free_port()
        found = pool.run(f"{TASKS}:trainer", flags=flags + more, run=run, ranks=1, port=port)
        kept = ("lm_loss", "grad_norm", "balance_loss", "importance", "imbalance")
        lines.append([{key: line[key] for key in kept} for line in found[0]])
    assert lines[0] == lines[1]


def test_the_loss_reaches_the_model(pool):
    """A coefficient that has no effect is what a host without the hook used to get."""
    sizes = {"layout_": LAYOUTS["one"], "ranks": 1, "attention_variant": "sink"}
    runs = []
    for coeff in (0.0, 100.0):
        port = free_port()
        found = pool.run(f"{TASKS}:bare_loop", **sizes, port=port, head_balance_coeff=coeff)
        runs.append(found[0])
    without, with_loss = runs
    # Coefficients of the scope "global" come from the step before: the first step has none.
    assert without[0]["grad_norm"] == with_loss[0]["grad_norm"]
    assert all(
        a["grad_norm"] != b["grad_norm"] for a, b in zip(*runs, strict=True) if a is not without[0]
    )
    assert with_loss[-1]["balance_loss"] > 0 == without[-1]["balance_loss"]


def test_whatever_a_host_leaves_out_is_named(pool):
    (told, *_) = pool.run(f"{TASKS}:not_ours", Layout())
    assert "already attached to this config" in told["twice"]
    for case in ("no options", "a copy"):
        assert "HeadBalance(config" in told[case], case
    assert "attention_varient is not a megasink option" in told["wrong options"]
    assert "head_balance_scope is 'globe', not one of global" in told["wrong options"]
    assert "attention_dropout 0.1: it breaks" in told["wrong options"]
    assert "logit_softcap has no effect in your own loop" in told["wrong options"]
    assert "cuda_graph_impl 'local': a replayed graph" in told["graphs"]
    assert "head_balance_coeff -1.0 is negative: use 0 or more" in told["bad numbers"]
    assert "head_balance_shared_refresh 2 has no effect without" in told["bad numbers"]
    assert told["not a number"] == "head_balance_coeff is nan, which is not finite"
    assert told["no factor"] == "residual_clip is -1.0: use a number above 0"
    assert "shared_heads 2 of 2 heads leaves fewer than two" in told["too many shared"]
    assert told["of another variant"] == "gate_position has no effect with attention_variant 'sink'"
    assert "softmax_type 'learnable': attention_variant 'gated'" in told["sinks"]
    assert "attention_output_gate True: attention_variant 'sink'" in told["gate"]
    assert "qk_clip True" in told["clip"]
    assert "attention_dropout 0.1" in told["late dropout"]
    assert "no loss scale, and microbatch 2" in told["no scale"]
    assert "set_loss_scale" in told["no scale"]
    assert "no loss scale, and fp16 scales the other losses" in told["no scale, fp16"]
    assert "no loss scale, and 2 context-parallel ranks" in told["no scale, ranks"]
    assert "no step has begun" in told["nothing"]
    assert "install()" in told["nothing"]
    assert "step 1 begins" in told["no reduce"]
    assert "call reduce()" in told["no reduce"]
    assert "step 0 was not committed" in told["no commit"]
    assert "call reduce()" in told["commit alone"]
    assert told["skipped"] == told["late"] == told["named"] == told["explicit"] == "nothing [2]"
    assert told["dropped"] == "nothing [2]"  # it counts, as one that fp16 skips
    assert told["dropped, not reduced"] == "nothing [1]"  # its gradients were dropped, and so it


def test_the_example_runs_by_itself():
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "megatron_loop.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("step")]
    assert done.returncode == 0, done.stderr
    assert len(lines) == 40
    assert all("loss" in line and "imbalance" in line for line in lines)
    first, last = (float(line.split("loss ")[1].split(" ")[0]) for line in (lines[0], lines[-1]))
    assert first > 4.0 > 2.5 > last
    assert len((ROOT / "examples" / "megatron_loop.py").read_text().splitlines()) <= 110


def test_a_host_may_set_and_copy_the_config(pool):
    (found, *_) = pool.run("tests.megatron.host_tasks:config_of_a_host", Layout())
    # A host that sets none reduces its gradients itself: twice would double those of norms.
    assert found["left out"] is None
    assert found["called"] == ["reduce", (3,), (4,)]
    # What Megatron's inference has to know, and a look at whether schedules run our layers.
    scale = "experimental_attention_variant_loss_scale_func"
    assert found["changed"] == {"softmax_type", scale}
    assert found["kept its class"]
    assert found["as dict"]
    assert found["found"]
    assert found["copy shares"]


def test_a_saved_config_has_the_functions_of_the_host(pool):
    """A stack that loads it allows no others."""
    (found,) = pool.run("tests.megatron.host_tasks:saved_config", Layout())
    assert "_target_: torch.is_tensor" in found["own"]
    assert found["attached"] == found["own"] == found["installed"]


def test_the_loss_is_on_under_a_copied_or_pickled_config(pool):
    (found, *_) = pool.run("tests.megatron.host_tasks:steps_of_copies", Layout())
    number, coefficient = found["itself"]
    assert number == 1
    assert coefficient < 0
    assert set(found.values()) == {found["itself"]}


@pytest.mark.parametrize(
    ("pp", "call"), [(1, "schedule"), (2, "schedule"), (1, "host"), (1, "optimizer")]
)
def test_a_model_of_another_spec_is_named(pool, pp, call):
    """The third line forgotten: the loss would be 0."""
    for message in pool.run("tests.megatron.host_tasks:other_spec", Layout(pp=pp), call=call):
        assert "HeadBalance(config)" in message
        assert "stack_spec(config)" in message
