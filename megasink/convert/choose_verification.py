"""Choose how to verify a conversion: compare logits if memory allows, otherwise every tensor."""

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import Tensor

from megasink.checkpoints.find import find_checkpoint
from megasink.console.printable import say as say_printable
from megasink.convert.attention_change import Change
from megasink.convert.from_hf import HuggingFaceSource, made
from megasink.convert.hf_config import transformers_has
from megasink.convert.megasink_model import changed_files
from megasink.convert.megatron_reader import MegatronCheckpoint
from megasink.convert.safetensors_files import HuggingFaceWeights
from megasink.convert.sink_calibration import set_sinks
from megasink.convert.to_hf import Say, Source, converted
from megasink.convert.verify_logits import fits_in_memory, verify_logits, verify_tokenizer
from megasink.data.hf_tokenizer import load_tokenizer
from megasink.errors import UserError


def check_export(source: Source, folder: Path, say: Say = say_printable) -> None:
    """Compare a written Hugging Face folder with the checkpoint it was made from."""
    if source.tokenizer is not None:
        verify_tokenizer(source.tokenizer, folder)
    model, checkpoint, target = source.model, source.checkpoint, source.target
    if target.custom_code and (names := changed_files(folder)):
        raise UserError(
            f"{folder}: {', '.join(names)} differs from the written data: check the disk"
        )
    parameters = sum(torch.Size(shape).numel() for shape in checkpoint.shapes.values())
    if fits_in_memory(parameters):
        transformers_has(target)
        verify_logits(source.location, folder, model, source.tokenizer, say)
        return
    weights = HuggingFaceWeights(folder)
    written = (
        (name, weights.read(name), tensor)
        for step in source.steps
        for name, tensor in zip(step.hf, converted(checkpoint, step), strict=True)
    )
    _verify_tensors(written, folder, parameters, say)


def _verify_tensors(
    written: Iterable[tuple[str, Tensor, Tensor]], folder: Path, parameters: int, say: Say
) -> None:
    """Compare (name, tensor as read, tensor as converted), bit by bit."""
    count = 0
    for name, stored, wanted in written:
        if stored.dtype != wanted.dtype or not torch.equal(stored, wanted):
            raise UserError(f"{folder}: {name} differs from the written data: check the disk")
        count += 1
    say(
        f"verified: {count} tensors are identical on both sides. Not verified: logits "
        f"(two float32 copies of {parameters / 1e9:.1f}e9 parameters do not fit into memory)"
    )


def check_import(
    source: HuggingFaceSource,
    change: Change | None,
    folder: Path,
    *,
    compare: bool = True,
    say: Say = say_printable,
) -> None:
    """Set the sinks of a changed model, and compare a run with the folder it was made from."""
    model = source.model
    if source.target.custom_code and (names := changed_files(source.folder)):
        say(
            f"{source.folder} lacks megasink's own versions of {', '.join(names)}: its files are "
            "not run"
        )
    tokenizer = load_tokenizer(source.folder) if source.tokenizer else None
    if tokenizer is not None:
        verify_tokenizer(tokenizer, folder / "tokenizer")
    location = find_checkpoint(folder)
    if change is not None and change.sink_weight is not None:
        # The sinks have no weight yet, so the model still computes the same.
        if compare:
            verify_logits(location, source.folder, model, tokenizer, say)
        set_sinks(location, model, change.sink_weight, tokenizer, say)
        return
    weights = source.weights
    parameters = sum(weights.meta(name).numel() for name in weights.names)
    if fits_in_memory(parameters):
        transformers_has(source.target)
        verify_logits(location, source.folder, model, tokenizer, say)
        return
    checkpoint = MegatronCheckpoint(location.folder)
    written = (
        (key, checkpoint.read(key, step.index), tensor)
        for step in source.steps
        for key, tensor in made(step, weights.read, model, change)
    )
    _verify_tensors(written, folder, parameters, say)
