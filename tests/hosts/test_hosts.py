"""A few of the cases of several hosts; `python -m tests.hosts` runs all of them."""

import pytest

from tests.hosts.cases import CASES, FEW
from tests.hosts.job import Template, run
from tests.training.hosts import lacking


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    if reason := lacking():
        pytest.skip(reason)
    return Template(tmp_path_factory.mktemp("hosts"))


@pytest.mark.parametrize("name", FEW)
def test_a_case(name, template):
    outcome = run(name, CASES[name], template)
    assert not outcome.wrong, outcome
