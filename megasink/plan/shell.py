"""Follow a shell script without running anything, to the words of the commands that it would run.

Variables, arrays, functions, loops and conditions are evaluated as bash does in an empty
environment.
"""

import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.files.json_file import read_text
from megasink.plan.shell_syntax import ASSIGNMENT, Block, Node, Parser
from megasink.plan.shell_words import COMMAND, END, MARK, Words, quoted, set_only, split_test

_MOST_COMMANDS, _DEEPEST = 20_000, 40
_DECLARE = {"export", "declare", "local", "readonly", "typeset"}
_NO_COMMANDS = {"echo", "printf", "mkdir", "cp", "rm", "ls", "grep", "sed", "touch", "tee"}


class Shell(Words):
    """The state of a script as far as it has been followed.

    `commands` has the words of each command, `missing` the files that are not here.
    """

    def __init__(self, path: Path, given: Mapping[str, str]):
        super().__init__(path, given)
        self.commands: list[list[str]] = []
        self.missing: list[str] = []
        self._functions: dict[str, Node] = {}
        self._steps = self._depth = 0
        self.follow(read_text(path))

    def follow(self, text: str) -> bool | None:
        """Follow a text; return the status of its last command, None if that is open."""
        return self._block(Parser(text).block())

    def _block(self, block: Block) -> bool | None:
        status: bool | None = True
        for connector, node in block:
            if connector in ("&&", "||") and status is None:
                self._either([[(";", node)], []])
            elif connector not in ("&&", "||") or status is (connector == "&&"):
                status = self._node(node)
        return status

    def _node(self, node: Node) -> bool | None:
        kind, *parts = node
        self._steps, self._depth = self._steps + 1, self._depth + 1
        if self._steps > _MOST_COMMANDS or self._depth > _DEEPEST:
            raise UserError(f"{self.path} runs without an end: check its loops and functions")
        try:
            match kind:
                case "simple":
                    return self._simple(*parts)
                case "function":
                    self._functions[parts[0]] = parts[1]
                case "group":
                    return self._block(parts[0])
                case "if":
                    self._if(*parts)
                case "for":
                    name, words, body = parts
                    counted = isinstance(words, str)
                    for value in self._counted(name, words) if counted else self.several(words):
                        self.assign(name, "=", value)
                        self._block(body)
                case "while":
                    while (known := self._block(parts[0])) and self._steps < _MOST_COMMANDS:
                        self._block(parts[1])
                    if known is None:
                        self._either([parts[1], []])
                case "case":
                    self._case(*parts)
        finally:
            self._depth -= 1
        return True

    def _counted(self, name: str, text: str) -> list[str]:
        """Return the values of a loop that counts upwards by one."""
        found = re.fullmatch(rf"\s*{name}\s*=([^;]*);\s*{name}\s*<(=?)([^;]*);.*\+\+.*", text, re.S)
        ends = [found and self.number(found[group]) for group in (1, 3)]
        if not found or None in ends:
            return []
        first, last = (int(end or 0) for end in ends)
        return list(map(str, range(first, min(last + bool(found[2]), first + _MOST_COMMANDS))))

    def _if(self, condition: Block, body: Block, other: Block) -> None:
        known = self._block(condition)
        # What would end the run is a check of the caller's machine or arguments.
        if known is False or _ends(body):
            self._block(other)
        elif known or _ends(other):
            self._block(body)
        else:
            self._either([body, other])

    def _case(self, word: str, arms: Sequence[tuple[list[str], Block]]) -> None:
        value = set_only(self.text(word))
        if found := MARK.search(value):
            self.doubt = found[1]
            return self._either([body for _, body in arms])
        for patterns, body in arms:
            if any(fnmatch.fnmatchcase(value, self.text(pattern)) for pattern in patterns):
                self._block(body)
                break
        return None

    def _either(self, bodies: Sequence[Block]) -> None:
        """Follow each body; variables that then differ stay open."""
        doubt, before, ends = self.doubt, self.values, list[dict[str, Any]]()
        for body in bodies:
            self.values = {k: dict(v) if type(v) is dict else v for k, v in before.items()}
            self._block(body)
            ends.append(self.values)
        self.values = {}
        for name in dict.fromkeys(name for end in ends for name in end):
            found = [end.get(name) for end in ends]
            same = all(value == found[0] for value in found)
            self.values[name] = found[0] if same else f"{COMMAND}{doubt or name}{END}"

    def _simple(self, words: list[tuple[str, Any]]) -> bool | None:
        if words[:1] == [("word", "!")]:
            status = self._simple(words[1:])
            return status if status is None else not status
        if words and words[0][0] == "test":
            return self.test(split_test(words[0][1]))
        if words and words[0][0] == "(":
            number = self.number(words[0][1])
            return None if number is None else bool(number)
        left = list(words)
        declares = bool(left) and left[0][0] == "word" and left[0][1] in _DECLARE
        while left and (
            declares
            or left[0][0] == "array"
            or (left[0][0] == "word" and ASSIGNMENT.fullmatch(left[0][1]))
        ):
            self._assign_raw(*left.pop(0))
        if not left:
            return True
        documents = [text for kind, text in left if kind == "document"]
        found = [value for kind, raw in left if kind == "word" for value in self.expand(raw)]
        for text in documents:
            if ".py" in text:
                self.follow(text)
        return self._command(found) if found else True

    def _command(self, words: list[str]) -> bool | None:
        head, *rest = words
        if head in self._functions:
            before, self.arguments = self.arguments, rest
            self._node(self._functions[head])
            self.arguments = before
        elif head in ("[", "test"):
            return self.test([quoted(word) for word in rest if word != "]"])
        elif head in ("source", ".") and rest:
            self._source(rest[0])
        elif head == "set" and "--" in rest:
            self.arguments = rest[rest.index("--") + 1 :]
        elif head == "shift":
            self.arguments = self.arguments[1:]
        elif head == "false":
            return False
        elif head == "read":
            self.doubt = ""
            return None
        elif head == "printf" and rest[:1] == ["-v"] and len(rest) > 2:
            text = rest[2].replace("%s", " ".join(rest[3:]))
            self.assign(rest[1], "=", f"{COMMAND}{END}" if "%" in text else text)
        elif head == "eval":
            self.follow(" ".join(rest))
        elif head not in _NO_COMMANDS:
            inner = [word for word in rest if ".py" in word and len(word.split()) > 1]
            self.commands += [] if inner else [words]
            for word in inner:
                self.follow(word)
        return True

    def _source(self, name: str) -> None:
        if MARK.search(name):
            self.missing.append(MARK.sub(r"$\1", name))
            return
        places = [Path(name), self.path.parent / name]
        path = next((place for place in places if place.is_file()), None)
        if path is None:
            self.missing.append(name)
        else:
            self.follow(read_text(path))

    def _assign_raw(self, kind: str, raw: Any) -> None:
        if kind == "array":
            name, sign = raw[0].rstrip("+="), raw[0][-2:]
            if name in self.given:
                return
            before = self.values.get(name, {}) if sign == "+=" else {}
            array = dict(before) if type(before) is dict else {"0": before}
            for word in raw[1]:
                if keyed := re.fullmatch(r"\[([^]]*)\]=(.*)", word, re.S):
                    array[self.text(keyed[1])] = self.text(keyed[2])
                else:
                    for value in self.expand(word):
                        array[str(len(array))] = value
            self.values[name] = array
        elif kind == "word" and (found := ASSIGNMENT.fullmatch(raw)):
            name, index, sign, value = found.groups()
            self.assign(name, sign, self.text(value), index and self.text(index))


def _ends(block: Block) -> bool:
    """Whether a block ends the script, by itself or by a function named for it."""
    return any(
        node[0] == "simple" and node[1] and node[1][0][1] in ("exit", "return", "usage", "die")
        for _, node in block
    )
