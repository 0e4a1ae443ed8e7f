"""The modules of each layer of a rank, and where its attention runs."""

from collections.abc import Iterable, Iterator
from typing import Any

from megatron.core.utils import get_attr_wrapped_model

_SKIPPED = ("IdentityOp", "IdentityFuncOp")


def describe(models: Iterable[Any]) -> Iterator[dict[str, Any]]:
    """Yield a record for each layer of a rank's model chunks."""
    for model in models:
        for layer in get_attr_wrapped_model(model, "decoder").layers:
            attention = layer.self_attention
            yield {
                "layer": layer.layer_number,
                "attention": [type(attention).__name__, type(attention.core_attention).__name__],
                "window": attention.core_attention.window,
                "mlp": [type(layer.mlp).__name__, *_inside(layer.mlp)],
                "norms": sorted(
                    {
                        type(module).__name__
                        for name, module in layer.named_modules()
                        if "norm" in name.rpartition(".")[2]
                        and type(module).__name__ not in _SKIPPED
                    }
                ),
            }


def _inside(mlp: Any) -> Iterator[str]:
    """Yield the class of a mixture's experts."""
    if (experts := getattr(mlp, "experts", None)) is not None:
        yield type(experts).__name__
        yield type(mlp.token_dispatcher).__name__
