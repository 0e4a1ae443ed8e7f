"""What is compared after a conversion, and with what: logits where memory allows, else tensors."""

import contextlib
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from megasink.checkpoint.find import Checkpoint, find_checkpoint
from megasink.checkpoint.legacy import is_legacy
from megasink.convert.architecture import Architecture
from megasink.convert.attention_change import Change
from megasink.convert.from_hf import HuggingFaceSource, head_counter, made
from megasink.convert.hf_config import transformers_has
from megasink.convert.megasink_model import changed_files
from megasink.convert.megatron_reader import MegatronCheckpoint
from megasink.convert.megatron_weights import leading_axes
from megasink.convert.safetensors_reader import HuggingFaceWeights
from megasink.convert.sink_calibration import set_sinks
from megasink.convert.table import LAYERS, NORM_BEFORE_EXPERTS, NORM_OF_LOCAL_SPEC, steps
from megasink.convert.targets import choose
from megasink.convert.to_hf import Source, converted
from megasink.convert.torch_dist_writer import TorchDistWriter
from megasink.convert.verify import (
    fits_in_memory,
    verify_logits,
    verify_tensors,
    verify_tokenizer,
)
from megasink.errors import UserError
from megasink.printable import say as say_printable

Say = Callable[[str], None]


def check_export(
    source: Source, folder: Path, target_name: str | None = None, say: Say = say_printable
) -> None:
    """Compare a written Hugging Face folder with the checkpoint that it was made from.

    Raises:
        UserError: they differ, or the installed transformers has not the architecture.
    """
    if source.tokenizer is not None:
        verify_tokenizer(source.tokenizer, folder)
    checkpoint = MegatronCheckpoint(source.found.folder)
    target, _ = choose(source.model, target_name)
    if target.custom_code and (names := changed_files(folder)):
        raise UserError(f"{folder}: {', '.join(names)} is not what was written: a broken disk?")
    parameters = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    if fits_in_memory(parameters):
        transformers_has(target)
        with _loadable(source.found, source.model, folder) as found:
            verify_logits(found, folder, source.model, source.tokenizer, say)
        return
    model = source.model
    weights = HuggingFaceWeights(folder)

    def written() -> Iterator[tuple[str, Tensor, Tensor]]:
        for step in steps(target.table(model), model.layers, model.experts):
            for name, tensor in zip(step.hf, converted(checkpoint, step), strict=True):
                yield name, weights.read(name), tensor

    _say_tensors(verify_tensors(written(), folder), parameters, say)


@contextlib.contextmanager
def _loadable(found: Checkpoint, model: Architecture, beside: Path) -> Iterator[Checkpoint]:
    """The checkpoint itself, or while the body runs a torch_dist copy of its weights.

    Args:
        beside: a folder on the disk that has room for them.
    """
    if not is_legacy(found.folder):
        yield found
        return
    folder = Path(tempfile.mkdtemp(prefix=".loadable-", dir=beside.parent))
    try:
        _rewrite(MegatronCheckpoint(found.folder), model, folder)
        yield found._replace(folder=folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _rewrite(checkpoint: MegatronCheckpoint, model: Architecture, folder: Path) -> None:
    with TorchDistWriter(folder) as writer:
        for key, shape in checkpoint.shapes.items():
            leading = leading_axes(key)
            for index in itertools.product(*map(range, shape[:leading])):
                tensor = checkpoint.read(key, index)
                names = (key, NORM_OF_LOCAL_SPEC) if key == NORM_BEFORE_EXPERTS else (key,)
                for name in names:
                    writer.write(name, tensor, index, shape[:leading])
        for layer in range(model.layers):
            for name, tensor in head_counter(model).items():
                writer.write(LAYERS + name, tensor, (layer,), (model.layers,))
        writer.finish({})


def _say_tensors(count: int, parameters: int, say: Say) -> None:
    say(
        f"verified: {count} tensors are those of the other side, to the bit. Not verified: logits "
        f"({parameters / 1e9:.1f}e9 parameters do not fit into memory twice in float32)"
    )


def check_import(
    source: HuggingFaceSource,
    change: Change | None,
    folder: Path,
    *,
    compare: bool = True,
    say: Say = say_printable,
) -> None:
    """Set the sinks of a changed model, and compare a written run with the folder it was made from.

    Args:
        compare: logits; else only sinks are set.

    Raises:
        UserError: they differ.
    """
    from megasink.data.tokenizer import load_tokenizer

    if source.target.custom_code and (names := changed_files(source.folder)):
        say(f"not run: {', '.join(names)} of {source.folder}, other than this megasink's own")
    tokenizer = load_tokenizer(source.folder) if source.tokenizer else None
    if tokenizer is not None:
        verify_tokenizer(tokenizer, folder / "tokenizer")
    found = find_checkpoint(folder)
    if change is not None and change.sink_weight is not None:
        # The model still computes what it did: the sinks draw nothing yet.
        if compare:
            verify_logits(found, source.folder, source.model, tokenizer, say)
        set_sinks(found, source.model, change.sink_weight, tokenizer, say)
        return
    weights = HuggingFaceWeights(source.folder)
    parameters = sum(weights.meta(name).numel() for name in weights.names)
    if not fits_in_memory(parameters):
        _say_tensors(
            verify_tensors(_imported(source, change, found.folder), folder), parameters, say
        )
        return
    transformers_has(source.target)
    verify_logits(found, source.folder, source.model, tokenizer, say)


def _imported(
    source: HuggingFaceSource, change: Change | None, folder: Path
) -> Iterator[tuple[str, Tensor, Tensor]]:
    weights, checkpoint = HuggingFaceWeights(source.folder), MegatronCheckpoint(folder)
    model = source.model
    for step in steps(source.target.table(model), model.layers, model.experts):
        for key, tensor in made(step, weights, model, change):
            yield key, checkpoint.read(key, step.index), tensor
