"""The flags of a run's last start that ``--resume`` reuses, and that RUN/config.toml holds.

A run folder may be untrusted, and its starts.jsonl has a command line. Flags that `refused` lists
must be given again; the others are replayed.
"""

import re
from collections.abc import Sequence
from pathlib import Path

from megasink.errors import UserError
from megasink.training.flag_file import Flags, named_values, refused

_SCHEDULE = r"(min-)?lr(-.*)?|.*weight-decay.*"
_ITS_OWNERS = {"override-opt-param-scheduler", "use-checkpoint-opt-param-scheduler"}
_OF_A_START = ("plugin", "run-dir", "resume", "expanded-recipe")


def replayed(last: Sequence[str], given: Sequence[str], run_dir: Path) -> list[str]:
    """Return the flags of the last start, to prepend to those given now.

    If a given rate or decay differs, add the flag with which Megatron uses the schedule of the
    flags, not the checkpoint's.
    """
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
            f"--resume: the last start in {run_dir} had {', '.join(unsafe.values())}, which is "
            "not reused, for safety: pass it again if you trust the run, or pass another value"
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
