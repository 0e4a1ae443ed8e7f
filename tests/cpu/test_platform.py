"""Activating the CPU platform: when, once, and back."""

import pytest

from tests.distributed.layout import Layout
from tests.distributed.pool import Pool

TASKS = "tests.cpu.tasks"


@pytest.fixture(scope="module")
def fresh():
    """What a task returns in a process in which nothing has happened but the import of torch."""
    with Pool(1, fresh=True) as worker:
        yield lambda task: worker.run("tests.cpu.prober:alone", name=task)[0]


def test_deactivate_puts_everything_back(fresh):
    found = fresh(f"{TASKS}:roundtrip")
    assert found["active"][0] is True
    assert found["active"][1].startswith("platform: CPU")
    assert found["replaced"]
    assert found["idempotent"]
    assert found["restored"]
    assert found["unchanged"] == found["not restored"] == []
    assert found["inactive"] == (False, [], "platform: CUDA")


def test_it_refuses_to_come_after_megatron(fresh):
    message = fresh(f"{TASKS}:too_late")
    assert "before megatron is imported" in message


def test_it_refuses_a_machine_with_cuda_and_touches_nothing(fresh):
    message, replaced = fresh(f"{TASKS}:with_cuda")
    assert "a CUDA device is visible" in message
    assert "--device cpu" in message
    assert replaced == 0


def test_tensors_asked_for_on_cuda_are_on_the_cpu(pool):
    found = pool.run(f"{TASKS}:devices")[0]
    assert set(found["devices"].values()) == {"cpu"}
    double = "torch.float64"
    assert found["dtypes"] == {
        "to string": "torch.float32",
        "to index": "torch.float32",
        "to keyword": double,
        "to dtype": double,
        "to other": double,
    }
    assert found["meta"] == "meta"
    assert found["type"] == "torch.cuda.FloatTensor"
    assert found["type of bf16"] == "torch.cuda.BFloat16Tensor"
    assert found["type to"] == found["type to name"] == double


def test_no_warning_for_every_forked_generator(pool):
    """Megatron warns when the CPU generator moves in fork(), which here it does by design."""
    with_filter, without = pool.run(f"{TASKS}:fork_warnings", Layout(tp=2, sp=True))[0]
    assert with_filter == 0 < without


# A mechanism of its own each, or none that makes a tensor; see cuda_tensors.py.
OTHERWISE = {"torch.Generator", "Tensor.to", "Tensor.is_pinned", "Tensor.pin_memory"}


def test_whatever_takes_a_device_is_redirected(fresh):
    found, every = fresh("tests.cpu.factories:both")
    assert set(every) - set(found) == OTHERWISE
    assert len(found) > 60
    answers = {"cpu", "read: True", "seeded: True"}
    for target, (there, without) in found.items():
        assert there in answers, f"{target}: {there}"
        assert without not in answers, f"{target} is not needed"


def test_generators_and_contexts_of_cuda(pool):
    found = pool.run(f"{TASKS}:generators")[0]
    assert found["devices"] == ["cpu"] * 4
    assert found["kept"]
    assert found["drawn"][0] == found["drawn"][1]


def test_graph_safe_states_draw_what_the_others_draw(pool):
    plain, graph_safe = pool.run(f"{TASKS}:tracked_draws")[0]
    assert plain == graph_safe
    assert len(set(plain)) == len(plain)
