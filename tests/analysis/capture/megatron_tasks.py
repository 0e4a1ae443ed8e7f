"""Tasks for the workers: a tiny GPT with and without a probe on it."""

import itertools
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import FileStore, get_rank

from megasink.analysis.capture.attention_statistics import MAP
from megasink.analysis.capture.first_token_geometry import POSITIONS, read_rows
from megasink.analysis.capture.head_changes import ForwardPass, HeadChange, HeadOutputs
from megasink.analysis.capture.input_samples import Sample
from megasink.analysis.capture.megatron_model import MegatronProbe
from megasink.analysis.capture.probe import Listener
from megasink.analysis.metrics import STATISTICS
from megasink.analysis.metrics.registry import GRADIENT
from megasink.analysis.pages import sweep_page
from megasink.analysis.ranks import Ranks
from megasink.cli import main
from megasink.errors import ConfigError
from megasink.megatron.model_blocks import blocks_in
from tests.analysis.capture.kept import Kept
from tests.megatron.decoding_tasks import model_of

TOKENS = 11


@torch.no_grad()
def probed(**options: Any) -> dict[str, Any]:
    """What the probe saw in two sequences, and the logits with and without it."""
    model = model_of(**options)
    ids = torch.randint(0, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1))
    positions = torch.arange(TOKENS).expand(2, TOKENS)
    plain = model(ids, positions, None)
    # A gradient takes the kernels of training, whose last bits differ.
    kept = Kept({*STATISTICS, MAP} - GRADIENT.keys())
    with MegatronProbe(model, kept) as probe:
        output = probe.forward(ids)
    after = model(ids, positions, None)
    first, second = blocks_in(model)
    core = second.attention.core_attention
    mlp = core.similarity_mlp
    added = (first.ffn.mlp_bda, second.mixer.self_attn_bda) if model.config.post_norm else ()
    return {
        "post_norms": [add.layernorm.weight for add in added],
        "equal": torch.equal(plain, output.logits) and torch.equal(plain, after),
        "layers": {key: dict(value) for key, value in kept.layers.items()},
        "states": kept.states,
        "sink": None if core.softmax_offset is None else core.softmax_offset.detach().float(),
        "key_bias": None if core.key_bias is None else core.key_bias.detach().float(),
        "value_bias": None if core.value_bias is None else core.value_bias.detach().float(),
        "mlp": None if mlp is None else [mlp.fc1.weight.detach(), mlp.fc2.weight.detach()],
        "bias": None if core.relative_bias is None else core.relative_bias(TOKENS, ids.device),
    }


class Scaled(HeadChange):
    """Multiplies one head's output."""

    def __init__(self, layer: int, head: int, factor: float):
        self.layer, self.head, self.factor = layer, head, factor

    def change(self, forward: ForwardPass, outputs: HeadOutputs) -> Tensor | None:
        if outputs.layer != self.layer:
            return None
        out_BQHD = outputs.out_BQHD.clone()
        out_BQHD[:, :, self.head] *= self.factor
        return out_BQHD


def gradients(step: float, **options: Any) -> tuple[Tensor, Tensor]:
    """[B, L, H]: the gradient of each head's mask, and the slope of the loss."""
    model = model_of(**options)
    ids = torch.randint(0, 128, (2, TOKENS), generator=torch.Generator().manual_seed(1))

    def losses(logits: Tensor) -> Tensor:
        log_BTV = logits[:, :-1].float().log_softmax(-1)
        return -log_BTV.gather(-1, ids[:, 1:, None]).mean((1, 2))

    kept = Kept({"mask_gradient_H"})
    with MegatronProbe(model, kept) as probe:
        probe.backward(losses(probe.forward(ids).logits).sum())
    found = [[kept.layers[row, layer]["mask_gradient_H"] for layer in (0, 1)] for row in (0, 1)]
    slopes = torch.zeros(2, 2, 4)
    for layer, head in itertools.product(range(2), range(4)):
        sides = []
        for factor in (1 - step, 1 + step):
            with MegatronProbe(model, Listener(), [Scaled(layer, head, factor)]) as probe:
                sides.append(losses(probe.forward(ids).logits))
        slopes[:, layer, head] = (sides[1] - sides[0]) / (2 * step)
    return torch.stack([torch.stack(row) for row in found]), slopes


@torch.no_grad()
def rows(**options: Any) -> dict[str, Any]:
    """The rows of one sequence, and what they are computed from, of the whole sequence."""
    model = model_of(**options)
    ids = torch.randint(0, 128, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    sample = Sample(tuple(ids[0].tolist()), "d", "s")
    found = read_rows(partial(MegatronProbe, model), [sample])
    blocks, kept = blocks_in(model), Kept(STATISTICS)
    given: list[Tensor] = []
    hook = blocks[0].mlp.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with MegatronProbe(model, kept) as probe:
        probe.forward(ids)
    hook.remove()
    report = {
        "rows": found.by_site,
        "missing": found.missing,
        "states": [kept.states[0, half] for half in range(4)],
        "weights": [
            getattr(norm, "weight", None)
            for block in blocks
            for norm in (block.mixer.input_layernorm, block.ffn.pre_mlp_layernorm)
        ],
        "eps": model.config.layernorm_epsilon,
    }
    if hasattr(blocks[0].mlp, "linear_fc1"):
        linear = given[0][:POSITIONS, 0].double() @ blocks[0].mlp.linear_fc1.weight.double().T
        gate, up = linear.chunk(2, -1)
        report |= {"up": up, "product": gate * torch.sigmoid(gate) * up}
    return report


def refused(training: bool = False, **options: Any) -> list[str]:
    """The problems that the probe names."""
    model = model_of(**options)
    try:
        MegatronProbe(model.train(training), Kept())
    except ConfigError as error:
        return error.problems
    return []


def swept(command: str, store: str) -> int:
    """The command, by processes that share the samples."""
    ranks = Ranks(FileStore(store, 2), get_rank(), 2)
    with (
        mock.patch.object(Ranks, "from_environment", return_value=ranks),
        mock.patch.object(sweep_page, "pictures", return_value=[]),
    ):
        return main(command.split())
