"""Head statistics over the microbatches of a step. Over ranks: tests/distributed."""

from tests.distributed.layout import SINGLE

TASKS = "tests.balance.tasks"


def test_importance_is_weighted_by_tokens_and_the_loss_by_microbatch(pool):
    (found,) = pool.run(f"{TASKS}:two_microbatches", SINGLE)
    assert found["importance"] == [[0.5, 0.1]] * 2
    # mean 0.3, population deviation 0.2
    assert abs(found["imbalance"] - 2 / 3) < 1e-6
    assert abs(found["balance_loss"] - 0.5 * ((1 + 3) / 2 + (2 + 3) / 2)) < 1e-6
    # the global scope has the loss of the importance: 0.5 * sum over 2 layers of 2 * (2/3)^2
    assert abs(found["global_loss"] - 0.5 * 2 * 2 * 4 / 9) < 1e-6


def test_a_step_starts_from_nothing(pool):
    (found,) = pool.run(f"{TASKS}:two_steps", SINGLE)
    assert found == [[[0.9, 0.9]], [[0.3, 0.3]]]


def test_a_pass_that_is_run_again_is_counted_once(pool):
    (found,) = pool.run(f"{TASKS}:rerun", SINGLE)
    assert found == {"importance": [[0.3, 0.3]], "received": 1}


def test_a_layer_without_a_record_is_nan_and_no_zero(pool):
    (found,) = pool.run(f"{TASKS}:missing_layer", SINGLE)
    assert found == {"first": True, "second": [0.5, 0.5], "loss": 0.0}


def test_sums_over_many_microbatches_keep_their_digits(pool):
    (found,) = pool.run(f"{TASKS}:many_microbatches", SINGLE)
    assert found < 1e-7


def test_records_hold_no_graph(pool):
    (found,) = pool.run(f"{TASKS}:graph", SINGLE)
    assert found is False


def test_a_step_without_records(pool):
    """Its importance is unknown and not 0; and one that nobody ended has no statistics."""
    (found,) = pool.run(f"{TASKS}:finish_without_records", SINGLE)
    assert found == {"nan": True, "balance_loss": 0.0, "again": True}
