"""Entries of a Hugging Face folder that a run keeps for its next export."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megasink.data.hf_tokenizer import tokenizer_hash
from megasink.files.json_file import read_object

KEY = "hugging_face"
ADOPTED = "adopted"
"""Key of the origin in a run made by `megasink adopt`."""


def carried(config: Path) -> dict[str, Any]:
    """Return the entries in a run's config.json; none without a Hugging Face model."""
    entry = read_object(config).get(KEY) if config.is_file() else None
    return entry if isinstance(entry, dict) else {}


def generation_of(config: Path, tokenizer: Any) -> dict[str, Any]:
    """Return a run's generation entries, as `with_ends`, equal to those of its export."""
    kept = carried(config)
    of_model, given = kept.get("config"), kept.get("generation_config")
    if not isinstance(given, dict):
        ends = of_model.get("eos_token_id") if isinstance(of_model, dict) else None
        given = {"eos_token_id": ends}
    if kept.get("tokenizer") != tokenizer_hash(tokenizer):
        given = {k: v for k, v in given.items() if not k.endswith(("_token_id", "_token_ids"))}
    return with_ends(given, tokenizer)


def with_ends(generation: Mapping[str, Any], tokenizer: Any) -> dict[str, Any]:
    """Return generation entries with every token that ends a text in `eos_token_id`."""
    named = generation.get("eos_token_id")
    named = [*(named if isinstance(named, list) else [named]), tokenizer.eos_token_id]
    return {**generation, "eos_token_id": sorted({end for end in named if type(end) is int})}


def entry(args: Namespace, run: Path, *, resumed: bool) -> dict[str, Any]:
    """Return the entry of a training run's config.json: the run's own, or that of its start."""
    start = args.load or args.pretrained_checkpoint
    config = Path(start).parent / "config.json" if start else None
    if resumed:
        config = run / "config.json"
    kept = carried(config) if config else {}
    found = {KEY: kept} if kept else {}
    if resumed and (origin := read_object(run / "config.json").get(ADOPTED)):
        found[ADOPTED] = origin
    return found
