"""The modules of each block of a rank, and where its attention runs."""

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from megatron.core.transformer.attention import Attention
from megatron.core.utils import get_attr_wrapped_model

_SKIPPED = ("IdentityOp", "IdentityFuncOp")


def describe(models: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each block of a rank's model chunks; another rank may hold half of it."""
    for model in models:
        layers = get_attr_wrapped_model(model, "decoder").layers
        for block, of_block in groupby(layers, lambda layer: layer.layer_number):
            yield {"layer": block, **_modules(list(of_block))}


def _modules(layers: list[Any]) -> dict[str, Any]:
    """Return the classes of a block's modules; for a mixer that is not attention, its class."""
    mixers = (getattr(layer, "self_attention", getattr(layer, "mixer", None)) for layer in layers)
    mixer = next((m for m in mixers if m is not None and not _is_skipped(m)), None)
    core = mixer.core_attention if isinstance(mixer, Attention) else None
    every = (getattr(layer, "mlp", None) for layer in layers)
    mlps = [mlp for mlp in every if mlp is not None and not _is_skipped(mlp)]
    named = (pair for layer in layers for pair in layer.named_modules())
    norms = (m for name, m in named if "norm" in name.rpartition(".")[2] and not _is_skipped(m))
    return {
        "attention": [type(module).__name__ for module in (mixer, core) if module is not None],
        "window": getattr(core, "window", None),
        "mlp": [name for mlp in mlps for name in (type(mlp).__name__, *_inside(mlp))],
        "norms": sorted({type(norm).__name__ for norm in norms}),
    }


def _is_skipped(module: Any) -> bool:
    return type(module).__name__ in _SKIPPED


def _inside(mlp: Any) -> Iterator[str]:
    """Yield the class of a mixture's experts."""
    if (experts := getattr(mlp, "experts", None)) is not None:
        yield type(experts).__name__
        yield type(mlp.token_dispatcher).__name__
