"""A sample of the random cases of random_balance.py."""

import pytest

from tests.distributed.random_balance import draw, errors, wrong


@pytest.mark.parametrize("seed", range(5))
def test_a_random_case_equals_the_oracle(four, seed):
    case = draw(seed)
    assert wrong(case, errors(four, case)) == []


def test_a_loss_that_is_a_tenth_off_is_noticed(four):
    case = draw(1)
    assert "gradients" in wrong(case, errors(four, case, coeff=1.1))
