"""Tasks for the workers: a tiny GPT with and without a probe on it."""

from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.distributed import FileStore, get_rank

from megasink.analysis.capture.geometry import POSITIONS, read_rows
from megasink.analysis.capture.inputs import Reader, Sample, text_samples
from megasink.analysis.capture.megatron_model import MegatronProbe
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.capture.statistics import MAP
from megasink.analysis.metrics import STATISTICS
from megasink.analysis.pages import sweep
from megasink.checkpoints.load import load_model
from megasink.cli import main
from megasink.errors import ConfigError
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
    kept = Kept()
    with MegatronProbe(model, kept, {*STATISTICS, MAP}) as probe:
        output = probe.forward(ids)
    after = model(ids, positions, None)
    core = model.decoder.layers[1].self_attention.core_attention
    mlp = core.similarity_mlp
    first, second = model.decoder.layers
    added = (first.mlp_bda, second.self_attn_bda) if model.config.post_norm else ()
    return {
        "post_norms": [add.layernorm.weight for add in added],
        "equal": torch.equal(plain, output.logits) and torch.equal(plain, after),
        "layers": {key: dict(value) for key, value in kept.layers.items()},
        "states": kept.states,
        "sink": None if core.softmax_offset is None else core.softmax_offset.detach(),
        "key_bias": None if core.key_bias is None else core.key_bias.detach(),
        "value_bias": None if core.value_bias is None else core.value_bias.detach(),
        "mlp": None if mlp is None else [mlp.fc1.weight.detach(), mlp.fc2.weight.detach()],
        "bias": None if core.relative_bias is None else core.relative_bias(TOKENS, ids.device),
    }


@torch.no_grad()
def rows(**options: Any) -> dict[str, Any]:
    """The rows of one sequence, and what they are computed from, of the whole sequence."""
    model = model_of(**options)
    ids = torch.randint(0, 128, (1, TOKENS), generator=torch.Generator().manual_seed(1))
    sample = Sample(tuple(ids[0].tolist()), "d", "s")
    found = read_rows(lambda kept: MegatronProbe(model, kept, kept.needs), [sample])
    layers, kept = model.decoder.layers, Kept()
    given: list[Tensor] = []
    hook = layers[0].mlp.register_forward_pre_hook(lambda _, args: given.append(args[0]))
    with MegatronProbe(model, kept, set(STATISTICS)) as probe:
        probe.forward(ids)
    hook.remove()
    report = {
        "rows": found.by_site,
        "missing": found.missing,
        "states": [kept.states[0, half] for half in range(4)],
        "weights": [
            getattr(norm, "weight", None)
            for layer in layers
            for norm in (layer.input_layernorm, layer.pre_mlp_layernorm)
        ],
        "eps": model.config.layernorm_epsilon,
    }
    if hasattr(layers[0].mlp, "linear_fc1"):
        linear = given[0][:POSITIONS, 0].double() @ layers[0].mlp.linear_fc1.weight.double().T
        gate, up = linear.chunk(2, -1)
        report |= {"up": up, "product": gate * torch.sigmoid(gate) * up}
    return report


def refused(training: bool = False, **options: Any) -> list[str]:
    """The problems that the probe names."""
    model = model_of(**options)
    try:
        MegatronProbe(model.train(training), Kept(), set())
    except ConfigError as error:
        return error.problems
    return []


def swept(command: str, store: str) -> int:
    """The command, by processes that share the samples."""
    ranks = Ranks(FileStore(store, 2), get_rank(), 2)
    with (
        mock.patch.object(Ranks, "from_environment", return_value=ranks),
        mock.patch.object(sweep, "draw_all", return_value=[]),
    ):
        return main(command.split())


@torch.no_grad()
def by_hand(run: str, data: str, length: int, count: int) -> dict[str, Any]:
    """Importance [L, H] and nats per token of a run of sink attention, with whole score matrices.

    The sequences are those of `megasink analyze`.
    """
    model, tokenizer, _, _ = load_model(run)
    samples = text_samples(Reader(tokenizer), [data], seq_length=length, max_samples=count)
    gates: dict[int, list[Tensor]] = {}
    nats, targets = 0.0, 0

    def attended(layer: int, core: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        named = dict(zip(("query", "key"), args, strict=False)) | kwargs
        query, key = (named[n][:, 0].transpose(0, 1).double() for n in ("query", "key"))
        key = key.repeat_interleave(len(query) // len(key), 0)
        scores = query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5
        future = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        lse = scores.masked_fill(future, -torch.inf).logsumexp(-1)
        gates.setdefault(layer, []).append(torch.sigmoid(lse - core.softmax_offset[:, None]))

    for index, layer in enumerate(model.decoder.layers):
        layer.self_attention.core_attention.register_forward_pre_hook(
            lambda core, args, kwargs, index=index: attended(index, core, args, kwargs),
            with_kwargs=True,
        )
    for sample in samples:
        ids = torch.tensor([sample.tokens])
        logits = model(ids, torch.arange(ids.shape[1])[None], None)[0, :-1].double()
        nats -= float(logits.log_softmax(-1).gather(1, ids[0, 1:, None]).sum())
        targets += ids.shape[1] - 1
    importance = [torch.cat(gates[layer], 1).mean(1).tolist() for layer in sorted(gates)]
    return {"importance": importance, "nats": nats / targets}
