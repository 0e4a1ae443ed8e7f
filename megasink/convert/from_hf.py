"""Import a Hugging Face folder as a run folder that ``megasink train --load`` accepts.

OUT/config.json, OUT/checkpoints/iter_0000000, OUT/tokenizer, OUT/flags.txt
"""

import contextlib
import dataclasses
import io
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import megasink
from megasink.checkpoints.damage import TRACKER, checkpoint_path
from megasink.checkpoints.hf_entries import KEY as CARRIED
from megasink.checkpoints.layer_keys import as_hybrid_key
from megasink.checkpoints.model_arguments import SHAPE, plain
from megasink.console.printable import say as say_printable
from megasink.console.progress import tracked
from megasink.convert import kept_config_entries as of_folder
from megasink.convert.architecture import Architecture
from megasink.convert.attention_change import Change, added, changed, gated_model, is_float32
from megasink.convert.hf_config import architecture_from, prediction_prefixes, read_config
from megasink.convert.megatron_weights import is_numbered, weight_shapes
from megasink.convert.model_flags import as_line, model_flags
from megasink.convert.read_ahead import made_ahead, one_thread
from megasink.convert.safetensors_files import HuggingFaceWeights, write_json
from megasink.convert.targets.target import Target
from megasink.convert.to_hf import Say, Verify, refuse_nan
from megasink.convert.torch_dist_writer import Part, write_checkpoint
from megasink.convert.weight_table import LAYERS, NORMS, Step, refuse, steps
from megasink.data.hf_tokenizer import id_count, load_tokenizer, tokenizer_hash
from megasink.errors import UserError, listed
from megasink.files.atomic import sync_folder
from megasink.files.output_folder import whole_folder
from megasink.megatron.argument_parser import parse_apart
from megasink.training.reinterpreted_flags import translate

_POSITIONS = "--max-position-embeddings"


@dataclasses.dataclass(frozen=True)
class HuggingFaceSource:
    """A Hugging Face folder; `tokens` is its `tokenizer_hash`, None without a tokenizer."""

    folder: Path
    model: Architecture
    target: Target
    tokenizer: bool
    tokens: str | None = None

    @cached_property
    def weights(self) -> HuggingFaceWeights:
        """The tensors."""
        return HuggingFaceWeights(self.folder)

    @cached_property
    def steps(self) -> list[Step]:
        """The step that converts each tensor."""
        todo = steps(self.target.table(self.model), self.model.layers, self.model.experts)
        # Zeros may be missing: older exports have fewer.
        names, experts = self.weights.names, self.model.experts
        known = (step for step in todo if step.row.megatron or step.hf[0] in names)
        return [part for step in known for part in step.of_experts(experts)]


def source_of(folder: Path, granularity: str | None = None) -> HuggingFaceSource:
    """Describe a folder to be imported."""
    model, target = architecture_from(read_config(folder))
    if granularity is not None:
        if granularity not in target.attention:
            raise UserError(
                f"--gate-granularity {granularity}: {target.name} has no gates of this granularity"
            )
        model = dataclasses.replace(model, attention=granularity)
    tokenizer = any((folder / name).is_file() for name in ("tokenizer.json", "tokenizer.model"))
    tokens = None
    if tokenizer:
        loaded = load_tokenizer(folder)
        size, tokens = id_count(loaded), tokenizer_hash(loaded)
        if size > model.vocabulary:
            raise UserError(
                f"the tokenizer in {folder} has {size} tokens, but the model has only "
                f"{model.vocabulary}: it belongs to another model"
            )
    return HuggingFaceSource(folder, model, target, tokenizer, tokens)


def import_model(
    source: HuggingFaceSource,
    output: Path,
    change: Change | None = None,
    *,
    say: Say = say_printable,
    verify: Verify | None = None,
) -> Architecture:
    """Write a run folder."""
    weights, todo = source.weights, source.steps
    ignored = _account(source)
    model = gated_model(source.model, change)
    say(f"source: {source.target.architecture}, {source.model.attention} attention")
    kept = of_folder.kept(source.folder, source.model, source.target, source.tokens)
    carried = [*kept["config"], *(kept["generation_config"] or {})]
    say(f"kept for the next export: {', '.join(dict.fromkeys(carried)) or 'nothing'}")
    if left := list(of_folder.left_behind(source.folder)):
        say(f"will not be exported: {', '.join(left)}")
    if ignored:
        say(f"ignored: {listed(ignored, 3)}")
    if rounded := _rounded(weights, todo, source.model.dtype):
        say(
            f"rounded to {source.model.dtype}, as config.json specifies: {len(rounded)} "
            f"tensor{'s' * (len(rounded) != 1)}, "
            f"the first {rounded[0]} ({weights.meta(rounded[0]).dtype})"
        )
    flags = model_flags(model)
    args = arguments_of(flags)
    with whole_folder(output) as folder:
        checkpoint = checkpoint_path(folder / "checkpoints", 0)
        checkpoint.mkdir(parents=True)
        begin = time.perf_counter()
        parts = list(_parts(source, model, change, todo, weights.meta))
        todo_now = tracked(todo, "converting", len(todo), "weights")
        made_now = _parts(source, model, change, todo_now, partial(_read, weights))
        with one_thread():
            common = {"checkpoint_version": 3.0, "iteration": 0}
            tensors = made_ahead(part.tensor for part in made_now)
            write_checkpoint(checkpoint, parts, tensors, common)
        seconds = time.perf_counter() - begin
        megabytes = sum(part.tensor.nbytes for part in parts) / 1e6
        say(f"weights: {megabytes:,.1f} MB, {megabytes / seconds:,.0f} MB/s")
        (folder / "checkpoints" / TRACKER).write_text("0")
        _write_beside(source, model, flags, args, kept, folder, output)
        sync_folder(checkpoint)
        if verify is not None:
            verify(folder)
    return model


def _account(source: HuggingFaceSource) -> list[str]:
    """Check that rows and tensors match one to one, and that shapes fit."""
    weights, todo = source.weights, source.steps
    known = {name for step in todo for name in step.hf}
    extra = sorted(weights.names - known)
    # As in transformers: buffers of old folders, and layers of multi-token prediction.
    heads = prediction_prefixes(read_config(source.folder))
    ignored = [n for n in extra if n.endswith("rotary_emb.inv_freq") or n.startswith(heads)]
    head, table = "lm_head.weight", "model.embed_tokens.weight"
    is_stored = source.model.tied and head in extra
    ignored += [head] if is_stored else []
    problems = [f"{name} is missing" for name in sorted(known - weights.names)]
    unknown = [name for name in extra if name not in ignored]
    problems += [f"megasink's model has no {name}" for name in unknown]
    if is_stored and not problems and not weights.are_equal(head, table):
        problems = ["lm_head.weight is not the embedding: set tie_word_embeddings to false"]
    if not problems:
        problems = list(_misfits(source, todo, weight_shapes(source.model)))
    refuse(f"{source.folder} does not contain the weights that its config.json describes", problems)
    return ignored


def _misfits(
    source: HuggingFaceSource, todo: list[Step], shapes: dict[str, tuple[int, ...]]
) -> Iterator[str]:
    for step in todo:
        if step.expert:  # as the first one
            continue
        tensors = [source.weights.meta(name) for name in step.hf]
        have = ", ".join(f"{n} {list(t.shape)}" for n, t in zip(step.hf, tensors, strict=True))
        if step.expert == 0 and any(len(t) != source.model.experts for t in tensors):
            yield f"{have}: config.json specifies {source.model.experts} experts"
            continue
        try:
            made = step.row.transform.to_megatron(*tensors)
        except RuntimeError:
            yield f"{have}: the shape does not match config.json"
            continue
        for key, tensor in zip(step.row.megatron, made, strict=True):
            wanted = shapes[key]
            # A tensor of all experts has a leading axis of experts.
            if tuple(tensor.shape[tensor.dim() - len(wanted) :]) != wanted:
                yield f"{have}: the shape does not match config.json"


def _parts(
    source: HuggingFaceSource,
    model: Architecture,
    change: Change | None,
    todo: Iterable[Step],
    read: Callable[[str, int | None], Tensor],
) -> Iterator[Part]:
    """Yield all tensors of a checkpoint."""
    layers = model.layers
    for step in todo:
        sizes = (layers, model.experts)[: len(step.index)]
        if is_numbered(next(iter(step.row.megatron), "")):
            sizes = (model.experts,)[: len(step.index)]
        for key, tensor in made(step, read, source.model, change):
            for name in dict.fromkeys((key, key.replace(*NORMS))):
                yield _placed(Part(name, step.index, sizes, tensor), model)
    for key, tensor in (added(source.model, change) | balance_state(model)).items():
        for layer in (n for n in range(layers) if model.of_layer(n).delta_net is None):
            yield _placed(Part(LAYERS + key, (layer,), (layers,), tensor), model)


def _placed(part: Part, model: Architecture) -> Part:
    """Return a part under the key that Megatron gives it in a model of these layers."""
    part = part.numbered() if model.layers_differ and not is_numbered(part.key) else part
    key = as_hybrid_key(part.key) if model.linear_layers else part.key
    return dataclasses.replace(part, key=key)


def _read(weights: HuggingFaceWeights, name: str, expert: int | None) -> Tensor:
    tensor = weights.read(name, expert)
    refuse_nan(name, tensor)
    return tensor


def made(
    step: Step,
    read: Callable[[str, int | None], Tensor],
    model: Architecture,
    change: Change | None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (key, tensor) for the output of a step."""
    tensors = [read(name, step.expert) for name in step.hf]
    try:
        converted = step.row.transform.to_megatron(*tensors)
    except UserError as error:
        raise UserError(f"{step.hf[0]}: {error}") from error
    dtype = getattr(torch, model.dtype)
    for key, stacked in zip(step.row.megatron, converted, strict=True):
        tensor = stacked if step.expert is None else stacked.squeeze(0)
        kept = torch.float32 if is_float32(key) else dtype
        yield key, changed(key, tensor, model, change).to(kept)


def _rounded(weights: HuggingFaceWeights, todo: list[Step], dtype: str) -> list[str]:
    """Return the names of tensors that have a wider dtype than the model."""
    size = getattr(torch, dtype).itemsize
    return [
        name
        for step in todo
        for name in step.hf
        if not step.expert
        and weights.meta(name).dtype.itemsize > size
        and not any(is_float32(key) for key in step.row.megatron)
    ]


def balance_state(model: Architecture) -> dict[str, Tensor]:
    """Return the initial state of megasink/megatron/layer_balance.py."""
    at = "self_attention.core_attention.head_counter."
    return {
        f"{at}coefficients": torch.zeros(model.heads),
        f"{at}routed": torch.ones(model.heads, dtype=torch.bool),
        f"{at}steps": torch.zeros(1, dtype=torch.int64),
    }


def arguments_of(flags: list[str]) -> tuple[Namespace, dict[str, Any]]:
    """Return Megatron's validated arguments for a model's flags; those of `SHAPE` are as given."""
    from megatron.training import arguments

    training = ["--micro-batch-size", "1", "--lr", "1e-4", "--train-iters", "1"]
    args = parse_apart([*flags, *training, "--seq-length", flags[flags.index(_POSITIONS) + 1]])
    list(translate(args))
    given = {name: plain(getattr(args, name)) for name in SHAPE}
    args.swiglu = args.swiglu or args.ffn_activation is not None
    with contextlib.redirect_stdout(io.StringIO()):
        arguments.validate_args(args)
    return args, given


def _write_beside(
    source: HuggingFaceSource,
    model: Architecture,
    flags: list[str],
    args: tuple[Namespace, dict[str, Any]],
    kept: dict[str, Any],
    folder: Path,
    output: Path,
) -> None:
    """Write the tokenizer, flags.txt and, last, config.json."""
    namespace, given = args
    arguments = {name: plain(value) for name, value in sorted(vars(namespace).items())}
    arguments |= {"vocab_size": model.vocabulary, "tokenizer_type": "NullTokenizer"}
    if source.tokenizer:
        # Save it the way transformers loads it with that config.json.
        load_tokenizer(source.folder).save_pretrained(folder / "tokenizer")
        tokenizer = str(output / "tokenizer")
        arguments |= {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": tokenizer}
        flags = [*flags, "--tokenizer-model", tokenizer]
    (folder / "flags.txt").write_text(as_line(flags))
    config = {
        "arguments": arguments,
        "identity": given,
        "converted_from": source.target.name,
        CARRIED: kept,
        "versions": {"megasink": megasink.__version__},
    }
    write_json(folder / "config.json", config)
