"""Operations that head importance and the balance loss add to a layer: on a GPU a launch each."""

from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.balance.loss import head_balance_gradient
from megasink.balance.step import LossStep
from megasink.megatron.layer_balance import MegatronLayerBalance


class Operations(TorchDispatchMode):
    """Names of the operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result, returns = function(*args, **(kwargs or {})), function._schema.returns
        new = any(r.alias_info is None or r.alias_info.is_write for r in returns)
        if new and isinstance(result, torch.Tensor):
            self.names.append(function._schema.name.removeprefix("aten::"))
        return result


def _counters(layers, heads, **options):
    """Layers on one rank, and the statistics that they share."""
    config = SimpleNamespace(
        num_attention_heads=heads,
        head_balance_coeff=1e-2,
        head_balance_scope="global",
        head_balance_shared_heads=0,
        head_balance_shared_refresh=0,
        calculate_per_token_loss=False,
        use_cpu_initialization=True,
    )
    config.statistics = LossStep(layers, heads, config, installed=True)
    one_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    counters = [MegatronLayerBalance(config, layer + 1, one_rank) for layer in range(layers)]
    return counters, config.statistics


def _microbatch(counters, heads, tokens=8):
    """One forward and backward of the layers; the names of their operations."""
    out = torch.ones(tokens, 1, heads, requires_grad=True)
    gates = [torch.rand(1, heads, tokens, requires_grad=True) for _ in counters]
    with Operations() as forward:
        kept = out
        for counter, gate_BHT in zip(counters, gates, strict=True):
            kept = counter(kept, gate_BHT[..., None])
    arriving = torch.ones_like(kept)
    with Operations() as backward:
        torch.autograd.grad(kept, [out, *gates], arriving)
    return forward.names, backward.names


def test_one_launch_in_forward_and_three_in_backward():
    layers, heads = 3, 4
    counters, statistics = _counters(layers, heads)
    statistics.set_loss_scale(torch.ones(1))
    _microbatch(counters, heads)  # makes the table, and notes the routed heads
    forward, backward = _microbatch(counters, heads)
    assert forward == ["sum"] * layers
    # The factors of the loss are one product for all layers of a microbatch, made by the first.
    assert backward == ["add_", "mul", "div"] * layers


def test_the_end_of_a_step_costs_two_launches_per_layer():
    """The step's count and a copy of the gradient, which is computed for all layers at once."""
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        launches = []
        for layers in (2, 7):
            counters, statistics = _counters(layers, heads=4)
            statistics.set_loss_scale(torch.ones(1))
            for _ in range(2):
                _microbatch(counters, heads=4)
            with Operations() as operations:
                statistics.reduce()
                statistics.commit()
            launches.append(len(operations.names))
    finally:
        torch.distributed.destroy_process_group()
    assert launches[1] - launches[0] == 2 * (7 - 2)


def test_the_gradient_of_all_layers_is_that_of_each():
    importance_LH = torch.rand(9, 10, generator=torch.Generator().manual_seed(0))
    routed_LH = torch.ones(9, 10, dtype=torch.bool)
    together_LH = head_balance_gradient(importance_LH, 1.0, routed_LH)
    for layer, gradient_H in enumerate(together_LH):
        alone_H = head_balance_gradient(importance_LH[layer], 1.0, routed_LH[layer])
        assert torch.equal(gradient_H, alone_H)
