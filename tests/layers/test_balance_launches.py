"""Launches that head importance and the balance loss add to a layer, on a GPU one each."""

from types import SimpleNamespace

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megasink.layers.importance import HeadCounter
from megasink.layers.statistics import ModelStatistics


class Operations(TorchDispatchMode):
    """Names of the operations that are no views."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returns = function._schema.returns
        if any(r.alias_info is None or r.alias_info.is_write for r in returns):
            self.names.append(function._schema.name.removeprefix("aten::"))
        return function(*args, **(kwargs or {}))


def test_two_launches_in_forward_and_two_in_backward():
    layers, heads, tokens = 3, 4, 8
    config = SimpleNamespace(
        statistics=ModelStatistics(layers, heads),
        num_attention_heads=heads,
        head_balance_coeff=1e-2,
        head_balance_scope="global",
        head_balance_shared_heads=0,
        head_balance_shared_refresh=0,
        calculate_per_token_loss=False,
        use_cpu_initialization=True,
    )
    config.statistics.set_loss_scale(torch.ones(1))
    one_rank = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
    counters = [HeadCounter(config, layer + 1, one_rank) for layer in range(layers)]
    out = torch.ones(tokens, 1, heads, requires_grad=True)
    gates = [torch.rand(1, heads, tokens, requires_grad=True) for _ in counters]

    def microbatch():
        with Operations() as forward:
            kept = out
            for counter, gate_BHT in zip(counters, gates, strict=True):
                kept = counter(kept, gate_BHT[..., None])
        with Operations() as backward:
            torch.autograd.grad(kept, [out, *gates], torch.ones_like(kept))
        return forward.names, backward.names

    microbatch()  # makes the table and notes the routed heads
    forward, backward = microbatch()
    assert forward == ["sum", "add_"] * layers
    # The factor once, then each layer's gradient and its division by the tokens.
    factor = [name for name in backward if name == "mul"]
    assert backward.count("div") == layers
    assert len(factor) == layers
    assert len(backward) == 2 * layers
