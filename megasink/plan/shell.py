"""Follow a shell script without running anything, to the words of the commands that it would run.

Variables, arrays, functions, loops and conditions are evaluated as bash does in an empty
environment.
"""

import contextlib
import fnmatch
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.files.json_file import read_text
from megasink.plan.shell_conditions import Conditions, Ending, quoted, set_only, split_test
from megasink.plan.shell_syntax import ASSIGNMENT, Block, Node, Parser
from megasink.plan.shell_words import COMMAND, END, MARK

_MOST_COMMANDS, _DEEPEST = 20_000, 40
_DECLARE = {"export", "declare", "local", "readonly", "typeset"}
_LOCAL, _ENDINGS = {"declare", "local", "typeset"}, {"break", "continue", "return", "exit"}
_CHECKS = {"usage", "die"}  # end a script with an error, if it does not say what they do
_SUCCEED = frozenset(  # and start no training
    """
    echo printf mkdir cp mv rm ls sed touch tee cat chmod ln cd pushd popd export set shopt ulimit
    sleep wait trap umask hash alias true : module conda date declare local readonly typeset
    """.split()
)


class Shell(Conditions):
    """The state of a script as far as it has been followed."""

    # `commands` has the words of each command, `written` of those that it writes into a file,
    # `missing` the files that are not here.

    def __init__(self, path: Path, given: Mapping[str, str]):
        super().__init__(path, given)
        self.commands: list[list[str]] = []
        self.written: list[list[str]] = []
        self.missing: list[str] = []
        self._functions: dict[str, Node] = {}
        self._locals: list[dict[str, Any]] = []  # what they hide, by call
        # Why a loop (False) or a function (True) may have ended before.
        self._unsure: dict[bool, str] = {}
        self._steps = self._depth = 0
        with contextlib.suppress(Ending):
            self.follow(read_text(path))

    def follow(self, text: str) -> bool | None:
        """Follow a text; return the status of its last command, None if that is open."""
        return self._block(Parser(text).block())

    def _block(self, block: Block) -> bool | None:
        status: bool | None = True
        for at, (connector, node) in enumerate(block):
            if "|" in (connector, *(after for after, _ in block[at + 1 : at + 2])):
                status = None
                with self.apart():
                    status = self._node(node)
            elif connector not in ("&&", "||"):
                status = self._node(node)
            elif status is None:
                self._either([[(";", node)], []])
            elif status is (connector == "&&"):
                # One that ends the script leaves it as if it had not been reached.
                status = None if (ran := self._unless_it_ends([(";", node)])) is None else ran[0]
            self.status = status
        return status

    def _unless_it_ends(self, block: Block) -> tuple[bool | None] | None:
        """Follow a block and return its status; undo one that ends the script and starts nothing.

        That is a check of the caller's machine or arguments.
        """
        before, commands = self.copied(), len(self.commands)
        try:
            return (self._block(block),)
        except Ending as ending:
            started = any(w.endswith(".py") for words in self.commands[commands:] for w in words)
            if started or not self._ends_script(ending):
                raise
        self.values = before
        del self.commands[commands:]
        return None

    def _ends_script(self, ending: Ending) -> bool:
        failed = ending.number > 0 and not self._locals
        return ending.kind in (("exit", "return") if failed else ("exit",))

    def _node(self, node: Node) -> bool | None:
        kind, *parts = node
        self._depth += 1
        self._count()
        try:
            match kind:
                case "simple":
                    return self._simple(*parts)
                case "function":
                    self._functions[parts[0]] = parts[1]
                case "group":
                    return self._block(parts[0])
                case "subshell":
                    with self.apart():
                        return self._block(parts[0])
                    return None
                case "if":
                    return self._if(*parts)
                case "for" | "while" | "until":
                    before = self.copied()
                    if kind == "for":
                        self._for(*parts)
                    else:
                        self._while(*parts, until=kind == "until")
                    self._open_what_changed(before, of_function=False)
                case "case":
                    return self._case(*parts)
        finally:
            self._depth -= 1
        return True

    def _count(self) -> None:
        self._steps += 1
        if self._steps > _MOST_COMMANDS or self._depth > _DEEPEST:
            raise UserError(f"{self.path} does not seem to end: check its loops and functions")

    def _for(self, name: str, words: str | list[str], body: Block) -> None:
        if isinstance(words, list):
            values = self.several(words)
            for value in values:
                self.assign(name, "=", value)
                if self._ends_loop(body):
                    break
            if any(MARK.search(value) or "*" in value for value in values):  # how many is open
                self._unsure[False] = name
            return
        first, condition, step = [*words.split(";"), "", ""][:3]
        self.number(first)
        while known := self.number(condition) if condition.strip() else 1:
            if self._ends_loop(body) or self._unsure:
                break
            if self.number(step) is None:
                self._unsure[False] = name
        if known is None:
            self._either([body, []])

    def _while(self, condition: Block, body: Block, *, until: bool) -> None:
        while (known := self._block(condition)) is (not until):
            if self._ends_loop(body) or self._unsure:
                break
        if known is None:
            self._either([body, []])

    def _ends_loop(self, body: Block) -> bool:
        self._count()
        try:
            self._block(body)
        except Ending as ending:
            if ending.kind not in ("break", "continue"):
                raise
            if ending.number > 1:
                raise Ending(ending.kind, ending.number - 1) from None
            return ending.kind == "break"
        return False

    def _open_what_changed(self, before: dict[str, Any], *, of_function: bool) -> None:
        """Leave open what a loop or a function has changed that may have ended before."""
        if of_function in self._unsure:
            self.merge([before, self.values], self._unsure.pop(of_function))

    def _if(self, condition: Block, body: Block, other: Block) -> bool | None:
        known = self._block(condition)
        if known is None:
            self._either([body, other])
            return None
        first, second = (body, other) if known else (other, body)
        ran = self._unless_it_ends(first) or self._unless_it_ends(second)
        return ran[0] if ran else None

    def _case(self, word: str, arms: Sequence[tuple[list[str], Block, str]]) -> bool | None:
        value = set_only(self.text(word))
        if found := MARK.search(value):
            self.doubt = found[1]
            self._either([body for _, body, _ in arms])
            return None
        falls = False
        status: tuple[bool | None] = (True,)
        for patterns, body, end in arms:
            if falls or any(fnmatch.fnmatchcase(value, self.pattern(p)) for p in patterns):
                status = self._unless_it_ends(body) or (None,)
                falls = end == ";&"
                if end not in (";&", ";;&"):
                    break
        return status[0]

    def _either(self, bodies: Sequence[Block]) -> None:
        """Follow each body; variables that then differ stay open."""
        doubt, before, ends = self.doubt, self.values, list[dict[str, Any]]()
        for body in bodies:
            self.values = before
            self.values = self.copied()
            try:
                self._block(body)
            except Ending as ending:
                if self._ends_script(ending):
                    continue
                self._unsure[ending.kind == "return"] = doubt
            ends.append(self.values)
        self.values = before
        self.merge(ends, doubt)

    def _simple(self, words: list[tuple[str, Any]]) -> bool | None:
        if words[:1] == [("word", "!")]:
            status = self._simple(words[1:])
            return status if status is None else not status
        if words and words[0][0] == "test":
            return self.test(split_test(words[0][1]))
        if words and words[0][0] == "(":
            return None if (number := self.number(words[0][1])) is None else bool(number)
        left, assigned = list(words), list[tuple[str, Any]]()
        declared = left[0][1] if left and left[0][0] == "word" and left[0][1] in _DECLARE else ""
        while left and (declared or left[0][0] == "array" or _assigns(*left[0])):
            assigned.append(left.pop(0))
        given = {kind: raw for kind, raw in left if kind in ("document", "input")}
        found = [value for kind, raw in left if kind == "word" for value in self.expand(raw)]
        before = self.values if found else {}
        self.values = dict(self.values)
        for kind, raw in assigned:
            for option, names in (("-i", self.integers), ("-A", self.tables)):
                if declared and ("word", option) in assigned:
                    names.add((raw if kind == "word" else raw[0]).partition("=")[0])
            self._assign_raw(kind, raw, declared * (("word", "-g") not in assigned))
        if not found:
            return True
        if ".py" in given.get("document", ""):
            started = self.commands
            self.commands = self.written if found[0] in _SUCCEED else started
            with self.apart():
                self.follow(given["document"])
            self.commands = started
        status = self._command(found, self.text(given["input"]) if "input" in given else None)
        for kind, raw in assigned:  # for this command alone
            name = raw[0].rstrip("+=") if kind == "array" else raw.partition("=")[0].rstrip("+")
            self.put_back(name, before.get(name))
        return status

    def _call(self, body: Node, arguments: list[str]) -> bool | None:
        before, values = self.arguments, self.copied()
        self.arguments = arguments
        self._locals.append({})
        try:
            status = self._node(body)
        except Ending as ending:
            if ending.kind != "return":
                raise
            status = not ending.number
        finally:
            self.arguments = before
            for name, value in self._locals.pop().items():
                self.put_back(name, value)
        self._open_what_changed(values, of_function=True)
        return status

    def _command(self, words: list[str], given: str | None) -> bool | None:
        head, *rest = words
        if head in self._functions:
            return self._call(self._functions[head], rest)
        if head in ("[", "test"):
            return self.test([quoted(word) for word in rest if word != "]"])
        if head in _ENDINGS | _CHECKS:
            default = self.status is False if head == "return" else head in ("break", "continue")
            number = int(rest[0]) if rest and rest[0].isdecimal() else int(default)
            raise Ending("exit", 1) if head in _CHECKS else Ending(head, number)
        if head in ("source", ".") and rest:
            self._source(rest[0])
        elif head == "set" and "--" in rest:
            self.arguments = rest[rest.index("--") + 1 :]
        elif head == "shift":
            size = (rest or ["1"])[0]
            self.arguments = self.arguments[int(size) :] if size.isdecimal() else []
        elif head == "false":
            return False
        elif head == "getopts":
            return None if self.arguments else False
        elif head == "let":
            numbers = [self.number(word) for word in rest]
            return None if None in numbers else bool(numbers and numbers[-1])
        elif head == "unset":
            for name, _, index in (word.rstrip("]").partition("[") for word in rest):
                left = dict(self.values.get(name, ())) if index else {}
                left.pop(index, None)
                self.put_back(name, left if index else None)
        elif head in ("read", "mapfile", "readarray"):
            return self.read(rest, given if head == "read" else None)
        elif head == "printf" and rest[:1] == ["-v"] and len(rest) > 2:
            values = iter(rest[3:])
            text = re.sub("%[sd]", lambda _: next(values, ""), rest[2])
            text = f"{COMMAND}{END}" if "%" in text or next(values, "") else text
            self.assign(rest[1], "=", text)
        elif head == "eval":
            return self.follow(" ".join(rest))
        elif head not in _SUCCEED:
            inner = [word for word in rest if ".py" in word and len(word.split()) > 1]
            self.commands += [] if inner else [words]
            for word in inner:
                with self.apart():
                    self.follow(word)
            self.doubt = ""
            return None
        return True

    def _source(self, name: str) -> None:
        if MARK.search(name):
            return self.missing.append(MARK.sub(r"$\1", name))
        path = next(filter(Path.is_file, (Path(name), self.path.parent / name)), None)
        if path is None:
            return self.missing.append(name)
        try:
            self.follow(read_text(path))
        except Ending as ending:
            if ending.kind != "return" or self._ends_script(ending):
                raise

    def _assign_raw(self, kind: str, raw: Any, declared: str = "") -> None:
        name = (raw[0] if kind == "array" else raw).partition("=")[0].rstrip("+")
        if declared in _LOCAL and self._locals and name.isidentifier():
            self._locals[-1].setdefault(name, self.values.get(name))
            if kind == "word" and "=" not in raw:
                self.values.pop(name, None)
        if kind == "array":
            if name in self.given:
                return
            before = self.values.get(name, {}) if raw[0][-2:] == "+=" else {}
            array = dict(before) if type(before) is dict else {"0": before}
            for word in raw[1]:
                if keyed := re.fullmatch(r"\[([^]]*)\]=(.*)", word, re.S):
                    array[self.key(name, keyed[1])] = self.text(keyed[2])
                else:
                    for value in self.expand(word):
                        array[str(len(array))] = value
            self.values[name] = array
        elif found := ASSIGNMENT.fullmatch(raw):
            name, index, sign, value = found.groups()
            self.assign(name, sign, self.text(value), index and self.key(name, index))


def _assigns(kind: str, raw: Any) -> bool:
    return kind == "word" and ASSIGNMENT.fullmatch(raw) is not None
