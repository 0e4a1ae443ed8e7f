"""Mistakes of hosts are named by the second step, and a step that is repeated counts once."""

import numpy as np

from tests.distributed.layout import Layout

TASKS = "tests.megatron.misuse_tasks"


def test_every_mistake_is_named(pool):
    (found,) = pool.run(f"{TASKS}:misuses", Layout())
    assert found["keeps its specs"]
    assert found["causal"] == "nothing"
    assert "[1, 1, 12, 12] is not causal" in found["documents"]
    assert "layers [2] did not, and" in found["eval"]
    assert "of 2 attention layers" in found["stock"]
    assert "decoder.layers.1.self_attention" in found["stock, schedule"]
    assert "num_layers is 2" in found["short"]
    assert "4 layers" in found["short"]
    (said,) = found["no call"]
    assert said.startswith("a HeadBalance is attached to the config, but some layers are not")
    assert found["spec itself"] == (True, {0: 2})
    assert found["same model"]


def test_padding_that_a_host_marks_does_not_count(pool):
    (found,) = pool.run(f"{TASKS}:padding", Layout())
    (padded, its_grads, _), (wanted, grads, _) = found["padded"], found["unpadded"]
    np.testing.assert_allclose(padded, wanted, rtol=1e-5, atol=1e-6)
    assert abs(found["unmarked"][0] - wanted).max() > 1e-3
    warned = found["unmarked"][2]
    assert warned == [
        "2 of 2 rows end with 3 or more equal tokens, which count in the head "
        "importance: mark padding with set_real_tokens of the HeadBalance"
    ]
    assert found["padded"][2] == found["unpadded"][2] == []
    assert len(grads) >= 6
    for name, grad in grads.items():
        error = np.linalg.norm(its_grads[name] - grad)
        assert error <= 1e-5 * np.linalg.norm(grad), name


def test_a_step_that_is_repeated_after_an_exception_counts_once(pool):
    (found,) = pool.run(f"{TASKS}:repeated", Layout())
    number, importance = found["whole"]
    assert number == 1
    for name, (other, its_importance) in found.items():
        assert other == number, name
        assert np.array_equal(its_importance, importance), name


def test_a_step_of_a_schedule_that_is_repeated_counts_once(pool):
    """Its gradients are dropped with DDP's buffers, and so are its gates."""
    (found,) = pool.run(f"{TASKS}:repeated_schedule", Layout())
    whole, broken = found["whole"], found["broken"]
    assert broken[0] == whole[0] == 2
    for mine, exact in zip(broken[1:], whole[1:], strict=True):
        assert np.array_equal(mine, exact)


def test_a_mask_of_documents_is_refused_on_context_parallel_ranks_too(pool):
    for causal, documents, rows in pool.run(f"{TASKS}:masks_of_ranks", Layout(cp=2)):
        assert causal == "nothing"
        assert "[1, 1, 6, 12] is not causal" in documents
        assert "[1, 1, 12, 12] is not causal" in rows


def test_layers_read_their_options_from_their_own_config(pool):
    (found,) = pool.run("tests.megatron.two_config_tasks:two_configs", Layout())
    assert found["main config"]
    assert found["kinds"] == ["SelfAttention", "GatedSelfAttention"]
    assert found["windows"] == [None, 4]
    first, second = found["of each"]
    np.testing.assert_allclose(found["importance"][0], first, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(found["importance"][1, :2], second, rtol=1e-6, atol=1e-6)
    assert np.isnan(found["importance"][1, 2:]).all()
    assert not np.isnan(found["imbalance"]).any()
    compared = 0
    for mine, exact in zip(found["found"], found["wanted"], strict=True):
        for name, grad in exact.items():
            if (size := np.linalg.norm(grad)) > 0:
                compared += 1
                assert np.linalg.norm(mine[name] - grad) <= 2e-5 * size, name
    assert compared >= 4
