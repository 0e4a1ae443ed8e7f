"""config.json entries that survive an import and are exported again.

An import keeps them in its run's config.json (megasink/checkpoints/hf_entries.py), and an export
writes them again: end-of-text tokens, sampling parameters, coefficients of training.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megasink.checkpoints.run_tokenizer import is_of_tokenizer
from megasink.convert.architecture import Architecture
from megasink.convert.hf_config import GENERATION_FIELDS, OURS, config_of, read_config
from megasink.convert.megasink_model import FILES
from megasink.convert.targets.target import Config, Target
from megasink.convert.unread_config_entries import OF_THE_FILE
from megasink.files.checked_fields import check
from megasink.files.json_file import read_object

GENERATION = "generation_config.json"
# Entries of every config.json that do not describe its model.
_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_EXPERTS = ("router_aux_loss_coef", "output_router_logits")
_UNDECIDED = {*_TOKENS, *_EXPERTS, "attention_dropout", "use_cache", "router_jitter_noise"}
_UNDECIDED |= {"residual_dropout", "hidden_dropout"}
_NEVER = OF_THE_FILE | {OURS}
_WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "config.json", GENERATION, "README.md")


def kept(folder: Path, model: Architecture, target: Target, tokens: str | None) -> dict[str, Any]:
    """Return the entries of a folder that an import keeps."""
    config, ours = read_config(folder), config_of(model, target, {})
    decided = ours.keys() - _undecided(ours)
    generation = folder / GENERATION
    defaults = read_object(generation) if generation.is_file() else None
    if defaults is not None:
        check(GENERATION_FIELDS, defaults, str(generation))
    return {
        "model_type": target.name,
        "tokenizer": tokens,
        "config": {k: v for k, v in config.items() if k not in decided | _NEVER},
        "generation_config": defaults,
    }


def _undecided(config: Config) -> set[str]:
    """Return the keys of a config.json that do not describe the model."""
    keys = set(_UNDECIDED)
    if not config.get("use_sliding_window", True):
        keys |= {"sliding_window", "max_window_layers"}
    if "moe_intermediate_size" in config:
        keys.add("intermediate_size")  # of dense layers, of which there are none
    return keys


def left_behind(folder: Path) -> Iterator[str]:
    """Yield the names of files that an import does not copy."""
    ours = {path.name for path in FILES}
    for path in sorted(folder.iterdir()):
        known = any(path.match(pattern) for pattern in _WEIGHTS) or path.name in ours
        if path.is_file() and not known and not is_of_tokenizer(path):
            yield path.name


def written_again(
    carried: Mapping[str, Any], config: Config, tokens: str | None
) -> tuple[Config, Config, list[str]]:
    """Return an export's config.json, generation_config.json, and entries that do not fit."""
    same_type = carried.get("model_type") == config["model_type"]
    same_tokens = bool(carried) and carried.get("tokenizer") == tokens
    experts = _EXPERTS if "num_experts_per_tok" in config else ()
    written, undecided = dict(config), _undecided(config)
    lost = []
    for key, value in _entries(carried, "config").items():
        if key in _NEVER or (key in config and key not in undecided):
            continue
        of_tokens = key.endswith(("_token_id", "_token_ids"))
        if same_tokens if of_tokens else same_type or key in config or key in experts:
            written[key] = value
        else:
            lost.append(key)
    special = {key: written[key] for key in _TOKENS if key in written}
    given = _entries(carried, "generation_config")
    generation = given or {"_from_model_config": True, **special}
    if given and not same_tokens:
        lost += [key for key in generation if key.endswith(("_token_id", "_token_ids"))]
        generation = {k: v for k, v in generation.items() if k not in lost} | special
    return written, generation, sorted(set(lost))


def _entries(carried: Mapping[str, Any], name: str) -> Config:
    entries = carried.get(name)
    return dict(entries) if isinstance(entries, dict) else {}
