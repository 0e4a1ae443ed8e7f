"""What a Hugging Face folder holds beside its model: a run keeps it for the next export.

An import writes it into config.json (megasink/convert/carried.py); a run takes it over from the
checkpoint that it starts from, so that it goes from run to run.
"""

from argparse import Namespace
from pathlib import Path
from typing import Any

from megasink.json_file import read_object

KEY = "hugging_face"


def carried(config: Path) -> dict[str, Any]:
    """Return what a run's config.json keeps; nothing without a Hugging Face model."""
    entry = read_object(config).get(KEY) if config.is_file() else None
    return entry if isinstance(entry, dict) else {}


def ends_of(config: Path, tokenizer: Any) -> frozenset[int]:
    """Return the tokens that end a text: the tokenizer's, and those that its folder named."""
    from megasink.data.tokenizer import tokenizer_hash

    kept, ends = carried(config), {tokenizer.eos_token_id}
    if kept.get("tokenizer") == tokenizer_hash(tokenizer):
        for part in (kept.get("config"), kept.get("generation_config")):
            named = part.get("eos_token_id") if isinstance(part, dict) else None
            ends |= {e for e in (named if isinstance(named, list) else [named]) if type(e) is int}
    return frozenset(ends)


def entry(args: Namespace, run: Path, *, resumed: bool) -> dict[str, Any]:
    """Return the entry of a training run's config.json: the run's own, or that of its start."""
    start = args.load or args.pretrained_checkpoint
    config = Path(start).parent / "config.json" if start else None
    if resumed:
        config = run / "config.json"
    kept = carried(config) if config else {}
    return {KEY: kept} if kept else {}
