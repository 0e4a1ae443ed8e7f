"""Export the checkpoint of a run as a Hugging Face folder, tensor by tensor."""

import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megasink.checkpoints.find import Checkpoint, find_checkpoint
from megasink.checkpoints.hf_entries import carried
from megasink.checkpoints.run_tokenizer import tokenizer_of
from megasink.checkpoints.saved_arguments import read_arguments
from megasink.console.printable import say as say_printable
from megasink.console.progress import tracked
from megasink.convert.architecture import Architecture
from megasink.convert.architecture_of_run import architecture_of
from megasink.convert.hf_config import config_of
from megasink.convert.kept_config_entries import GENERATION, written_again
from megasink.convert.megasink_model import FILES
from megasink.convert.megatron_reader import MegatronCheckpoint
from megasink.convert.megatron_weights import is_numbered, leading_axes, weight_shapes
from megasink.convert.model_card import model_card
from megasink.convert.read_ahead import ahead, one_thread
from megasink.convert.safetensors_files import write_json, write_weights
from megasink.convert.targets import TARGETS, choose
from megasink.convert.targets.target import Target
from megasink.convert.weight_table import Step, planned, refuse, steps
from megasink.data.hf_tokenizer import id_count, tokenizer_hash
from megasink.errors import UserError
from megasink.files.output_folder import whole_folder

Say = Callable[[str], None]
Verify = Callable[[Path], None]


@dataclass(frozen=True)
class Source:
    """A checkpoint and its target: the plan of the writer and of the verification."""

    location: Checkpoint
    saved: dict[str, Any]  # arguments of its run
    model: Architecture
    tokenizer: Any
    carried: dict[str, Any]  # its entries from a Hugging Face folder
    target: Target
    why: str

    @cached_property
    def checkpoint(self) -> MegatronCheckpoint:
        """The weights."""
        return MegatronCheckpoint(self.location.folder)

    @cached_property
    def steps(self) -> list[Step]:
        """The step that converts each weight."""
        return list(steps(self.target.table(self.model), self.model.layers, self.model.experts))


def source_of(
    run: Path,
    iteration: int | None = None,
    tokenizer: str | Path | None = None,
    target: str | None = None,
) -> Source:
    """Describe a checkpoint to be exported."""
    location = find_checkpoint(run, iteration)
    saved = read_arguments(location.config)
    loaded = tokenizer_of(saved, tokenizer, location.config)
    model, problems = architecture_of(saved, None if loaded is None else id_count(loaded))
    if problems:
        raise UserError(f"{run} cannot be converted for transformers: {'; '.join(problems)}")
    kept = carried(location.config)
    before = TARGETS.get(kept.get("model_type", ""))
    if target is None and before is not None and not before.export_problems(model):
        return Source(location, saved, model, loaded, kept, before, "as imported")
    return Source(location, saved, model, loaded, kept, *choose(model, target))


def export(
    source: Source,
    output: Path,
    *,
    shard_bytes: int = 5 * 10**9,
    say: Say = say_printable,
    verify: Verify | None = None,
) -> Target:
    """Write a Hugging Face folder."""
    target, checkpoint, todo = source.target, source.checkpoint, source.steps
    say(f"target: {target.architecture} ({target.name}): {source.why}")
    _account(source)
    entries = []
    for step in todo:
        entries += planned(step, [checkpoint.meta(k, step.index) for k in step.row.megatron])
    with whole_folder(output) as folder:
        begin = time.perf_counter()
        with one_thread():
            files = write_weights(folder, entries, _tensors(checkpoint, todo), shard_bytes)
        seconds = time.perf_counter() - begin
        megabytes = sum(like.nbytes for _, like in entries) / 1e6
        say(
            f"weights: {len(entries)} tensors, {megabytes:,.1f} MB in {len(files)} "
            f"file{'s' * (len(files) > 1)}, {megabytes / seconds:,.0f} MB/s"
        )
        _write_beside(source, folder, say)
        if verify is not None:
            verify(folder)
    return target


def _account(source: Source) -> None:
    """Check that rows and weights match one to one, with the shapes of the model."""
    checkpoint, model = source.checkpoint, source.model
    known = {key for step in source.steps for key in step.row.megatron}
    stored_keys = checkpoint.shapes.keys()
    problems = [f"{key} is missing" for key in sorted(known - stored_keys)]
    problems += [f"the target has no tensor for {key}" for key in sorted(stored_keys - known)]
    for key, shape in sorted(weight_shapes(model).items()):
        axes = (model.layers, model.experts)[is_numbered(key) :][: leading_axes(key)]
        stored = checkpoint.shapes.get(key, (*axes, *shape))
        if stored != (*axes, *shape):
            problems.append(f"{key} is {list(stored)}, not {[*axes, *shape]}")
    refuse(
        f"{checkpoint.folder} is a checkpoint of a different model than config.json describes",
        problems,
    )


def _tensors(checkpoint: MegatronCheckpoint, todo: list[Step]) -> Iterator[Tensor]:
    read = ahead(todo, lambda step: _read(checkpoint, step))
    for step, tensors in tracked(read, "converting", len(todo), "weights"):
        yield from step.row.transform.to_hf(*tensors)


def converted(checkpoint: MegatronCheckpoint, step: Step) -> Iterator[Tensor]:
    """Yield the output of a step."""
    yield from step.row.transform.to_hf(*_read(checkpoint, step))


def _read(checkpoint: MegatronCheckpoint, step: Step) -> list[Tensor]:
    tensors = [checkpoint.read(key, step.index) for key in step.row.megatron]
    for key, tensor in zip(step.row.megatron, tensors, strict=True):
        refuse_nan(key, tensor)
    return tensors


def refuse_nan(name: str, tensor: Tensor) -> None:
    """Refuse a weight that holds NaN or infinity."""
    # One fast pass: with a NaN, both are NaN; an infinity is one of them.
    if not tensor.numel() or bool(torch.isfinite(torch.stack(torch.aminmax(tensor))).all()):
        return
    bad = (~torch.isfinite(tensor)).nonzero()
    raise UserError(
        f"{name} contains NaN or infinity ({len(bad)} of {tensor.numel()} values, the first at "
        f"{bad[0].tolist()}): use a checkpoint from before the run diverged"
    )


def _write_beside(source: Source, folder: Path, say: Say) -> None:
    """Write the tokenizer, model card, modeling files, and config.json last."""
    target, special, tokens = source.target, special_tokens(source.tokenizer), None
    if source.tokenizer is not None:
        tokens = tokenizer_hash(source.tokenizer)
        source.tokenizer.save_pretrained(folder)
    card = model_card(source.model, target, source.saved, source.location)
    (folder / "README.md").write_text(card, errors="backslashreplace")
    for path in FILES if target.custom_code else ():
        shutil.copyfile(path, folder / path.name)
    ours = config_of(source.model, target, special)
    config, generation, lost = written_again(source.carried, ours, tokens)
    if lost:
        say(
            "not written, because they belong to another architecture or tokenizer: "
            f"{', '.join(lost)}"
        )
    write_json(folder / GENERATION, generation)
    write_json(folder / "config.json", config)


def special_tokens(tokenizer: Any) -> dict[str, int | None]:
    """Return the ids for config.json; the defaults of transformers belong to other tokenizers."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    return {name: getattr(tokenizer, name, None) for name in names}
