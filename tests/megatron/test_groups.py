"""Two models on parts of the ranks: each is what it is as a job of its own."""

import pytest

from tests.distributed.layout import Layout

TASK = "tests.megatron.group_tasks:jobs"


@pytest.mark.parametrize("scope", ["global", "data-parallel", "microbatch"])
def test_two_models_on_pairs_of_ranks_are_two_jobs(pool, four, scope):
    found = four.run(TASK, Layout(dp=4), data=[3, 5], scope=scope)
    for job, seed in ((found[:2], 3), (found[2:], 5)):
        wanted = pool.run(TASK, Layout(dp=2), data=[seed], scope=scope)
        assert job == wanted
        (_, importances, coefficients), (_, same, _) = job
        assert importances == same  # of both ranks' texts
        assert len({value for row in coefficients for value in row}) == 8
    assert found[0][1] != found[2][1]


def test_a_scope_without_its_group_is_refused(four):
    found = four.run(TASK, Layout(dp=4), data=[3, 5], scope="data-parallel", collection=False)
    for text in found:
        assert "ranks [0, 1, 2, 3] would share importances" in text
        assert "pg_collection whose tp_dp_cp" in text
