"""Words of a shell script after bash's expansions, without running anything.

A value that only a command or the caller knows stays open: a mark with the name of its variable.
"""

import fnmatch
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.plan.shell_arithmetic import evaluated
from megasink.plan.shell_syntax import braces, close, tokens, word_end

# An open value inside a text: of a variable that is not set, or of a command.
UNSET, COMMAND, END = "\ue000", "\ue001", "\ue002"
# Between words, a part of one that is quoted and empty, and a space that is quoted.
_BREAK, _EMPTY, _SPACE = "\ue003", "\ue004", "\ue005"
MARK = re.compile(f"[{UNSET}{COMMAND}]([^{END}]*){END}")
_LONGEST = 1 << 20
_HOME = re.compile(r"~[\w.-]*(?=/|$)")
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$])(?:\[([^]]*)\])?(.*)", re.S)
_FOLDER = re.compile(r"cd\s+(?:--\s+)?(.+?)\s*(?:[\d&]*>\S*\s*(?:/dev/null\s*)?)*&&\s*pwd.*", re.S)
_JOINED = re.compile(r"\$\*|\$\{\*\}|\$\{\w+\[\*\]\}")
_SLICE = re.compile(r":((?![-+=?]).+?)(?::(.+))?", re.S)
_PART_OF_PATTERN = re.compile(r"\[[!^]?\]?[^]]*\]|.", re.S)
_VARIABLE = r"([A-Za-z_]\w*(?:\[[^]]*\])?)"
_ASSIGNMENT = re.compile(
    rf"\s*{_VARIABLE}\s*((?:<<|>>|[-+*/%&|^])?=)(?!=)(.*)"
    rf"|\s*{_VARIABLE}\s*(\+\+|--)\s*|\s*(\+\+|--)\s*{_VARIABLE}\s*"
)
_ASSIGNED = re.compile(
    rf"{_VARIABLE}\s*(?:(?:<<|>>|[-+*/%&|^])?=(?!=)|\+\+|--)|(?:\+\+|--){_VARIABLE}"
)
_NAME = re.compile(rf"(?<![\w#\ue000-\ue002]){_VARIABLE}")


class Words:
    """Variables of a script and what words stand for. An array is a dict."""

    def __init__(self, path: Path, given: Mapping[str, str]):
        self.values: dict[str, Any] = {"OPTIND": "1"}
        self.path, self.given = path, given
        self.arguments: list[str] = []
        self.doubt = ""  # the variable for which the last condition is open
        self.integers: set[str] = set()  # declared so, and arrays with any keys
        self.tables: set[str] = set()
        self.status: bool | None = True  # of the last command; None if it is open

    def assign(self, name: str, sign: str, value: str, index: str | None = None) -> None:
        # A command's value is named after the first variable that it is given to.
        value = value.replace(COMMAND + END, f"{COMMAND}{name}{END}")
        if len(value) > _LONGEST:
            raise UserError(f"{self.path}: the value of {name} exceeds {_LONGEST:,} characters")
        if name in self.given:
            return
        before = self.values.get(name)
        if name in self.integers and not MARK.search(value):
            number = self._evaluated(f"({value})" + f" + {name}" * (sign == "+="))
            value, sign = f"{COMMAND}{name}{END}" if number is None else str(number), "="
        if index is not None or type(before) is dict:
            index = index or "0"
            array = dict(before) if type(before) is dict else {}
            self.values[name] = array | {index: array.get(index, "") * (sign == "+=") + value}
        else:
            self.values[name] = (before or "") + value if sign == "+=" else value

    def read(self, names: list[str], text: str | None) -> bool | None:
        """Assign the words of a text to variables; without one they stay open."""
        self.doubt, array = "", "-a" in names or "-ra" in names
        names = [name for name in names if name.isidentifier()]
        if text is None or not names:
            for name in names:
                self.assign(name, "=", f"{COMMAND}{END}")
            return None
        between = f"[{re.escape(self._separators())}]+" if self._separators() else "(?!)"
        words = re.split(between, text.strip(), maxsplit=0 if array else len(names) - 1)
        if array:
            self.values[names[0]] = dict(zip(map(str, range(len(words))), words, strict=True))
            return True
        for name, word in itertools.zip_longest(names, words, fillvalue=""):
            self.assign(name, "=", word)
        return True

    def text(self, raw: str) -> str:
        """Return a word after its expansions, as one text."""
        return self._spaced(raw).replace(_SPACE, " ")

    def _spaced(self, raw: str) -> str:
        """Return a word as one text, whose quoted spaces are marked."""
        return " ".join(self.expand(raw, split=False))

    def several(self, words: Sequence[str]) -> list[str]:
        """Return the words that several words stand for."""
        return [value for word in words for value in self.expand(word)]

    def pattern(self, raw: str) -> str:
        """Return a word as a pattern, in which quoted characters stand for themselves."""
        return " ".join(self.expand(raw, split=False, pattern=True)).replace(_SPACE, " ")

    def expand(self, raw: str, *, split: bool = True, pattern: bool = False) -> list[str]:
        """Return the words that a word stands for."""
        if split and "{" in raw and len(words := braces(raw)) > 1:
            return [value for word in words for value in self.expand(word)]
        pieces = list[str]()
        between = re.escape(self._separators()) if split else ""

        def add(text: str, quoted: bool, *, active: bool = False) -> None:
            if pattern and quoted and not active:
                text = re.sub(r"[*?[]", r"[\g<0>]", text)
            if not split and quoted and not active:
                text = re.sub(r"\s", _SPACE, text)
            if between and not quoted:
                text = re.sub(f"[{between}]+", _BREAK, text)
            pieces.append(text or _EMPTY * (quoted or not split))

        at, quoted = 0, False
        if tilde := _HOME.match(raw):  # Path.expanduser raises for an unknown user
            home = self.values_of("HOME") if tilde[0] == "~" else None
            add("".join(home or [os.path.expanduser(tilde[0])]), True)  # noqa: PTH111
            at = tilde.end()
        while at < len(raw):
            one = raw[at]
            if raw.startswith("$'", at) and not quoted:
                end = close(raw, at + 2, "'")
                add(_escaped(raw[at + 2 : end - 1]), True)
                at = end
            elif one == '"' or (raw.startswith('$"', at) and not quoted):
                at += one == "$"
                quoted = not quoted
                if quoted and raw[at : at + 2] == '""':
                    add("", True)
                at += 1
            elif one == "'" and not quoted:
                end = (raw.find("'", at + 1) + 1) or len(raw) + 1
                add(raw[at + 1 : end - 1], True)
                at = end
            elif one == "\\":
                after = raw[at + 1 : at + 2]
                kept = quoted and after not in '$`"\\\n'
                add(one * kept + after.strip("\n"), True)
                at += 2
            elif one in "$`" and (found := self._dollar(raw, at)):
                start, (at, values) = at, found
                if (quoted or not split) and _JOINED.fullmatch(raw, start, at):
                    values = [self._separators()[:1].join(values)]
                for number, value in enumerate(values):
                    pieces.append(_BREAK * (number > 0))
                    add(value, quoted)
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\"'\\$`":
                    end += 1
                add(raw[at:end], True, active=not quoted)
                at = end
        words = [word.replace(_EMPTY, "") for word in "".join(pieces).split(_BREAK) if word]
        return [word.replace(_SPACE, " ") for word in words] if split else words

    def _separators(self) -> str:
        found = self.values.get("IFS", " \t\n")
        return found if type(found) is str else " "

    def _dollar(self, raw: str, at: int) -> tuple[int, list[str]] | None:
        """Return the end and the values of an expansion, None for a bare dollar sign."""
        if raw[at] == "`" or raw.startswith("$(", at):
            inner = at + 1 if raw[at] == "`" else at + 2
            end = close(raw, inner, "`" if raw[at] == "`" else ")")
            text = raw[inner : end - 1]
            if raw.startswith("$((", at):
                number = self.number(text[1:-1])
                unknown = f"{COMMAND}{self.doubt}{END}"
                return end, [unknown if number is None else str(number)]
            return end, [self._substituted(text)]
        if raw.startswith("${", at):
            end = close(raw, at + 2, "}")
            return end, self._parameter(raw[at + 2 : end - 1])
        if found := re.compile(r"\$([A-Za-z_]\w*|\d|[@*#?$])").match(raw, at):
            return found.end(), self._parameter(found[1])
        return None

    def _parameter(self, body: str) -> list[str]:
        if (found := _PARAMETER.fullmatch(body)) is None:
            return [COMMAND + END]
        sign, name, index, rest = found.groups()
        if sign == "!" and index in ("@", "*"):
            return list(value) if type(value := self.values.get(name)) is dict else []
        values = self.values_of(name, index)
        if sign == "!" and values:
            return self._parameter(values[0] + rest)
        if sign == "#":
            return [str(len(values or []) if index in ("@", "*") else len("".join(values or [])))]
        if default := re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.S):
            empty = values is None or (default[1] and not "".join(values))
            if default[2] == "+" or (empty and default[2] != "?"):
                value = "" if default[2] == "+" and empty else self._spaced(default[3])
                if default[2] == "=":
                    self.assign(name, "=", value.replace(_SPACE, " "))
                return [value]
            rest = ""
        if values is None:
            return [f"{UNSET}{name}{END}"]
        if (index or name) in ("@", "*") and (found := _SLICE.fullmatch(rest)):
            whole = values if index else [str(self.path), *values]
            part = self._slice(found, len(whole))
            return [COMMAND + END] if part is None else whole[part]
        return [self._edited(value, rest) for value in values] if rest else values

    def values_of(self, name: str, index: str | None = None) -> list[str] | None:
        if name in self.given:
            return [self.given[name]]
        match name:
            case "@" | "*":
                return list(self.arguments)
            case "#":
                return [str(len(self.arguments))]
            case "?":
                return [COMMAND + END if self.status is None else str(int(not self.status))]
            case "$":
                return ["0"]
            case "0" | "BASH_SOURCE":
                return [str(self.path)]
        if name.isdecimal():
            number = int(name) - 1
            return self.arguments[number : number + 1] or None
        value = self.values.get(name)
        if type(value) is not dict:
            return None if value is None else [value]
        if index in ("@", "*"):
            return list(value.values())
        key = self.key(name, index or "0")
        if key[0:1] == "-" and key not in value:
            key = ([*value][int(key) :] or [""])[0]
        return [value[key]] if key in value else None

    def _substituted(self, text: str) -> str:
        """Return the output of a command that only handles paths or texts, or an open value."""
        if found := _FOLDER.fullmatch(text.strip()):
            return self.text(found[1].strip('"') if '"$(' not in found[1] else found[1])
        if found := re.fullmatch(r"(?:local )?IFS=(.+?);\s*(echo\s.*)", text.strip(), re.S):
            before = self.values
            self.values = before | {"IFS": self.text(found[1])}
            output, self.values = self._substituted(found[2]), before
            return output
        parsed = list(tokens(text))
        words = [word for kind, raw in parsed if kind == "word" for word in self.expand(raw)]
        words = [word for word in words if word != "--"]
        if all(kind == "word" for kind, _ in parsed) and words:
            match words:
                case ["pwd"]:
                    return "."
                case ["echo", *rest] if not any(re.fullmatch("-[neE]+", w) for w in rest[1:]):
                    return " ".join(rest[rest[:1] == ["-n"] :])
                case ["dirname", path]:
                    return str(Path(path).parent)
                case ["basename", path]:
                    return Path(path).name
                case ["realpath", path] | ["readlink", "-f" | "-e", path]:
                    return path
                case ["seq", *ends] if ends and all(re.fullmatch(r"\d{1,5}", end) for end in ends):
                    first, *step, last = map(int, (["1"] * (len(ends) == 1)) + ends)
                    return " ".join(map(str, range(first, last + 1, *filter(None, step))))
        return COMMAND + END

    def number(self, text: str) -> int | None:
        """Return the value of an arithmetic expression, and make its assignments."""
        *earlier, text = self.text('"' + text.replace('"', "") + '"').split(",")
        for part in earlier:
            self.number(part)
        if found := _ASSIGNMENT.fullmatch(text):
            name = found[1] or found[4] or found[7]
            sign = (found[2] or found[5] or found[6])[:-1]
            value = self.number(found[3]) if found[1] else 1
            before = self._evaluated(name) if sign else None
            if sign and value is not None:
                value = None if before is None else evaluated(f"({before}) {sign} ({value})")
            self._write(name, value)
            return before if found[4] else value
        for assigned in _ASSIGNED.findall(text):  # within an expression
            self._write("".join(assigned), None)
        return self._evaluated(text)

    def _evaluated(self, text: str) -> int | None:
        for _ in range(3):  # a variable may name another one
            text = _NAME.sub(lambda found: f"({self._parameter(found[0])[0] or 0})", text)
        found = MARK.search(text)
        self.doubt = found[1] if found else ""
        return None if found else evaluated(text)

    def key(self, name: str, raw: str) -> str:
        """Return the key of an element of an array."""
        text = self.text(raw)
        number = None if name in self.tables else self.number(text)
        return text if number is None else str(number)

    def _write(self, name: str, value: int | None) -> None:
        name, _, index = name.rstrip("]").partition("[")
        text = f"{COMMAND}{self.doubt or name}{END}" if value is None else str(value)
        self.assign(name, "=", text, (index and self.key(name, index)) or None)

    def _slice(self, found: re.Match[str], size: int) -> slice | None:
        """Return the part that :START or :START:LENGTH names."""
        start, length = self.number(found[1]), self.number(found[2] or "0")
        if start is None or length is None:
            return None
        start = max(start + size * (start < 0), 0)
        return slice(start, None if found[2] is None else length + start * (length >= 0))

    def _edited(self, value: str, rest: str) -> str:
        """Return a value after one of bash's edits, such as ${NAME##*/}."""
        if MARK.search(value) or "[[:" in rest:
            return value if MARK.search(value) else COMMAND + END
        if found := re.fullmatch(r"(##?|%%?)(.*)", rest, re.S):
            pattern, sizes = self.pattern(found[2]), range(len(value) + 1)
            for size in reversed(sizes) if len(found[1]) == 2 else sizes:
                part = value[:size] if found[1][0] == "#" else value[len(value) - size :]
                if fnmatch.fnmatchcase(part, pattern):
                    return value[size:] if found[1][0] == "#" else value[: len(value) - size]
            return value
        if found := re.fullmatch(r"/([/#%]?)(.+)", rest, re.S):
            end = word_end(found[2], 0, "/")
            pattern = _PART_OF_PATTERN.sub(_regular, self.pattern(found[2][:end]))
            pattern = {"#": r"\A" + pattern, "%": pattern + r"\Z"}.get(found[1], pattern)
            put = self.text(found[2][end + 1 :])
            return re.sub(pattern, lambda _: put, value, count=found[1] != "/", flags=re.S)
        if found := _SLICE.fullmatch(rest):
            places = self._slice(found, len(value))
            return COMMAND + END if places is None else value[places]
        if rest in ("^^", ",,", "^", ","):
            size = len(value) if len(rest) == 2 else 1
            one = value[:size]
            return (one.upper() if rest[0] == "^" else one.lower()) + value[size:]
        return COMMAND + END


def _regular(found: re.Match[str]) -> str:
    """Return a part of a pattern as a regular expression."""
    one = found[0]
    if len(one) > 1:
        return f"[^{one[2:]}" if one[1] in "!^" else one
    return {"*": ".*", "?": "."}.get(one) or re.escape(one)


def _escaped(text: str) -> str:
    """Return a text between $' and ', without its escapes."""
    named = {"n": "\n", "t": "\t", "r": "\r", "a": "\a", "b": "\b", "e": "\x1b"}
    return re.sub(r"\\(.)", lambda found: named.get(found[1], found[1]), text, flags=re.S)
