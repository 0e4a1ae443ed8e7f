"""Compare a run's arguments with those in a config.json."""

import os
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasink.checkpoints.identity import plain, same
from megasink.checkpoints.tokenizer import same_tokenizer
from megasink.data.object_store import is_stored
from megasink.megatron.hybrid_pattern import pattern_of
from megasink.training.checks.blends import blend_of

LAYERS = "hybrid_layer_pattern"


def differences_of(
    config: Path,
    saved: dict[str, Any],
    args: Namespace,
    names: Sequence[str],
    *,
    finetune: bool = False,
) -> list[str]:
    """Describe the differences between arguments and those in a config.json."""
    before = {**saved["arguments"], **saved.get("identity", {})}
    now = {name: plain(getattr(args, name)) for name in names if hasattr(args, name)}

    if now.get(LAYERS) and not before.get(LAYERS):  # a GPT model's weights fit a hybrid
        before[LAYERS], now[LAYERS] = pattern_of(before), pattern_of(now)
        for name in ("num_layers", "moe_layer_freq"):
            now.pop(name, None)

    if saved.get("cwd") and "data_path" in before and "data_path" in now:
        before["data_path"] = _absolute(before["data_path"], saved["cwd"])
        now["data_path"] = _absolute(now["data_path"], str(Path.cwd()))

    def agree(name: str) -> bool:
        if name == "tokenizer_model":
            return same_tokenizer(config, before[name], now[name])
        return same(name, before[name], now[name], finetune=finetune)

    def sentence(name: str) -> str:
        if before[name] == now[name]:
            return f"{name} {now[name]!r} has changed since"
        return f"{name} {before[name]!r} -> {now[name]!r}"

    return [sentence(name) for name in now if name in before and not agree(name)]


def _absolute(paths: list[str] | None, start: str) -> list[str] | None:
    """Make the paths of data prefixes absolute; weights between them are kept."""
    prefixes = blend_of("--data-path", paths or [], is_split=True).prefixes
    return paths and [
        os.path.normpath(Path(start, p)) if p in prefixes and not is_stored(p) else p for p in paths
    ]
