"""The flags of launch scripts that others have written, and what has to change for them to train.

In scripts.txt a script is its name and the place where it is published, then its flags as they
stand there, with the values of its shell variables (of its README, where the script has none;
{data} and {tokenizer} stand for files). Under it:

    ! a phrase of the message
    - flags to drop, besides those that are unknown
    + flags to add, or to give another value
    = ranks that it starts, and those that the first message asks for

Each flag of - and + is named by the first message.
"""

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Script:
    """A launch script.

    Attributes:
        url: where it is published.
        ranks, mended_ranks: that it starts, and that it starts then.
        flags: as they stand there.
        phrases: of the first message.
        dropped, added: what that message asks for.
    """

    url: str
    ranks: int = 8
    mended_ranks: int = 8
    flags: list[str] = field(default_factory=list)
    phrases: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


_GITHUB = "https://github.com/"


def _scripts(text: str) -> dict[str, Script]:
    found: dict[str, Script] = {}
    for line in re.sub(r"\n {6,}", " ", text.strip()).splitlines():
        kind, _, rest = line.strip().partition(" ")
        if not line.startswith(" "):
            script = found[kind] = Script(_GITHUB + rest.replace(" ", ""))
        elif kind == "!":
            script.phrases.append(rest)
        elif kind == "=":
            script.ranks, *more = map(int, rest.split())
            script.mended_ranks = more[0] if more else script.ranks
        elif kind in "-+":
            (script.dropped if kind == "-" else script.added).extend(shlex.split(rest))
        else:
            script.flags += shlex.split(line)
    return found


SCRIPTS = _scripts(Path(__file__).with_name("scripts.txt").read_text())
