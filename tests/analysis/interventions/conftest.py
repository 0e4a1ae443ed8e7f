"""What the tests of `megasink ablate` share."""

import pytest

from megasink.analysis.pages import ablation_page
from tests.analysis.interventions.ablating import count_forwards, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model, and two datasets."""
    return make_folder(tmp_path_factory.mktemp("ablate"))


@pytest.fixture
def undrawn(monkeypatch):
    """No picture is drawn."""
    monkeypatch.setattr(ablation_page, "pictures", lambda *_: [])


@pytest.fixture
def forwards(monkeypatch):
    """The calls of the model."""
    return count_forwards(monkeypatch)
