"""For the files of this folder."""

import pytest
import torch


@pytest.fixture
def memory_of_nans(monkeypatch):
    """Uninitialized memory is NaN, so that no result is right because it happens to be 0."""
    monkeypatch.setattr("torch.utils.deterministic.fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    assert torch.empty(3).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
