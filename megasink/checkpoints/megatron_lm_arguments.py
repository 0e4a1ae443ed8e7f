"""Read the arguments in a checkpoint of Megatron-LM or Megatron-Bridge, without running its code.

Megatron-LM stores its parsed arguments among the common state: the entry ``common_state`` of the
checkpoint since 0.19, before in common.pt. Bridge writes run_config.yaml instead.
"""

import re
from argparse import Namespace
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from megasink.checkpoints.damage import checkpoint_path, damage, iterations
from megasink.checkpoints.find import is_legacy, newest_checkpoint, stored_shapes
from megasink.checkpoints.model_arguments import plain
from megasink.checkpoints.torch_metadata import StandIn
from megasink.errors import UserError, reason_of
from megasink.files.json_file import read_text

BRIDGE = "run_config.yaml"
_EMBEDDING = "embedding.word_embeddings.weight"
# Bridge's providers of models that are built from Megatron's own modules.
_BUILDERS = (
    "megatron.training.models.",
    *(f"megatron.bridge.models.{name}." for name in ("gpt", "gpt_provider", "hybrid", "mamba")),
)
_FAMILIES = tuple(f"megatron.bridge.models.{name}." for name in ("llama", "qwen", "mistral"))
_CORE = "megatron.core.models."
_SPECS = ("transformer_layer_spec", "hybrid_stack_spec", "mamba_stack_spec")
# Beside the model, what describes a run that starts from it.
_SECTIONS = {
    "train": ("micro_batch_size", "global_batch_size", "train_iters"),
    "optimizer": ("lr",),
    "rng": ("seed",),
    "tokenizer": ("tokenizer_type", "tokenizer_model"),
}
# Fields of the model that change neither weights nor logits; the spec is checked before.
_WITHOUT_EFFECT = "transformer parallel_output scatter_embedding_sequence_parallel".split()
_WITHOUT_EFFECT += (
    "transformer_layer_spec gtp_weight_remat_size expert_gtp_weight_remat_size".split()
)
# Fields of Bridge's configuration that have another name among Megatron's arguments.
_RENAMED = {
    "num_moe_experts": "num_experts",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "hybrid_override_pattern": "hybrid_layer_pattern",
    "yarn_rotary_scaling_factor": "rotary_scaling_factor",
    "yarn_mscale": "mscale",
    "yarn_mscale_all_dim": "mscale_all_dim",
    "original_max_position_embeddings": "yarn_original_max_position_embeddings",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# Megatron-LM's latent attention ignores them (megatron/training/argument_utils.py:397).
_UNREAD_BY_LATENT = [name for name in _RENAMED.values() if name.startswith("yarn_")]
# (activation, whether a gate multiplies it) -> the argument that selects it.
_ACTIVATIONS: dict[tuple[str, bool], dict[str, Any]] = {
    ("gelu", False): {},
    ("silu", True): {"swiglu": True},
    ("squared_relu", False): {"squared_relu": True},
    ("quick_gelu", True): {"quick_geglu": True},
    ("gelu", True): {"ffn_activation": "geglu"},
    ("relu", True): {"ffn_activation": "reglu"},
    ("relu", False): {"ffn_activation": "relu"},
    ("silu", False): {"ffn_activation": "silu"},
}


class ForeignArguments(NamedTuple):
    """Arguments by Megatron's names, as JSON has them; `unread` have values of unknown classes."""

    values: dict[str, Any]
    writer: str
    unread: list[str]


def foreign_checkpoints(source: Path, iteration: int | None) -> dict[int, Path]:
    """Return the checkpoints to adopt by iteration, the newest last."""
    if (source / "config.json").is_file() or (source.parent / "config.json").is_file():
        raise UserError(f"{source} has a config.json: it is already a megasink run")
    source = source.resolve()
    number = re.fullmatch(r"iter_(\d+)", source.name)
    if number and iteration not in (None, int(number[1])):
        raise UserError(f"{source} is from an iteration other than {iteration}: drop --iteration")
    if number or (source / ".metadata").is_file() or is_legacy(source):
        return {int(number[1]) if number else 0: source}
    found = {n: checkpoint_path(source, n) for n in iterations(source)}
    newest = newest_checkpoint(source)
    if iteration is None and newest is not None:
        found = {n: path for n, path in found.items() if n <= newest}
    elif iteration is not None:
        found = {n: path for n, path in found.items() if n == iteration}
    if not found and iteration is None and (source / "release").is_dir():
        found = {0: source / "release"}
    if not found:
        which = "" if iteration is None else f" of iteration {iteration}"
        raise UserError(f"{source} has no checkpoint{which} (no folder iter_NNNNNNN)")
    *older, last = found
    return {n: found[n] for n in older if damage(found[n]) is None} | {last: found[last]}


def read_foreign_arguments(folder: Path) -> ForeignArguments:
    """Return the arguments in the folder of one checkpoint."""
    if is_legacy(folder):
        raise UserError(
            f"{folder} is in Megatron's old format (--ckpt-format torch): convert it to torch_dist "
            "first (docs/convert.md)"
        )
    shapes = stored_shapes(folder)
    if _EMBEDDING not in shapes:
        raise UserError(f"{folder} is not a checkpoint of a language model: no {_EMBEDDING}")
    if (folder / BRIDGE).is_file():
        found = ForeignArguments(_of_bridge(folder / BRIDGE), "Megatron-Bridge", [])
    else:
        found = _of_megatron(folder)
    # Bridge keeps the size before padding alone.
    found.values.setdefault("padded_vocab_size", shapes[_EMBEDDING][0])
    return found


def common_state(folder: Path) -> dict[str, Any]:
    """Read what a checkpoint holds beside tensors, such as the arguments, without its code."""
    from megatron.core.dist_checkpointing import load_common_state_dict
    from torch.distributed.checkpoint import CheckpointException

    from megasink.checkpoints.code_free_loading import loading_without_code

    try:
        with loading_without_code():
            state = load_common_state_dict(folder)
    except UserError:
        raise
    except (Exception, CheckpointException) as error:  # torch's is not an Exception
        raise UserError(f"{folder} cannot be read: {reason_of(error)}") from error
    return state if isinstance(state, dict) else {}


def _of_megatron(folder: Path) -> ForeignArguments:
    arguments = common_state(folder).get("args")
    if not isinstance(arguments, Namespace):
        raise UserError(
            f"{folder} has no arguments (no {BRIDGE}, and no entry args in its common state): it "
            "was not saved by the training loop of Megatron-LM or Megatron-Bridge"
        )
    unread = [name for name, value in vars(arguments).items() if isinstance(value, StandIn)]
    known = {name: value for name, value in vars(arguments).items() if name not in unread}
    values = {n: plain(v) for n, v in known.items()}
    if values.get("multi_latent_attention") and "attention_variant" not in values:
        values |= dict.fromkeys(_UNREAD_BY_LATENT)
    # Before 0.18 a flag had another name, and the end of a document was one token more.
    values.setdefault("muon_nesterov", values.pop("muon_use_nesterov", None))
    if values.get("tokenizer_type") == "NullTokenizer" and "null_tokenizer_eod_id" not in values:
        values["vocab_size"] = (values.get("vocab_size") or 0) + 1
    return ForeignArguments(values, "Megatron-LM", unread)


def _of_bridge(path: Path) -> dict[str, Any]:
    import yaml  # transformers requires it

    try:
        config = yaml.safe_load(read_text(path, 1 << 24))
        model = config["model"]
        targets = {name: _target(model.get(name)) for name in _SPECS} | {"": _target(model)}
        model = {**model, **(model.get("transformer") or {})}
        # A file that is cut off lacks the last section.
        values = {n: config[name].get(n) for name, names in _SECTIONS.items() for n in names}
    except UserError:
        raise
    except (yaml.YAMLError, RecursionError, ValueError, TypeError, KeyError, AttributeError) as why:
        text = " ".join(str(why).split())
        raise UserError(f"{path} is not a configuration of Megatron-Bridge: {text:.200}") from why
    for name, target in targets.items():
        # A family's own spec has layers of its own, as that of Llama 4.
        if not target.startswith((*_BUILDERS, *((_CORE, "None") if name else _FAMILIES))):
            raise UserError(f"{path}: model{name and '.'}{name} {target} would run custom code")
    values = dict(_fields({n: v for n, v in (values | model).items() if n not in _WITHOUT_EFFECT}))
    name = str(values.get("activation_func")).rpartition(".")[2]
    kind = (name.replace("relu2", "squared_relu"), bool(values.get("gated_linear_unit")))
    if kind not in _ACTIVATIONS:
        raise UserError(f"{path}: activation_func {kind[0]} is not supported")
    values |= _ACTIVATIONS[kind]
    groups = values.get("num_query_groups")
    return values | {
        "untie_embeddings_and_output_weights": not values.get(
            "share_embeddings_and_output_weights", True
        ),
        "group_query_attention": groups not in (None, values.get("num_attention_heads")),
        "max_position_embeddings": values.get("seq_length"),
    }


def _target(value: Any) -> str:
    """Return the class or function that a mapping names; "None" for null."""
    return str(value.get("_target_", value)) if isinstance(value, Mapping) else str(value)


def _fields(section: Mapping[Any, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a section that are numbers, names or lists of them."""
    for name, value in section.items():
        if isinstance(value, Mapping):  # an enum, a data type, a function, or an object
            target = _target(value)
            name_of = value.get("_name_") or target.rpartition(".")[2]
            value = target if target.startswith("torch.") and "nn" not in target else name_of
        if value is not None and not str(name).startswith("_"):
            yield _RENAMED.get(str(name), str(name)), value
