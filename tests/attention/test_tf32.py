"""No logit of a gate comes from a float32 matrix product on a GPU: TF32 would change it by 1%."""

from types import SimpleNamespace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.attention.key_value_biases import _BiasLogit
from megasink.attention.layout import dot_with_each_row, weighted_row_sum


class MatrixProducts(TorchDispatchMode):
    """Collects the names of matrix products of float32 tensors on a GPU."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        name = op.name().split("::")[1].split(".")[0]
        wide = isinstance(out, torch.Tensor) and out.dtype is torch.float32 and out.is_cuda
        if wide and name in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot", "addmv"):
            self.names.append(name)
        return out


def first_key(query, key):
    dot_with_each_row(query, key)
    weighted_row_sum(query[..., 0].float(), query, groups=2)


def key_bias(query, key):
    bias = key[0, :, 0].float()
    # Not through autograd, which wants a driver.
    saved = SimpleNamespace(save_for_backward=lambda *_: None, saved_tensors=(query, bias))
    grad = _BiasLogit.forward(saved, query, bias, 0.5)
    _BiasLogit.backward(saved, grad)


@pytest.mark.parametrize("compute", [first_key, key_bias])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_matrix_products(device, dtype, compute):
    with FakeTensorMode(), MatrixProducts() as products:
        query = torch.empty(2, 4, 9, 8, dtype=dtype, device=device)
        compute(query, torch.empty(2, 4, 1, 8, dtype=dtype, device=device))
    assert products.names == []


def test_a_matrix_product_would_be_seen():
    with FakeTensorMode(), MatrixProducts() as products:
        matrix = torch.empty(3, 3, device="cuda")
        matrix @ matrix
    assert products.names == ["mm"]
