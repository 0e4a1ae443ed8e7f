"""Scores of heads on texts that no loss is measured on: importance, P3's scores, gradients.

    python -m examples.real_models.scores runs/real-models/smollm2 runs/real-models/gemma3

writes runs/real-models/scores-NAME.json. What exists already is left.

Shapes: B texts, T tokens, L layers, H heads, D head dim.
"""

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

import megasink
from examples.real_models.texts import MEASURED, read_texts
from examples.real_models.wheels import FOLDER, told
from examples.real_models.zeroing import TOKENS, losses, samples_of
from megasink.analysis.capture.identity import weights_hash
from megasink.analysis.capture.inputs import data_hash
from megasink.atomic import atomic_text
from megasink.transformers.blocks import find_blocks

SIX = ("awft", "aeqd", "ftvvn", "avvn", "lthon", "ahon")
"""P3's scores; each also divided by its layer's mean (LN), which makes twelve."""
MEASURES = (
    "importance",
    *(f"{name}{form}" for form in ("", "_ln") for name in SIX),
    *("lthon_hn", "circuit_ahon", "circuit_ahon_ln"),
)
_ROWS = 2  # texts in a backward pass


@contextmanager
def masked(model: Any, mask_BLH: Tensor) -> Iterator[None]:
    """Every head's output is multiplied by its number before the output projection."""

    def multiply(layer: int) -> Callable[..., Any]:
        def hook(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            mask_B1H1 = mask_BLH[:, layer, None, :, None]
            out_BTHD = args[0].unflatten(-1, (mask_BLH.shape[-1], -1))
            return ((out_BTHD * mask_B1H1).flatten(-2), *args[1:])

        return hook

    hooks = [
        block.output.register_forward_pre_hook(multiply(layer))
        for layer, block in enumerate(find_blocks(model))
        if block.output is not None
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def mask_gradients(model: Any, ids_BT: Tensor) -> Tensor:
    """Return [B, L, H]: the derivative of each text's loss by a head's mask, at 1; nats.

    Michel, Levy and Neubig (2019), Eq. 2, with a text as the sample, before the absolute value.
    """
    config = model.config.get_text_config()
    shape = (len(ids_BT), config.num_hidden_layers, config.num_attention_heads)
    mask_BLH = torch.ones(shape, requires_grad=True)
    with masked(model, mask_BLH):
        (gradient_BLH,) = torch.autograd.grad(losses(model, ids_BT).sum(), mask_BLH)
    return gradient_BLH


def scores_of(hub: Any) -> dict[str, Any]:
    """Return every score, [layers][heads], and what it was measured on."""
    texts, samples = read_texts()[MEASURED:], samples_of(hub.tokenizer)[MEASURED:]
    hub.model.requires_grad_(False)
    ids_BT = torch.tensor([sample.tokens for sample in samples])
    gradient_NLH = torch.cat([mask_gradients(hub.model, ids) for ids in ids_BT.split(_ROWS)])
    found = megasink.analyze(
        hub, [text.text for text in texts], seq_length=TOKENS, max_samples=None, loss=False
    )
    scores = {name: found[name].values for name in MEASURES}
    scores["mask_gradient"] = gradient_NLH.abs().mean(0).numpy()
    # What the first order says that the loss rises by when the mask goes from 1 to 0.
    scores["mask_gradient_signed"] = -gradient_NLH.mean(0).numpy()
    return {
        "weights": weights_hash(hub.model),
        "texts": data_hash(samples),
        "tokens": TOKENS,
        "scores": {name: _rounded(values) for name, values in scores.items()},
    }


def _rounded(values_LH: Any) -> list[list[float]]:
    return [[float(f"{value:.5g}") for value in row] for row in np.asarray(values_LH)]


def write_scores(folder: Path) -> Path:
    """Write the scores of a model's heads, if they are missing."""
    path = FOLDER / f"scores-{folder.resolve().name}.json"
    if not path.is_file():
        found = scores_of(megasink.load_model(folder, device="cpu"))
        with told(str(path)):
            atomic_text(path, json.dumps(found, separators=(",", ":")) + "\n")
    return path


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the scores of models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    for folder in parser.parse_args(arguments).models:
        print(write_scores(folder))
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "scores.py")
