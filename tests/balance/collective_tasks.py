"""Task for the workers: collectives of a step of a tiny GPT, with the balance loss and without."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megasink.balance.step import LossStep
from megasink.megatron.layer_balance import MegatronLayerBalance
from tests.balance.collective_sizes import LAYERS
from tests.balance.collectives import Collectives
from tests.distributed import tiny_gpt


def step_counts(scopes: list[str], observed: bool = False, **options: Any) -> dict[str, list[Any]]:
    """{scope: what a step with the balance loss sends beside what one without it does}.

    As (operation, bytes, ranks, count), ascending.
    """
    with _without_balance():
        others = _counts(False, **options)
    found = {}
    for scope in scopes:
        ours = _counts(observed, head_balance_scope=scope, **options)
        assert not others - ours, "all that a step without the loss sends is there"
        found[scope] = sorted((*what, count) for what, count in (ours - others).items())
    return found


def _counts(observed: bool, **options: Any) -> Counter[tuple[str, int, int]]:
    config = tiny_gpt.model_config(num_layers=LAYERS, **options)
    transformer = config.transformer
    models = tiny_gpt.build(config)
    optimizer, _ = tiny_gpt.optimizer_of(config, models, distributed=False)
    transformer.grad_scale_func = optimizer.scale_loss
    with Collectives() as collectives:
        for step in range(2):
            collectives.found.clear()  # the second step counts: the first one sets things up
            transformer.statistics.heads.observes = observed
            tiny_gpt.run_step(models, optimizer, step)
            optimizer.step()
            tiny_gpt.statistics(transformer)
    return collectives.found


@contextmanager
def _without_balance() -> Iterator[None]:
    forward, start = MegatronLayerBalance.forward, LossStep.reduce
    MegatronLayerBalance.forward = lambda self, out_SBX, *_, **__: out_SBX
    LossStep.reduce = lambda *_, **__: None
    try:
        yield
    finally:
        MegatronLayerBalance.forward, LossStep.reduce = forward, start
