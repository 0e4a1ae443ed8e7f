"""Task for the pool: two layers of one model with configs that differ."""

from dataclasses import replace
from typing import Any
from unittest import mock

from tests.megatron.misuse_tasks import LENGTH, SINK, config_of


def two_configs() -> dict[str, Any]:
    """A model of two layers that differ: the gradient of the loss, and that of the definition."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.spec_utils import build_module

    from megasink.balance.loss import head_balance_gradient
    from megasink.megatron import HeadBalance, stack_spec

    first = config_of(num_layers=2)
    second = replace(
        first, num_attention_heads=2, num_query_groups=1, kv_channels=12, window_size=(3, 0)
    )
    balance = HeadBalance(first, **SINK)
    balance.add(second, attention_variant="gated")
    groups = ProcessGroupCollection.use_mpu_process_groups()
    torch.manual_seed(2)
    layers = [
        build_module(
            stack_spec(config).submodules.attention_layer,
            config=config,
            layer_number=number,
            pg_collection=groups,
            add_layer_offset=False,
            pp_layer_offset=0,
        )
        for number, config in enumerate((first, second), 1)
    ]
    hidden = torch.randn(LENGTH, 2, 16)

    def run() -> tuple[Any, list[Any]]:
        x, gates = hidden, []
        for layer in layers:
            counter = layer.self_attention.core_attention.head_counter
            with mock.patch.object(
                type(counter), "forward", _recording(gates, type(counter).forward)
            ):
                x, _ = layer(x, None)
        return x, gates

    for step in range(2):
        balance.begin(step)
        for layer in layers:
            layer.zero_grad(set_to_none=False)
        x, gates = run()
        (x.sum() * 0).backward(retain_graph=True)
        balance.reduce()
        last = balance.commit()
    found = [{n: p.grad.clone() for n, p in layer.named_parameters()} for layer in layers]
    # The coefficients of the second step are those of the first, whose weights are the same.
    for layer in layers:
        layer.zero_grad(set_to_none=False)
    importances = [gate.mean((0, 2, 3)) for gate in gates]
    terms = [(i * head_balance_gradient(i.detach(), 1.0)).sum() for i in importances]
    sum(terms).backward()
    wanted = [{n: p.grad.clone() for n, p in layer.named_parameters()} for layer in layers]
    kinds = [type(layer.self_attention).__name__ for layer in layers]
    windows = [layer.self_attention.core_attention.window for layer in layers]
    return {
        "found": found,
        "wanted": wanted,
        "importance": last.importance_LH,
        "imbalance": last.imbalance_L,
        "kinds": kinds,
        "windows": windows,
        "of each": [i.detach() for i in importances],
        "main config": balance._options is first,
    }


def _recording(gates: list[Any], forward: Any) -> Any:
    def recorded(self: Any, out: Any, gate_BHTC: Any, *args: Any) -> Any:
        gates.append(gate_BHTC)
        return forward(self, out, gate_BHTC, *args)

    return recorded
