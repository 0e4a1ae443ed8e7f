"""Words of a shell script after bash's expansions, and its conditions, without running anything.

A value that only a command or the caller knows stays open: a mark with the name of its variable.
"""

import ast
import fnmatch
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megasink.errors import UserError
from megasink.plan.shell_syntax import close, tokens, word_end

# An open value inside a text: of a variable that is not set, or of a command.
UNSET, COMMAND, END = "\ue000", "\ue001", "\ue002"
_BREAK, _EMPTY = "\ue003", "\ue004"  # between words, and a part of one that is quoted and empty
MARK = re.compile(f"[{UNSET}{COMMAND}]([^{END}]*){END}")
_LONGEST, _LARGEST = 1 << 20, 1 << 62
_PARAMETER = re.compile(r"([#!]?)([A-Za-z_]\w*|\d+|[@*#?$])(?:\[([^]]*)\])?(.*)", re.S)
_FOLDER = re.compile(r"cd\s+(?:--\s+)?(.+?)\s*(?:[\d&]*>\S*\s*(?:/dev/null\s*)?)*&&\s*pwd.*", re.S)
_ARITHMETIC: dict[type, Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.Div: lambda a, b: int(a / b), ast.Mod: operator.mod, ast.USub: operator.neg,
    ast.Not: operator.not_, ast.Lt: operator.lt, ast.Gt: operator.gt, ast.LtE: operator.le,
    ast.GtE: operator.ge, ast.Eq: operator.eq, ast.NotEq: operator.ne,
}  # fmt: skip
_COMPARED = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}


class Words:
    """Variables of a script and what words stand for. An array is a dict."""

    def __init__(self, path: Path, given: Mapping[str, str]):
        self.values: dict[str, Any] = {}
        self.path, self.given = path, given
        self.arguments: list[str] = []
        self.asked: dict[str, None] = {}  # open variables of conditions
        self.doubt = ""  # the variable for which the last condition is open

    def assign(self, name: str, sign: str, value: str, index: str | None = None) -> None:
        # A command's value is named after the first variable that it is given to.
        value = value.replace(COMMAND + END, f"{COMMAND}{name}{END}")
        if len(value) > _LONGEST:
            raise UserError(f"{self.path}: {name} is longer than {_LONGEST:,} characters")
        if name in self.given:
            return
        before = self.values.get(name)
        if index is not None:
            array = dict(before) if type(before) is dict else {}
            self.values[name] = array | {index: array.get(index, "") * (sign == "+=") + value}
        else:
            scalar = next(iter(before.values()), "") if type(before) is dict else before or ""
            self.values[name] = scalar + value if sign == "+=" else value

    def text(self, raw: str) -> str:
        """Return a word after its expansions, as one text."""
        return " ".join(self.expand(raw, split=False))

    def several(self, words: Sequence[str]) -> list[str]:
        """Return the words that several words stand for."""
        return [value for word in words for value in self.expand(word)]

    def expand(self, raw: str, *, split: bool = True) -> list[str]:
        """Return the words that a word stands for."""
        pieces = list[str]()

        def add(text: str, quoted: bool) -> None:
            spaces = r"\s+" if split and not quoted else "(?!)"
            pieces.append(re.sub(spaces, _BREAK, text) or _EMPTY * (quoted or not split))

        at, quoted = 0, False
        while at < len(raw):
            one = raw[at]
            if one == '"':
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
                at, values = found
                for number, value in enumerate(values):
                    pieces.append(_BREAK * (number > 0))
                    add(value, quoted)
            else:
                end = at + 1
                while end < len(raw) and raw[end] not in "\"'\\$`":
                    end += 1
                add(raw[at:end], True)
                at = end
        return [word.replace(_EMPTY, "") for word in "".join(pieces).split(_BREAK) if word]

    def _dollar(self, raw: str, at: int) -> tuple[int, list[str]] | None:
        """Return the end and the values of an expansion, None for a bare dollar sign."""
        if raw[at] == "`" or raw.startswith("$(", at):
            inner = at + 1 if raw[at] == "`" else at + 2
            end = close(raw, inner, "`" if raw[at] == "`" else ")")
            text = raw[inner : end - 1]
            if raw.startswith("$((", at):
                number = self.number(text[1:-1])
                open_value = MARK.search(self.doubt)
                unknown = open_value[0] if open_value else COMMAND + END
                return end, [unknown if number is None else str(int(number))]
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
        values = self._values(name, index)
        if sign == "!" and values:
            return self._parameter(values[0])
        if sign == "#":
            return [str(len(values or []) if index in ("@", "*") else len("".join(values or [])))]
        if default := re.fullmatch(r"(:?)([-=+?])(.*)", rest, re.S):
            empty = values is None or (default[1] and not "".join(values))
            if default[2] == "+":
                return [] if empty else self.expand(default[3]) or [""]
            if empty and default[2] != "?":
                value = self.text(default[3])
                if default[2] == "=":
                    self.assign(name, "=", value)
                return [value]
            rest = ""
        if values is None:
            return [f"{UNSET}{name}{END}"]
        return [_edited(value, rest, self.text) for value in values] if rest else values

    def _values(self, name: str, index: str | None) -> list[str] | None:
        if name in self.given:
            return [self.given[name]]
        match name:
            case "@" | "*":
                return list(self.arguments)
            case "#":
                return [str(len(self.arguments))]
            case "?" | "$":
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
        key = self.text(index or "0")
        return [value[key]] if key in value else None

    def _substituted(self, text: str) -> str:
        """Return the output of a command that only handles paths or texts, or an open value."""
        if found := _FOLDER.fullmatch(text.strip()):
            return self.text(found[1].strip('"') if '"$(' not in found[1] else found[1])
        if found := re.fullmatch(r"IFS=['\"]?(.).*?;\s*echo\s+(.*)", text.strip(), re.S):
            return found[1].join(self.expand(found[2]))
        parsed = list(tokens(text))
        words = [word for kind, raw in parsed if kind == "word" for word in self.expand(raw)]
        words = [word for word in words if word != "--"]
        if all(kind == "word" for kind, _ in parsed) and words:
            match words:
                case ["pwd"]:
                    return "."
                case ["echo", *rest]:
                    return " ".join(rest)
                case ["dirname", path]:
                    return str(Path(path).parent)
                case ["basename", path]:
                    return Path(path).name
                case ["realpath", path] | ["readlink", "-f" | "-e", path]:
                    return path
                case ["seq", *ends] if all(re.fullmatch(r"\d{1,5}", end) for end in ends):
                    first, *_, last = (["1"] * (len(ends) == 1)) + ends
                    return " ".join(map(str, range(int(first), int(last) + 1)))
        return COMMAND + END

    def number(self, text: str) -> float | None:
        """Return the value of an arithmetic expression."""
        text = self.text('"' + text.replace('"', "") + '"')
        text = re.sub(
            r"(?<![\w\ue000-\ue002])[A-Za-z_]\w*", lambda m: self._parameter(m[0])[0], text
        )
        if MARK.search(text):
            self.doubt = text
            return None
        for shell, python in (("&&", " and "), ("||", " or "), (r"!(?!=)", " not ")):
            text = re.sub(shell if "!" in shell else re.escape(shell), python, text)
        text = re.sub(r"^(.+)\?(.+):(.+)$", r"(\2) if (\1) else (\3)", text.strip())
        try:
            number = _evaluated(ast.parse(text.strip() or "0", mode="eval").body)
        except (SyntaxError, ValueError, KeyError, ArithmeticError, RecursionError):
            return None
        return number if abs(number) < _LARGEST else None

    def test(self, words: Sequence[str]) -> bool | None:
        for names, decides in ((("||", "-o"), True), (("&&", "-a"), False)):
            for at, word in enumerate(words):
                if word in names:
                    both = self.test(words[:at]), self.test(words[at + 1 :])
                    return decides if decides in both else None if None in both else not decides
        if words[:1] == ["!"]:
            inner = self.test(words[1:])
            return None if inner is None else not inner
        if words[:1] == ["("] and words[-1:] == [")"]:
            return self.test(words[1:-1])
        texts = [self.text(word) for word in words]
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
            case [_, _]:
                return False  # of files, which another machine has
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
    return word if word in ("&&", "||", "!", "(", ")", "-o", "-a") else f"'{word}'"


def split_test(text: str) -> list[str]:
    """Return the words inside [[ ]]."""
    words, at = list[str](), 0
    while at < len(text):
        end = word_end(text, at, " \t\n")
        words += [text[at:end]] if end > at else []
        at = end + 1
    return words


def _edited(value: str, rest: str, text: Callable[[str], str]) -> str:
    """Return a value after one of bash's edits, such as ${NAME##*/}."""
    if MARK.search(value):
        return value
    if found := re.fullmatch(r"(##?|%%?)(.*)", rest, re.S):
        pattern, sizes = text(found[2]), range(len(value) + 1)
        for size in reversed(sizes) if len(found[1]) == 2 else sizes:
            part = value[:size] if found[1][0] == "#" else value[len(value) - size :]
            if fnmatch.fnmatchcase(part, pattern):
                return value[size:] if found[1][0] == "#" else value[: len(value) - size]
        return value
    if found := re.fullmatch(r"/(/?)([^/]+)/?(.*)", rest, re.S):
        return value.replace(text(found[2]), text(found[3]), -1 if found[1] else 1)
    if found := re.fullmatch(r":(\d+)(?::(\d+))?", rest):
        return value[int(found[1]) :][: int(found[2]) if found[2] else None]
    if rest in ("^^", ",,"):
        return value.upper() if rest == "^^" else value.lower()
    return COMMAND + END


def _evaluated(node: ast.expr) -> Any:
    match node:
        case ast.Constant(value=int() as value):
            return value
        case ast.UnaryOp(op=op, operand=inner):
            return _ARITHMETIC[type(op)](_evaluated(inner))
        case ast.BinOp(left=left, op=op, right=right):
            return _ARITHMETIC[type(op)](_evaluated(left), _evaluated(right))
        case ast.Compare(left=left, ops=[op], comparators=[right]):
            return _ARITHMETIC[type(op)](_evaluated(left), _evaluated(right))
        case ast.BoolOp(op=op, values=values):
            return (all if isinstance(op, ast.And) else any)([_evaluated(v) for v in values])
        case ast.IfExp(test=test, body=body, orelse=other):
            return _evaluated(body if _evaluated(test) else other)
    raise ValueError(ast.dump(node))
