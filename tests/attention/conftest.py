import pytest
import torch


@pytest.fixture(autouse=True, scope="package")
def one_thread():
    """These tensors are small: a second thread costs more than it gains."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
