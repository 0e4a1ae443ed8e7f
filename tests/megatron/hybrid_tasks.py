"""Tasks for the workers: hybrid models, and GPT models with their weights."""

from typing import Any

import torch
from megatron.core.utils import unwrap_model

from megasink.analysis.capture.attention_statistics import MAP
from megasink.analysis.capture.megatron_model import MegatronProbe
from megasink.analysis.interventions.activations import activation_names
from megasink.analysis.metrics import STATISTICS
from megasink.megatron.hybrid_pattern import ATTENTION, EXPERTS, FFN, layers_of
from tests.analysis.capture.kept import Kept
from tests.distributed import tiny_gpt


def in_gpt(name: str, pattern: str) -> str:
    """Map a parameter's name in a hybrid model of one stage to its name in a GPT model."""
    name = name.replace("decoder.final_norm.", "decoder.final_layernorm.")
    head, layers, rest = name.partition("decoder.layers.")
    if not layers:
        return name
    index, _, last = rest.partition(".")
    before, kind = layers_of(pattern)[: int(index)], layers_of(pattern)[int(index)]
    same = ATTENTION if kind == ATTENTION else FFN + EXPERTS
    return f"{head}{layers}{sum(before.count(symbol) for symbol in same)}.{last}"


def layers_here(pattern: str) -> list[list[tuple[int, str]]]:
    """Block of each layer, from 1, and class of what it has, in each virtual stage of this rank."""
    models = unwrap_model(tiny_gpt.build(tiny_gpt.model_config(pattern=pattern)))
    return [
        [
            (layer.layer_number, type(layer.self_attention).__name__, type(layer.mlp).__name__)
            for layer in model.decoder.layers
        ]
        for model in models
    ]


def probed(pattern: str, **options: Any) -> dict[str, dict[str, Any]]:
    """What the probe sees in a GPT model and in the hybrid with its weights, by name."""
    found, weights = {}, dict[str, torch.Tensor]()
    for name, others in (("gpt", {"gpt": True}), ("hybrid", {"pattern": pattern})):
        (model,) = unwrap_model(tiny_gpt.build(tiny_gpt.model_config(**others, **options)))
        for parameter, tensor in model.named_parameters():
            if name == "gpt":
                weights[parameter] = tensor
            else:
                tensor.data.copy_(weights[in_gpt(parameter, pattern)])
        found[name] = _seen(model)
    return found


def probed_alone(**options: Any) -> dict[str, Any]:
    """What the probe sees in a model."""
    (model,) = unwrap_model(tiny_gpt.build(tiny_gpt.model_config(**options)))
    return _seen(model)


def _seen(model: Any) -> dict[str, Any]:
    kept = Kept({*STATISTICS, MAP})
    with MegatronProbe(model.eval(), kept) as probe:
        logits = probe.forward(torch.arange(22).view(2, 11)).logits
        sites = probe.sites()
    return {
        "heads": probe.heads,
        "logits": logits,
        "layers": {key: dict(value) for key, value in kept.layers.items()},
        "attended": [key for key, value in kept.layers.items() if "out_HTD" in value],
        "states": dict(kept.states),
        "sites": sorted(site.name for site in sites.available),
        "missing": sites.missing,
        "places": activation_names(model),
    }
