"""The flags of a run's last start that ``--resume`` reuses, and that RUN/config.toml holds.

A run folder may be untrusted, and its starts.jsonl has a command line. Flags that `refused` lists
must be given again; the others are replayed.
"""

import os
import re
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megasink.checkpoints.model_arguments import plain, same
from megasink.checkpoints.run_tokenizer import same_tokenizer
from megasink.data.dataset_files import is_stored
from megasink.errors import UserError
from megasink.megatron.hybrid_pattern import pattern_of
from megasink.training.dataset_blends import blend_of
from megasink.training.flag_file import Flags, named_values, refused

_SCHEDULE = r"(min-)?lr(-.*)?|.*weight-decay.*"
_ITS_OWNERS = {"override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler"}
_OF_A_START = ("plugin", "run-dir", "resume", "expanded-recipe")


def replayed(last: Sequence[str], given: Sequence[str], run_dir: Path) -> list[str]:
    """Return the flags of the last start, to prepend to those given now."""
    # For another rate or decay, add the flag that prefers it to the schedule of the checkpoint.
    names = {name for name, _ in named_values(given)}
    before = dict(named_values(last))
    changes = before and any(
        re.fullmatch(_SCHEDULE, name) and before.get(name) != values
        for name, values in named_values(given)
    )
    override = ["--override-opt-param-scheduler"] if changes and not names & _ITS_OWNERS else []
    names |= _ITS_OWNERS if override else set()
    kept = [
        word
        for name, values in named_values(last)
        if name not in names
        for word in (f"--{name}", *values)
    ]
    if unsafe := refused(kept, run_dir):
        raise UserError(
            f"--resume: {', '.join(unsafe.values())} of the last start in {run_dir} is not "
            "reused, for safety: pass it again if you trust the run, or pass another value"
        )
    return [*kept, *override]


def flags_of_words(words: Sequence[str]) -> Flags:
    """Return the flags of a training command line that a configuration file may hold."""
    flags: Flags = {}
    for name, values in named_values(words):
        if name and name not in _OF_A_START:
            numbers = [_number(value) for value in values]
            flags[name] = numbers if len(numbers) > 1 else numbers[0] if numbers else True
    return flags


def _number(word: str) -> int | float | str:
    """Return a number if its text in TOML is the same word, else the word."""
    if not re.fullmatch(r"-?(\d+|\d+\.\d+)([eE][-+]?\d+)?", word):
        return word
    number = int(word) if re.fullmatch(r"-?\d+", word) else float(word)
    return number if str(number) == word else word


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
            return f"the contents of {name} {now[name]!r} have changed"
        return f"{name} {before[name]!r} -> {now[name]!r}"

    return [sentence(name) for name in now if name in before and not agree(name)]


def _absolute(paths: list[str] | None, start: str) -> list[str] | None:
    """Make the paths of data prefixes absolute; weights between them are kept."""
    prefixes = blend_of("--data-path", paths or [], is_split=True).prefixes
    return paths and [
        os.path.normpath(Path(start, p)) if p in prefixes and not is_stored(p) else p for p in paths
    ]
