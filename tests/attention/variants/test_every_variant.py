"""Every attention variant that is registered, and one from a module outside of the package.

Not covered: CUDA.
"""

import pytest
import torch

from megasink.attention.variants import variants
from tests.distributed.layout import SINGLE, Layout

TASKS = "tests.attention.variants.tasks"
OUTSIDE = "sink-per-group"
KINDS = {kind: record for record in variants() for kind in record.kinds} | {OUTSIDE: None}


@pytest.mark.parametrize("kind", KINDS)
def test_analysis_generation_and_export_are_those_of_the_model_that_trained(pool, tmp_path, kind):
    # The one from outside trains on two ranks, each with the sinks of its groups.
    layout = Layout(tp=2) if kind == OUTSIDE else SINGLE
    trained = pool.run(f"{TASKS}:trained", layout, folder=str(tmp_path / "run"), kind=kind)[0]
    (found,) = pool.run(f"{TASKS}:used", SINGLE, folder=str(tmp_path), kind=kind)
    importance = torch.from_numpy(trained["importance"])
    assert importance.std() > 0.005  # heads differ
    close(found["importance"], importance)
    record = KINDS[kind]
    if record is None or record.always_gated:
        close(found["slot"], 1 - importance)
        assert (found["slot"] > 1e-3).all()
    else:
        assert (found["slot"] == 0).all()
        close(found["first key"], trained["first key"])
        if not record.explicit_gate:
            close(found["first key"], 1 - importance)
    assert found["generated"]
    if record is None:
        assert (
            "--attention-variant sink-per-group: its record has no export rule" in found["export"]
        )
        assert "not --attention-variant sink-per-group" in found["dynamic"][0]
        return
    export = found["export"]
    assert 0 < export["logits"] <= export["tolerance"]
    assert export["generated"] == 1
    assert export["equal"]
    assert record.dynamic_inference == (found["dynamic"] == [])


def close(found, expected):
    torch.testing.assert_close(
        torch.as_tensor(found).double(), torch.as_tensor(expected).double(), rtol=0, atol=1e-5
    )


def test_the_sinks_of_groups_are_logged_for_every_head(pool):
    (one,) = pool.run(f"{TASKS}:logged_sinks", SINGLE)
    assert one.tolist() == [[1, 1, -2, -2], [2, 2, -1, -1]]
    for logged in pool.run(f"{TASKS}:logged_sinks", Layout(tp=2)):
        assert logged.tolist() == one.tolist()


def test_what_a_record_does_not_say_is_refused_by_name(pool):
    (found,) = pool.run(f"{TASKS}:unstated", SINGLE)
    assert "'mystery' needs slot_value" in found["balance loss"]
    assert "--attention-variant mystery: its record has no slot_logit" in found["analysis"]
    assert "'mystery' has a slot, so its attend must return a gate" in found["no gate"]
    assert "not --attention-variant mystery" in found["inference"][0]


def test_groups_that_ranks_do_not_divide_are_refused(pool):
    for said in pool.run(f"{TASKS}:refused_layout", Layout(tp=2)):
        assert said == "the 1 rows of group_sink are not divisible by 2 tensor-parallel ranks"


def test_a_run_whose_variant_is_not_registered_is_refused(pool, tmp_path):
    folder = str(tmp_path / "run")
    pool.run(f"{TASKS}:trained", SINGLE, folder=folder, kind=OUTSIDE)
    (said,) = pool.run(f"{TASKS}:unregistered", SINGLE, run_folder=folder)
    assert "--attention-variant 'sink-per-group' is unknown: choose vanilla, sink" in said
    assert "--plugin" in said
