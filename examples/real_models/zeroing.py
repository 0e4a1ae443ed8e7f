"""What a model loses without each of its heads, text by text.

    python -m examples.real_models.zeroing runs/real-models/smollm2 runs/real-models/gemma3

Every head gives zero, alone, and the loss of each text is compared with that of the unchanged
model. A layer's head changes nothing in the layers below it: their outputs are kept, and only the
rest of the model runs. `megasink.zero_heads` gives the same losses, but runs every layer.

The divergence of the predictions from those of the unchanged model is kept too, as the mean of a
block's texts: it is resolved on far fewer texts than the loss.

Results are lines of runs/real-models/zeroing-NAME.jsonl, for one layer and a block of three
texts each, blocks first, so that a measurement that is stopped has all heads on fewer texts. A line
is whole or absent; a repeated command goes on, also from results that are committed.

Shapes: B texts, T tokens, V vocabulary, H heads of a layer.
"""

import argparse
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

import megasink
from examples.real_models.texts import MEASURED, read_texts
from examples.real_models.wheels import FOLDER, told
from megasink.analysis.capture.input_samples import Reader, Sample, data_hash
from megasink.console.progress import progress
from megasink.errors import UserError
from megasink.transformers.decoder_blocks import find_blocks
from megasink.transformers.model_identity import weights_hash

RESULTS = Path(__file__).with_name("results")
TOKENS = 128
BLOCK = 3
"""Texts of a line: one of each domain."""
UNIT = 1e-5
"""Of losses in the file, in nats per token: a hundredth of what texts differ by."""
_LOGITS = 1 << 25  # elements at a time: 128 MiB


@dataclass
class Batch:
    """Texts that run together, and what the unchanged model made of them.

    Attributes:
        ids_BT: tokens.
        outputs: of each decoder layer, as the layer returned it.
        loss_B: mean nats per token of each text; float64.
        share_BTV: its predictions, as probabilities.
        entropy_B: theirs, mean nats per token of each text; float64.
    """

    ids_BT: Tensor
    outputs: list[Any]
    loss_B: Tensor
    share_BTV: Tensor
    entropy_B: Tensor


def predictions(model: Any, ids_BT: Tensor) -> Tensor:
    """Return logits [B, T - 1, V] of every target; float32 or wider."""
    logits_BTV = model(input_ids=ids_BT, use_cache=False).logits[:, :-1]
    return logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))


def losses_of(logits_BTV: Tensor, ids_BT: Tensor) -> Tensor:
    """Return [B]: the mean over targets of the loss of each text, in nats; float64."""
    pairs = zip(logits_BTV, ids_BT, strict=True)  # text by text, since this copies the logits
    return torch.stack(
        [
            torch.nn.functional.cross_entropy(logits_TV, ids_T[1:], reduction="none")
            .double()
            .mean()
            for logits_TV, ids_T in pairs
        ]
    )


def losses(model: Any, ids_BT: Tensor) -> Tensor:
    """Return [B]: the loss of each text under a model."""
    return losses_of(predictions(model, ids_BT), ids_BT)


def cross_entropies(share_BTV: Tensor, logits_BTV: Tensor) -> Tensor:
    """Return [B]: the mean loss of each text if its targets were drawn by `share_BTV`; float64."""
    found = [
        (logits_TV.logsumexp(-1) - (share_TV * logits_TV).sum(-1)).double().mean()
        for share_TV, logits_TV in zip(share_BTV, logits_BTV, strict=True)
    ]
    return torch.stack(found)


def unchanged(model: Any, ids_BT: Tensor) -> Batch:
    """Run the model as it is, and keep what every layer gives."""
    outputs: list[Any] = []
    hooks = [
        block.module.register_forward_hook(lambda _module, _args, out: outputs.append(out))
        for block in find_blocks(model)
    ]
    try:
        logits_BTV = predictions(model, ids_BT)
    finally:
        for hook in hooks:
            hook.remove()
    share_BTV = logits_BTV.softmax(-1)
    entropy_B = cross_entropies(share_BTV, logits_BTV)
    return Batch(ids_BT, outputs, losses_of(logits_BTV, ids_BT), share_BTV, entropy_B)


@contextmanager
def starting_at(model: Any, layer: int, outputs: Sequence[Any]) -> Iterator[None]:
    """Layers below `layer` give what they gave before, and compute nothing."""
    below = [block.module for block in find_blocks(model)[:layer]]
    for module, output in zip(below, outputs[:layer], strict=True):
        module.forward = lambda *_args, _output=output, **_options: _output
    try:
        yield
    finally:
        for module in below:
            del module.forward


@contextmanager
def zeroed(model: Any, layer: int, head: int, heads: int) -> Iterator[None]:
    """A head of a layer, one of `heads`, hands 0 to the output projection."""

    def zero(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        out_BTHD = args[0].unflatten(-1, (heads, -1)).clone()
        out_BTHD[:, :, head] = 0
        return (out_BTHD.flatten(-2), *args[1:])

    output = find_blocks(model)[layer].output
    assert output is not None, f"layer {layer} has no attention"
    hook = output.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        hook.remove()


def without_each_head(model: Any, batch: Batch, layer: int, heads: int) -> tuple[Tensor, Tensor]:
    """Return what changes without each head of a layer.

    Returns:
        [H, B], nats per token: the rise of each text's loss, and the Kullback-Leibler divergence
        from the unchanged model's predictions, which is the rise if those were the truth.
    """
    rises, divergences = [], []
    with starting_at(model, layer, batch.outputs):
        for head in range(heads):
            with zeroed(model, layer, head, heads):
                logits_BTV = predictions(model, batch.ids_BT)
            rises.append(losses_of(logits_BTV, batch.ids_BT) - batch.loss_B)
            divergences.append(cross_entropies(batch.share_BTV, logits_BTV) - batch.entropy_B)
    return torch.stack(rises), torch.stack(divergences)


def open_results(path: Path, facts: dict[str, Any]) -> tuple[BinaryIO, list[dict[str, Any]]]:
    """Open a file of results to go on with: lock it, drop a line that is not whole, read the rest.

    Raises:
        UserError: another process writes it, or it is of another model, or other texts.
    """
    committed = RESULTS / path.name
    if not path.is_file() and committed.is_file():
        shutil.copyfile(committed, path)
    file = path.open("a+b")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"{path}: another process is writing it") from None
    file.seek(0)
    text = file.read()
    whole = text.rfind(b"\n") + 1
    file.truncate(whole)
    lines = [json.loads(line) for line in text[:whole].splitlines()]
    if not lines:
        append(file, facts)
    elif lines[0] != facts:
        other = [name for name in facts if lines[0].get(name) != facts[name]]
        raise UserError(f"{path} is of another {', '.join(other)}: move it away")
    return file, lines[1:]


def append(file: BinaryIO, line: dict[str, Any]) -> None:
    """Append a line in one write."""
    file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")
    file.flush()
    os.fsync(file.fileno())


def units(values: Tensor) -> Any:
    """Return nats as whole numbers of `UNIT`."""
    return (values / UNIT).round().long().tolist()


class Measurement:
    """A model, its texts, and the file of what is measured.

    Args:
        folder: of Hugging Face.
        samples: of equal length.
    """

    def __init__(self, folder: Path, samples: Sequence[Sample], model: Any, output: Path):
        self.model, self.samples, self.name = model, samples, folder.resolve().name
        config = model.config.get_text_config()
        self.layers, self.heads = range(config.num_hidden_layers), config.num_attention_heads
        facts = {
            "model": self.name,
            "weights": weights_hash(model),
            "texts": data_hash(samples),
            "tokens": len(samples[0].tokens),
            "block": BLOCK,
            "layers": len(self.layers),
            "heads": self.heads,
            "unit": UNIT,
        }
        self.file, lines = open_results(output, facts)
        self.done = {(line["block"], line["layer"]) for line in lines if "layer" in line}
        self.known = {line["block"] for line in lines if "layer" not in line}

    def left(self, blocks: int) -> int:
        """Return how many lines of the first blocks are missing."""
        return sum((b, layer) not in self.done for b in range(blocks) for layer in self.layers)

    def measure(self, block: int) -> Iterator[None]:
        """Measure what is missing of a block; yields after each layer."""
        if not any((block, layer) not in self.done for layer in self.layers):
            return
        texts = self.samples[block * BLOCK : (block + 1) * BLOCK]
        ids_BT = torch.tensor([sample.tokens for sample in texts])
        rows = max(1, _LOGITS // (ids_BT.shape[1] * self.model.config.get_text_config().vocab_size))
        batches = [unchanged(self.model, ids) for ids in ids_BT.split(rows)]
        if block not in self.known:
            loss_B = torch.cat([batch.loss_B for batch in batches])
            append(self.file, {"block": block, "loss": units(loss_B)})
            self.known.add(block)
        for layer in self.layers:
            if (block, layer) not in self.done:
                found = [without_each_head(self.model, b, layer, self.heads) for b in batches]
                rise_HB, kl_HB = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
                line = {"block": block, "layer": layer, "rise": units(rise_HB)}
                append(self.file, line | {"kl": units(kl_HB.mean(1))})
                self.done.add((block, layer))
                yield


def samples_of(tokenizer: Any) -> list[Sample]:
    """Return every text as its first `TOKENS` tokens, BOS as the tokenizer adds it."""
    found, reader = [], Reader(tokenizer)
    for number, text in enumerate(read_texts()):
        tokens = reader.read(text.text, f"text {number}", TOKENS)[:TOKENS]
        if len(tokens) < TOKENS:
            raise UserError(f"text {number} has {len(tokens)} tokens, not {TOKENS}")
        found.append(Sample(tuple(tokens), text.domain, f"text {number}"))
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure blocks of texts, each on every model."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", type=Path, help="Hugging Face folders")
    parser.add_argument("--texts", type=int, default=MEASURED, help="at most so many of the texts")
    args = parser.parse_args(arguments)
    measurements = []
    blocks = -(-min(args.texts, MEASURED) // BLOCK)
    for folder in args.models:
        hub = megasink.load_model(folder, device="cpu")
        samples = samples_of(hub.tokenizer)[:MEASURED]
        output = FOLDER / f"zeroing-{folder.resolve().name}.jsonl"
        measurements.append(Measurement(folder, samples, hub.model, output))
    total = sum(len(m.layers) * blocks for m in measurements)
    before = total - sum(m.left(blocks) for m in measurements)
    done, begin = before, time.process_time()
    with torch.no_grad(), progress("zeroing", total, "layers", before=before) as tell:
        for block in range(blocks):
            for measurement in measurements:
                with told(str(FOLDER)):
                    for _ in measurement.measure(block):
                        done += 1
                        tell(done, f"{measurement.name}, block {block}")
    print(f"{done} of {total} layers measured; {time.process_time() - begin:.0f} s of CPU time")
    return 0


if __name__ == "__main__":
    from examples.replicate.entry import end_with

    end_with(main, "zeroing.py")
