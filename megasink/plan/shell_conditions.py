"""Conditions of a shell script, and the states that it may be in. An open condition is None."""

import contextlib
import fnmatch
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.plan.shell_syntax import word_end
from megasink.plan.shell_words import COMMAND, END, MARK, UNSET, Words

_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Ending(Exception):
    """break, continue, return or exit, with its number."""

    def __init__(self, kind: str, number: int):
        self.kind, self.number = kind, number


class Conditions(Words):
    """Variables of a script, and what it asks about them."""

    def __init__(self, path: Path, given: Mapping[str, str]):
        super().__init__(path, given)
        self.asked: dict[str, None] = {}  # open variables of conditions

    def copied(self) -> dict[str, Any]:
        return {k: dict(v) if type(v) is dict else v for k, v in self.values.items()}

    def put_back(self, name: str, value: Any) -> None:
        """Set a variable as it was; None: not set."""
        self.values.pop(name, None)
        if value is not None:
            self.values[name] = value

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Follow what another process runs, whose variables and ending do not matter here."""
        before, self.values = self.values, self.copied()
        try:
            with contextlib.suppress(Ending):
                yield
        finally:
            self.values = before

    def merge(self, ends: Sequence[dict[str, Any]], doubt: str) -> None:
        """Take the variables on which all of `ends` agree, and leave the others open."""
        merged = {} if ends else self.values
        for name in dict.fromkeys(name for end in ends for name in end):
            found = [end.get(name) for end in ends]
            same = all(value == found[0] for value in found)
            merged[name] = found[0] if same else f"{COMMAND}{doubt or name}{END}"
        self.values = merged

    def test(self, words: Sequence[str]) -> bool | None:
        for names, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
            depth = 0
            for at, word in enumerate(words):
                depth += (word == "(") - (word == ")")
                if word in names and at and not depth:
                    both = self.test(words[:at]), self.test(words[at + 1 :])
                    return decides if decides in both else None if None in both else not decides
        if words[:1] == ["!"]:
            inner = self.test(words[1:])
            return None if inner is None else not inner
        if words[:1] == ["("] and words[-1:] == [")"]:
            return self.test(words[1:-1])
        patterns = words[1:2] in (["="], ["=="], ["!="])
        texts = [self.text(word) for word in words[: 2 if patterns else None]]
        texts += [self.pattern(word) for word in words[2:] if patterns]
        self.asked |= {name: None for text in texts for name in MARK.findall(text)}
        return self._holds(list(map(set_only, texts)))

    def _holds(self, values: list[str]) -> bool | None:
        if open_values := [value for value in values if MARK.search(value)]:
            found = MARK.search(open_values[0])
            self.doubt = found[1] if found else ""
            return None
        match values:
            case []:
                return False
            case [text] | ["-n", text]:
                return bool(text)
            case ["-z", text]:
                return not text
            case ["-v", name]:
                return self.values_of(*name.rstrip("]").split("[")[:2]) is not None
            case [sign, _]:  # of files, which another machine has
                return False if re.fullmatch("-[a-hkprstuwxGLNOS]", sign) else None
            case [_, "=" | "==" | "!=", right] if re.search(r"[@+?!*]\(", right):
                return None
            case [left, "<" | ">" as sign, right]:
                return left < right if sign == "<" else left > right
            case [left, "=" | "==", right]:
                return fnmatch.fnmatchcase(left, right)
            case [left, "!=", right]:
                return not fnmatch.fnmatchcase(left, right)
            case [left, "=~", right]:  # a pattern of a script may never end
                return right in left if re.fullmatch(r"[\w =/-]*", right) else None
            case [left, sign, right] if sign[1:] in _COMPARED:
                number = self.number(f"({left or 0}) {_COMPARED[sign[1:]]} ({right or 0})")
                return None if number is None else bool(number)
        return None


def set_only(text: str) -> str:
    """Return a text without its unset variables, which are empty in a condition."""
    return re.sub(f"{UNSET}[^{END}]*{END}", "", text)


def quoted(word: str) -> str:
    """Return a word of [ ] for `Words.test`, which expands it again."""
    return word if word in ("&&", "||", "!", "(", ")", "-o", "-a") else shlex.quote(word)


def split_test(text: str) -> list[str]:
    """Return the words inside [[ ]]."""
    words, at = list[str](), 0
    while at < len(text):
        single = text[at] in "()" and words[-1:] != ["=~"]
        end = at + 1 if single else word_end(text, at, " \t\n" + ")" * (words[-1:] != ["=~"]))
        words += [text[at:end]] if end > at else []
        at = max(end, at + 1)
    return words
