"""The loss of a model whose weights and activations are rounded, and the kurtosis of its states.

    python -m examples.real_models.rounding runs/real-models/smollm2

Rounding is to nearest, symmetric, with no calibration: the largest absolute value of a tensor, or
of a token's activations and of an output channel's weights, sets the scale. The inputs and the
weights of all linear layers in the blocks are rounded; embeddings, norms, attention and logits are
not. It is what people who quantize do first, and where one token's massive activation hurts.

Shapes: T tokens, D channels.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megasink
from examples.real_models.needs import LeftOut
from examples.real_models.texts import read_texts
from examples.real_models.zeroing import losses
from megasink.transformers.decoder_blocks import find_blocks

SETTINGS: dict[str, tuple[int, int, bool]] = {
    "none": (0, 0, False),
    "8 bits, per tensor": (8, 8, False),
    "8 bits, per token": (8, 8, True),
    "4 bits, per tensor": (4, 4, False),
    "4 bits, per token": (4, 4, True),
    "activations alone, 8 bits, per tensor": (0, 8, False),
}
"""Setting -> bits of weights and of activations, 0 for none; whether each row has a scale."""
TEXTS, TOKENS = 9, 128


def rounded(values: Tensor, bits: int, *, by_row: bool) -> Tensor:
    """Return values [..., rows, columns] rounded to nearest in 2^bits - 1 even steps around 0."""
    most = 2 ** (bits - 1) - 1
    largest = values.abs().amax(-1, keepdim=True) if by_row else values.abs().max()
    scale = (largest / most).clamp_min(torch.finfo(values.dtype).tiny)
    return (values / scale).round() * scale


@contextmanager
def rounding(model: Any, weights: int, activations: int, *, by_row: bool) -> Iterator[None]:
    """The linear layers of the blocks have rounded weights and get rounded inputs.

    Args:
        weights, activations: bits; 0 for none.
        by_row: a scale for every token, and every output channel, not one for the tensor.

    Raises:
        LeftOut: there are no linear layers of torch, as in GPT-2.
    """
    layers = [
        module
        for block in find_blocks(model)
        for module in block.module.modules()
        if isinstance(module, torch.nn.Linear)
    ]

    def round_input(_module: torch.nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return (rounded(args[0], activations, by_row=by_row), *args[1:])

    if not layers:
        raise LeftOut("the blocks have no linear layers of torch, and others are not rounded")
    kept = [layer.weight.data for layer in layers]
    hooks = [layer.register_forward_pre_hook(round_input) for layer in layers if activations]
    try:
        if weights:
            for layer in layers:
                layer.weight.data = rounded(layer.weight.data, weights, by_row=by_row)
        yield
    finally:
        for layer, weight in zip(layers, kept, strict=True):
            layer.weight.data = weight
        for hook in hooks:
            hook.remove()


def kurtosis(values: Tensor) -> float:
    """Return the fourth moment over the square of the second, both about the mean; normal: 3."""
    deviation = values.double() - values.double().mean()
    return float(deviation.pow(4).mean() / deviation.square().mean().square())


def states_of(model: Any, ids: Tensor) -> list[Tensor]:
    """Return the states [T, D] after each block but the last, of a text [1, T]."""
    states: list[Tensor] = []

    def keep(_module: torch.nn.Module, _args: Any, out: Any) -> None:
        states.append(out[0] if isinstance(out, tuple) else out)

    hooks = [b.module.register_forward_hook(keep) for b in find_blocks(model)]
    try:
        model(input_ids=ids, use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return [state.reshape(ids.shape[1], -1) for state in states[:-1]]


@torch.no_grad()
def outliers(hub: Any, ids: list[Tensor]) -> dict[str, Any]:
    """Return the kurtosis by block, mean over texts, with the first token and without; and of each
    text the norm of the longest state over the median, largest over blocks, wherever it stands."""
    every = [states_of(hub.model, row) for row in ids]
    kinds = {"all": 0, "without the first": 1}
    by_block = {
        kind: torch.tensor([[kurtosis(s[begin:]) for s in states] for states in every]).mean(0)
        for kind, begin in kinds.items()
    }
    norms = [torch.stack(states).norm(dim=-1) for states in every]
    longest = [float((n.amax(1) / n.median(1).values).max()) for n in norms]
    return {
        "kurtosis": {kind: values.round(decimals=2).tolist() for kind, values in by_block.items()},
        "longest": [round(ratio, 2) for ratio in longest],
    }


def rows_of(hub: Any) -> list[Tensor]:
    """Return the tokens [1, T] of each text."""
    texts = [text.text for text in read_texts()[:TEXTS]]
    rows = (hub.tokenizer(text, add_special_tokens=False)["input_ids"][:TOKENS] for text in texts)
    return [torch.tensor([row]) for row in rows]


@torch.no_grad()
def rounded_losses(hub: Any) -> dict[str, Any]:
    """Return the loss of each text under each setting, and `outliers`."""
    model, ids = hub.model.eval(), rows_of(hub)
    found: dict[str, Any] = {}
    for name, (weights, activations, by_row) in SETTINGS.items():
        with rounding(model, weights, activations, by_row=by_row):
            found[name] = [round(float(losses(model, row)), 5) for row in ids]
    return {"losses": found} | outliers(hub, ids)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the mean loss of each setting."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    for folder in parser.parse_args(arguments).models:
        found = rounded_losses(megasink.load_model(folder, device="cpu"))
        for name, values in found["losses"].items():
            print(f"{folder}: {name}: {sum(values) / len(values):.4f} nats per token")
        print(f"{folder}: largest kurtosis of a block: {json.dumps(max(found['kurtosis']['all']))}")
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "rounding.py")
