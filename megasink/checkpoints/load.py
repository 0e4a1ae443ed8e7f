"""Load a model into one process from config.json and a checkpoint, without code in the files."""

import contextlib
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.dist_checkpointing.dict_utils import extract_matching_values, nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factory_merges
from megatron.core.dist_checkpointing.state_dict_utils import load_preprocess
from megatron.core.dist_checkpointing.strategies.torch import TorchDistLoadShardedStrategy
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.process_groups_config import ProcessGroupCollection
from torch.distributed.checkpoint import CheckpointException

from megasink import cpu
from megasink.checkpoints.code_free_loading import loading_without_code
from megasink.checkpoints.find import Checkpoint, find_checkpoint, stored_shapes
from megasink.checkpoints.gpt_as_hybrid import layer_maps, point_at_gpt_keys
from megasink.checkpoints.hf_entries import generation_of
from megasink.checkpoints.layer_keys import HEAD_STATE, LAYERS, NORMS, NUMBERED, pattern_in
from megasink.checkpoints.run_tokenizer import tokenizer_of
from megasink.checkpoints.saved_arguments import read_arguments, single_process_arguments
from megasink.checkpoints.saved_fields import check_fields
from megasink.data.hf_tokenizer import id_count
from megasink.errors import UserError, listed
from megasink.megatron.checkpoint_parts import named_parts
from megasink.megatron.embedding_rows import counted_rows, text_tokens, with_tokens
from megasink.megatron.model_of_arguments import model_config
from megasink.megatron.process_groups import destroy_groups

_TWINS = dict([NORMS, NORMS[::-1]])


class LoadedModel(NamedTuple):
    """A model in evaluation mode, on the device; see `generation_of` for `generation`."""

    model: HybridModel
    tokenizer: Any
    args: Namespace
    iteration: int
    generation: dict[str, Any]

    @property
    def vocabulary(self) -> int:
        """The ids of the tokenizer, or those of the model if it is known to have more."""
        return max(id_count(self.tokenizer), text_tokens(vars(self.args)) or 0)


def load_model(
    checkpoint_or_run: str | Path,
    iteration: int | None = None,
    tokenizer: str | Path | None = None,
    *,
    yarn: float | None = None,
) -> LoadedModel:
    """Load all weights of a run into this process; :func:`single_process` destroys the groups."""
    checkpoint = find_checkpoint(Path(checkpoint_or_run), iteration)
    saved = read_arguments(checkpoint.config)
    loaded_tokenizer = tokenizer_of(saved, tokenizer, checkpoint.config)
    if loaded_tokenizer is None:
        raise UserError(
            f"the run was trained with {saved.get('tokenizer_type')}, which cannot encode text: "
            "pass a Hugging Face tokenizer folder with --tokenizer"
        )
    model, args = load_without_tokenizer(checkpoint, tokens=id_count(loaded_tokenizer), yarn=yarn)
    generation = generation_of(checkpoint.config, loaded_tokenizer)
    return LoadedModel(model, loaded_tokenizer, args, checkpoint.iteration, generation)


def load_without_tokenizer(
    checkpoint: Checkpoint,
    dtype: torch.dtype | None = None,
    tokens: int | None = None,
    *,
    yarn: float | None = None,
) -> tuple[HybridModel, Namespace]:
    """Load a model like :func:`load_model`, whose tokenizer has this many `tokens`."""
    saved = with_tokens(read_arguments(checkpoint.config), tokens)
    if yarn is not None:
        saved = with_yarn(saved, yarn)
    if dtype is torch.float32:
        saved |= {"bf16": False, "fp16": False}
    _refuse_sizes(saved, checkpoint.folder)
    model, args = _built(saved, checkpoint.config)
    # As Float16Module does: modules that must stay in float32 handle this themselves.
    model.to(args.params_dtype)
    load_weights(model, checkpoint.folder)
    if not cpu.is_active():
        model.cuda()
    return model.eval(), args


def _built(saved: Mapping[str, Any], where: Path) -> tuple[HybridModel, Namespace]:
    """Build the model of a run's arguments in this process."""
    make_parallel_state()
    with _describing_a_model(where):
        args = single_process_arguments(saved)
        config = model_config(args)
        config.finalize()
        model = config.get_builder_cls()(config).build_model(
            ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
        )
    return model, args


def check_weights(saved: Mapping[str, Any], folder: Path) -> None:
    """Compare the weights in a checkpoint with those that arguments describe, by their shapes."""
    check_fields(saved, str(folder))
    _refuse_sizes(saved, folder)
    with torch.device("meta"):
        model, _ = _built(saved, folder)
    _wanted(model, folder)


def _refuse_sizes(saved: Mapping[str, Any], folder: Path) -> None:
    """Refuse sizes far beyond those of the stored weights, before such a model takes memory."""
    shapes = stored_shapes(folder)
    table = shapes.get("embedding.word_embeddings.weight", (0, 0))
    has = {
        "padded_vocab_size": table[0],
        "hidden_size": table[1],
        # Layers that differ are numbered keys, the others a leading axis.
        "num_layers": max(
            int(numbered[1]) + 1 if (numbered := NUMBERED.match(key)) else shape[0]
            for key, shape in shapes.items()
            if key.startswith(LAYERS)
        ),
        "ffn_hidden_size": max(
            (s[-1] for k, s in shapes.items() if k.endswith("mlp.linear_fc2.weight")), default=0
        ),
    }
    wrong = [
        f"{name} is {saved[name]}, but the weights have {size}"
        for name, size in has.items()
        if size and saved[name] > 16 * size
    ]
    if wrong:
        raise UserError(f"{folder} does not match the model in config.json: {'; '.join(wrong)}")


_REFUSALS = (AssertionError, ArithmeticError, LookupError, TypeError, ValueError, ImportError)


@contextlib.contextmanager
def _describing_a_model(config: Path) -> Iterator[None]:
    """Turn Megatron's errors about invalid model arguments into one line."""
    try:
        yield
    except UserError:
        raise
    except _REFUSALS as error:
        reason = " ".join(str(error).split()).partition(" when instantiating ")[0]
        text = f"Megatron cannot build the model of {config}: {reason or type(error).__name__}"
        raise UserError(text) from error


def load_weights(model: HybridModel, folder: Path) -> None:
    """Copy the weights of a torch_dist checkpoint into a model, and unpickle nothing else."""
    tensors, factories = _wanted(model, folder)
    try:
        with loading_without_code():
            state = TorchDistLoadShardedStrategy().load(tensors, folder)
    except UserError:
        raise
    except (OSError, RuntimeError, ValueError, EOFError) as error:
        raise UserError(f"{folder} cannot be read: {error}") from error
    except CheckpointException as error:  # torch's BaseException, with each rank's errors
        kinds = ", ".join(sorted({type(e).__name__ for e, _ in error.failures.values()}))
        raise UserError(
            f"{folder} is damaged: its tensors cannot be read ({kinds}); choose another with "
            "--iteration"
        ) from error
    state = apply_factory_merges(state, factories)
    # Entries that are not tensors are TransformerEngine's FP8 state, which is unused here.
    missing, unexpected = model.load_state_dict(state, strict=False)
    missing = [name for name in missing if not name.endswith("_extra_state")]
    for what, names in (("unexpected", unexpected), ("missing", missing)):
        if names:
            raise UserError(f"{folder} does not fit the model: {what} {names}")


def _wanted(model: HybridModel, folder: Path) -> tuple[Any, Any]:
    """Return a model's tensors under the keys of a checkpoint that has all, and their factories."""
    groups = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state, stored = model.sharded_state_dict(metadata=groups), stored_shapes(folder)
    if pattern_in(stored) is None:
        point_at_gpt_keys(state, layer_maps(model.hybrid_layer_pattern), stored)
    wanted, _, factories = load_preprocess(state)
    counted = any(HEAD_STATE in key for key in stored)  # else Megatron's own checkpoint
    tensors, _ = extract_matching_values(
        wanted, lambda v: isinstance(v, ShardedTensor) and (counted or HEAD_STATE not in v.key)
    )
    shapes = {t.key: tuple(t.global_shape) for t in nested_values(tensors)}
    _compare(shapes, stored, folder)
    return tensors, factories


def _compare(
    wanted: dict[str, tuple[int, ...]], stored: dict[str, tuple[int, ...]], folder: Path
) -> None:
    different = [
        f"{key} is {list(stored[key])}, not {list(shape)}"
        for key, shape in wanted.items()
        if key in stored and stored[key] != shape
    ]
    different += [f"{key} is missing" for key in wanted.keys() - stored.keys()]
    different += [
        f"{key} is not in the model"
        for key in stored.keys() - wanted.keys()
        if _twin(key) not in wanted
    ]
    if different:
        few = listed(sorted(different), 3)
        raise UserError(f"{folder} does not match the model in config.json: {few}")


def _twin(key: str) -> str | None:
    """Return the other name of the norm before experts; None for other weights."""
    number, _, _ = key.removeprefix(LAYERS).partition(".")
    own = f"{LAYERS}{number}." if number.isdigit() else LAYERS
    twin = _TWINS.get(key.removeprefix(own))
    return twin and own + twin


def make_parallel_state() -> None:
    """Create a single-process group, without a port, if there is no process group."""
    if not cpu.is_active() and not torch.cuda.is_available():
        raise UserError(
            "no CUDA device: call megasink.cpu.activate() before anything imports megatron"
        )
    if not torch.distributed.is_initialized():
        backend = "gloo" if cpu.is_active() else "nccl"
        torch.distributed.init_process_group(
            backend, store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
        tensor_parallel.model_parallel_cuda_manual_seed(1234)
    size = parallel_state.get_tensor_model_parallel_world_size()
    size *= parallel_state.get_pipeline_model_parallel_world_size()
    if size != 1:
        raise UserError(
            f"load_model loads a whole model: use a model-parallel size of 1, not {size}"
        )


@contextlib.contextmanager
def single_process() -> Iterator[None]:
    """Destroy :func:`load_model`'s process groups on exit, or gloo may abort the process."""
    before = set(torch.distributed.distributed_c10d._world.pg_map)
    ours = not parallel_state.model_parallel_is_initialized()
    try:
        yield
    finally:
        if ours:
            destroy_groups(before)


def with_yarn(saved: Mapping[str, Any], factor: float) -> dict[str, Any]:
    """Return the arguments of a run whose context, its sequence length, YaRN stretches (P1.37)."""
    kind = saved.get("position_embedding_type")
    if kind != "rope" or saved.get("use_rope_scaling"):
        given = "--use-rope-scaling" if kind == "rope" else f"--position-embedding-type {kind}"
        raise UserError(
            f"--yarn {factor:g}: the run has {given}, but YaRN needs plain rotary embeddings (rope)"
        )
    trained = saved["seq_length"]
    return {
        **saved,
        "position_embedding_type": "yarn",
        "rotary_scaling_factor": factor,
        "yarn_original_max_position_embeddings": trained,
        "max_position_embeddings": max(round(factor * trained), saved["max_position_embeddings"]),
    }


_PADDED = ("word_embeddings.weight", "output_layer.weight")


def model_facts(args: Namespace, model: HybridModel, iteration: int, name: str) -> dict[str, Any]:
    """Return the value of "model" in results.json, after `iteration` steps of training."""
    attention = args.attention_variant
    if args.attention_similarity != "softmax":  # the scores of other weights are proxies (P2.37)
        attention = f"{args.attention_similarity} (proxy weights)"
    return {
        "name": name,
        "kind": f"{attention} attention, step {iteration}",
        "attention": model.config.attention_kernel,
        "dtype": str(args.params_dtype).removeprefix("torch."),
        "parameters": _parameters(args, model),
        "step": iteration,
        "trained_tokens": iteration * args.global_batch_size * args.seq_length,
    }


def _parameters(args: Namespace, model: HybridModel) -> int:
    """Count parameters as transformers does, without the padding of vocabulary and gates."""
    parts = (part for pair in model.named_parameters() for part in named_parts(*pair))
    sizes = {name: tensor.numel() for name, tensor in parts}
    padding = args.padded_vocab_size - counted_rows(vars(args))
    padded = sum(name.endswith(_PADDED) for name in sizes)
    return sum(sizes.values()) - padded * padding * args.hidden_size
