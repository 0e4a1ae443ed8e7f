"""Tasks for the workers: a tiny GPT with and without a probe on it."""

from typing import Any

import torch
from torch import Tensor

from megasink.diagnostics import STATISTICS
from megasink.errors import ConfigError
from megasink.probe.megatron_model import MegatronProbe
from tests.inference.tasks import model_of

TOKENS = 11


class Kept:
    """An observer that keeps everything."""

    def __init__(self) -> None:
        self.layers: dict[tuple[int, int], dict[str, Tensor]] = {}
        self.states: dict[tuple[int, int], Tensor] = {}

    def layer(self, sample: int, layer: int, statistics: dict[str, Tensor]) -> None:
        copies = {name: value.clone() for name, value in statistics.items()}
        self.layers.setdefault((sample, layer), {}).update(copies)

    def state(self, sample: int, half: int, state_TE: Tensor) -> None:
        self.states[sample, half] = state_TE.clone()


@torch.no_grad()
def probed(**options: Any) -> dict[str, Any]:
    """What the probe saw in two sequences, and the logits with and without it."""
    model = model_of(**options)
    ids = torch.randint(0, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    plain = model(ids, positions, None)
    kept = Kept()
    with MegatronProbe(model, kept, set(STATISTICS)) as probe:
        output = probe.forward(ids)
    after = model(ids, positions, None)
    core = model.decoder.layers[1].self_attention.core_attention
    return {
        "equal": torch.equal(plain, output.logits) and torch.equal(plain, after),
        "layers": {key: dict(value) for key, value in kept.layers.items()},
        "states": kept.states,
        "sink": None if core.softmax_offset is None else core.softmax_offset.detach(),
        "key_bias": None if core.key_bias is None else core.key_bias.detach(),
        "value_bias": None if core.value_bias is None else core.value_bias.detach(),
        "bias": None if core.relative_bias is None else core.relative_bias(TOKENS, ids.device),
    }


def refused(training: bool = False, **options: Any) -> list[str]:
    """The problems that the probe names."""
    model = model_of(**options)
    try:
        MegatronProbe(model.train(training), Kept(), set())
    except ConfigError as error:
        return error.problems
    return []
