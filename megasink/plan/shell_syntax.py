"""Parse a shell script into nested tuples, without regard to what bash would refuse."""

import itertools
import re
from collections.abc import Iterator
from typing import Any

_REDIRECTION = re.compile(r"\d*(?:<<<|<<-?|&>>?|>>|>&|<&|>\||>|<)(?!\()")
_OPERATOR = re.compile(r"&&|\|\||;;&?|;&|[;|&()\n]")
ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(?:\[([^]]*)\])?(\+?=)(.*)", re.S)
_BEFORE_COMMAND = {"for", "if", "then", "else", "elif", "do", "while", "until", "!", "{"}
_RANGE = re.compile(r"(-?\d{1,4})\.\.(-?\d{1,4})(?:\.\.(-?\d{1,4}))?")
Token = tuple[str, Any]
Node = tuple[Any, ...]
Block = list[tuple[str, Node]]


def close(text: str, at: int, end: str) -> int:
    """Return the position after the `end` that closes what was opened before `at`."""
    while at < len(text) and text[at] != end:
        at = skip(text, at, in_quotes=end == '"')
    return at + 1


def skip(text: str, at: int, *, in_quotes: bool = False) -> int:
    """Return the position after a character, or after all that it opens."""
    two, one = text[at : at + 2], text[at]
    if one == "\\":
        return at + 2
    if two in ("$(", "${"):
        return close(text, at + 2, ")" if two == "$(" else "}")
    if one == "`":
        return close(text, at + 1, "`")
    if not in_quotes:
        if one == "'":
            return (text.find("'", at + 1) + 1) or len(text)
        if one == '"':
            return close(text, at + 1, '"')
        if one == "(":
            return close(text, at + 1, ")")
        if one == "#" and text[at - 1 : at].isspace():
            return (text.find("\n", at) + 1 or len(text) + 1) - 1 or len(text)
    return at + 1


def word_end(text: str, at: int, stops: str = " \t\n;&|()<>") -> int:
    while at < len(text) and text[at] not in stops:
        at = skip(text, at)
    return min(at, len(text))


def tokens(text: str) -> Iterator[Token]:
    """Yield ("word", raw), ("op", it), ("array", (name, words)), ("test", text) and so on."""
    at, first, documents = 0, True, list[str]()
    while at < len(text):
        if text[at] in " \t" or text.startswith("\\\n", at):
            at += 1 if text[at] in " \t" else 2
        elif text[at] == "#":
            at = (text.find("\n", at) + 1 or len(text) + 1) - 1
        elif found := _REDIRECTION.match(text, at):
            start = found.end() + len(text[found.end() :]) - len(text[found.end() :].lstrip(" \t"))
            at = word_end(text, start)
            if found[0].endswith("<<<"):
                yield "input", text[start:at]
            if found[0].lstrip("0123456789") in ("<<", "<<-"):
                documents.append(text[start:at].strip("'\"\\"))
        elif first and text.startswith("((", at):
            end = close(text, at + 1, ")")
            yield "(", text[at + 2 : end - 2]
            at, first = end, False
        elif first and re.match(r"\[\[\s", text[at : at + 3]):
            end = text.find("]]", at) + 2
            end = end if end > 1 else len(text)
            yield "test", text[at + 2 : end - 2]
            at, first = end, False
        elif found := _OPERATOR.match(text, at):
            yield "op", found[0]
            at, first = found.end(), True
            while found[0] == "\n" and documents:
                last = re.compile(rf"^\t*{re.escape(documents.pop(0))}$", re.M).search(text, at)
                yield "document", text[at : last.start() if last else len(text)]
                at = last.end() if last else len(text)
        else:
            end = max(word_end(text, at), at + 1)
            raw = text[at:end]
            if re.fullmatch(r"[A-Za-z_]\w*\+?=", raw) and text[end : end + 1] == "(":
                after = close(text, end + 1, ")")
                inside = [t for t in tokens(text[end + 1 : after - 1]) if t[0] == "word"]
                yield "array", (raw, [word for _, word in inside])
                at, first = after, False
            else:
                yield "word", raw
                at, first = end, first and (raw in _BEFORE_COMMAND or bool(ASSIGNMENT.match(raw)))


def braces(raw: str) -> list[str]:
    """Return the words of a word with {a,b} or {1..3}."""
    at = 0
    while at < len(raw):
        if raw[at] != "{":
            at = skip(raw, at)
            continue
        cuts, depth, end = [at], 1, at + 1
        while end < len(raw) and depth:
            depth += (raw[end] == "{") - (raw[end] == "}")
            if not depth or (raw[end] == "," and depth == 1):
                cuts.append(end)
            end = end + 1 if raw[end] in "{}," else skip(raw, end)
        inner = [raw[a + 1 : b] for a, b in itertools.pairwise(cuts)]
        if not depth and (found := _RANGE.fullmatch(inner[0])) and len(inner) == 1:
            first, last, step = int(found[1]), int(found[2]), abs(int(found[3] or 1)) or 1
            width = max(map(len, found.group(1, 2))) * (re.search(r"\b0\d", inner[0]) is not None)
            down = last < first
            values = range(first, last + (-1 if down else 1), -step if down else step)
            inner = [str(value).zfill(width) for value in values]
        if not depth and len(inner) > 1:
            rests = braces(raw[end:])
            return [
                raw[:at] + one + rest for part in inner for one in braces(part) for rest in rests
            ]
        at += 1
    return [raw]


class Parser:
    """Commands of a script."""

    def __init__(self, text: str):
        self._tokens = [*tokens(text), ("end", "")]
        self._at = 0

    def block(self, *stop: str) -> Block:
        """Return commands, each with the operator before it, up to a word of `stop`."""
        found, connector = Block(), ";"
        while self._peek()[0] != "end" and not self._is(*stop):
            kind, text = self._peek()
            if kind != "op" or text == "(":
                found.append((connector, self._command()))
                connector = ";"
                continue
            self._at += 1
            if text != "\n" or connector == ";":
                connector = text if text in ("&&", "||", "|") else ";"
        return found

    def _peek(self) -> Token:
        return self._tokens[self._at]

    def _is(self, *texts: str) -> bool:
        kind, text = self._peek()
        return kind in ("word", "op") and text in texts

    def _take(self) -> Any:
        self._at += self._at < len(self._tokens) - 1
        return self._tokens[self._at - 1][1]

    def _until(self, *stop: str) -> Block:
        block = self.block(*stop)
        self._take()
        return block

    def _command(self) -> Node:
        kind, text = self._peek()
        if kind in ("word", "op") and text in ("if", "for", "while", "until", "case", "{", "("):
            self._take()
            if text in "{(":
                block = self._until("}" if text == "{" else ")")
                return ("group" if text == "{" else "subshell"), block
            if text in ("while", "until"):
                return text, self._until("do"), self._until("done")
            about = {"if": self._if, "for": self._for, "case": self._case}
            return about[text]()
        named = kind == "word" and self._tokens[self._at + 1] == ("op", "(")
        if kind == "word" and (text == "function" or named):
            name = self._tokens[self._at + 1][1] if text == "function" else text
            while self._peek()[1] not in ("{", "") and self._peek()[0] != "end":
                self._take()
            return "function", name, self._command()
        words = list[Token]()
        while self._peek()[0] not in ("op", "end"):
            words.append((self._peek()[0], self._take()))
        if self._peek() == ("op", "\n") and self._tokens[self._at + 1][0] == "document":
            self._take()
            words.append(("document", self._take()))
        return "simple", words

    def _if(self) -> Node:
        condition = self._until("then")
        body = self.block("elif", "else", "fi")
        word = self._take()
        if word == "elif":
            return "if", condition, body, [(";", self._if())]
        return "if", condition, body, self._until("fi") if word == "else" else []

    def _for(self) -> Node:
        if self._peek()[0] == "(":
            text = self._take()
            self._until("do")
            return "for", text.partition("=")[0].strip(), text, self._until("done")
        name, words = self._take(), list[str]()
        if self._peek()[1] == "in":
            self._take()
            while self._peek()[0] not in ("op", "end"):
                words.append(self._take())
        else:
            words = ['"$@"']
        self._until("do")
        return "for", str(name), words, self._until("done")

    def _case(self) -> Node:
        word, arms = self._take(), list[tuple[list[str], Block, str]]()
        self._until("in")
        while self._peek()[0] != "end":
            patterns = list[str]()
            while self._peek()[0] != "end" and self._peek()[1] not in (")", "esac"):
                if self._peek()[0] == "word":
                    patterns.append(self._peek()[1])
                self._take()
            if self._take() == "esac":
                break
            block = self.block(";;", ";&", ";;&", "esac")
            arms.append((patterns, block, self._take()))
            if arms[-1][2] == "esac":
                break
        return "case", word, arms
