"""Convert texts to token ids; used everywhere. Worker processes import it: nothing heavy.

A tokenizer.json's truncation, padding, dropout and template are not applied.
"""

import argparse
import itertools
import json
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import Any, NamedTuple

from megasink.errors import UserError

# `tokenizers` needs hundreds of bytes per token of one text, and a character may be four tokens:
# longer documents are encoded in parts, each with this many characters of its neighbors.
_PART = 1 << 20
_MARGIN = 1 << 12
_WORD_START = re.compile(r"(?<=\S) (?=\S)")


def add_parse_special_tokens(parser: argparse.ArgumentParser) -> None:
    """Add ``--parse-special-tokens``, which every command with texts has; see `TextTokenizer`."""
    text = (
        "turn special tokens spelled out in a text into those tokens, as in Megatron-LM and "
        "transformers (default: keep them as text)"
    )
    parser.add_argument("--parse-special-tokens", action="store_true", help=text)


class Part(NamedTuple):
    """A part of a document, with the adjoining text `before` and `after` (empty at the ends)."""

    text: str
    before: str = ""
    after: str = ""
    first: bool = True
    last: bool = True
    source: str = "a text"


def parts_of(
    text: str, source: str = "a text", size: int = _PART, margin: int = _MARGIN
) -> Iterator[Part]:
    """Divide a document into parts of `size` characters, with `margin` characters beside them."""
    start = 0
    while len(text) - start > size + margin:
        # A place where most tokenizers divide, though any would do.
        match = _WORD_START.search(text, start + size - size // 16, start + size)
        cut = match.start() if match else start + size
        before, after = text[max(0, start - margin) : start], text[cut : cut + margin]
        yield Part(text[start:cut], before, after, start == 0, False, source)
        start = cut
    yield Part(text[start:], text[max(0, start - margin) : start], "", start == 0, True, source)


def text_tokenizer(tokenizer: Any, *, parse_special_tokens: bool = False) -> "TextTokenizer":
    """Return the `TextTokenizer` of a transformers tokenizer."""
    if not getattr(tokenizer, "is_fast", False):
        return _PythonTokenizer(tokenizer, parse_special_tokens=parse_special_tokens)
    return TextTokenizer(text_json(tokenizer), parse_special_tokens=parse_special_tokens)


def text_json(tokenizer: Any) -> str:
    """Return a fast transformers tokenizer as JSON, without state from its file."""
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    special = set(tokenizer.all_special_tokens)
    for token in state["added_tokens"]:
        token["special"] |= token["content"] in special
    state |= dict.fromkeys(("truncation", "padding", "post_processor"))
    if state["model"].get("dropout"):
        state["model"]["dropout"] = None  # random, of merges: only for training with it
    return json.dumps(state)


class TextTokenizer:
    """Turns texts into ids, without the ids around a text (see `leading_ids`)."""

    # Special tokens in a text stay text, but with `parse_special_tokens`.

    def __init__(self, tokenizer_json: str, *, parse_special_tokens: bool = False):
        from tokenizers import Tokenizer

        self.backend = Tokenizer.from_str(tokenizer_json)
        self.backend.encode_special_tokens = not parse_special_tokens
        # Models that look up whole words find special tokens by themselves.
        self._found: dict[int, str] = {}
        if not parse_special_tokens:
            added = self.backend.get_added_tokens_decoder()
            unknown = self._encode("\U0010fffd").ids
            self._found = {
                i: token.content
                for i, token in added.items()
                if token.special
                and i in self._encode(f"a {token.content}").ids
                and i not in unknown
            }

    def ids(self, text: str, source: str = "a text") -> list[int]:
        """Return the ids of a text of any length."""
        return list(itertools.chain.from_iterable(self.stream(text, source)))

    def stream(self, text: str, source: str) -> Iterator[list[int]]:
        """Yield the ids of a text part by part."""
        return map(self.part_ids, parts_of(text, source))

    def part_ids(self, part: Part) -> list[int]:
        """Return the ids of a part; the ids of all parts are those of the whole text."""
        try:
            encoding, first, stop = self.part_encoding(part, offsets=False)
        except TypeError as error:
            raise UserError(f"{part.source} is not Unicode text: it has lone surrogates") from error
        ids: list[int] = encoding.ids[first:stop]
        if self._found and (wrong := next((i for i in ids if i in self._found), None)) is not None:
            raise UserError(
                f"{part.source} contains {self._found[wrong]}, which this tokenizer always "
                "treats as a special token: remove it, or pass --parse-special-tokens"
            )
        return ids

    def part_encoding(self, part: Part, *, offsets: bool = True) -> tuple[Any, int, int]:
        """Return the encoding of a part with its neighbors, and the range of its own tokens."""
        # Two parts at a cut share the text around it, and are divided where its encoding divides
        # it.
        text = part.before + part.text + part.after
        encoding = self._encode(text, offsets=offsets)
        ids, first, rest, same = encoding.ids, 0, 0, True
        if cut := len(part.before):
            around = self._encode(text[: 2 * cut])
            first, known = (_first_from(around, place) for place in (cut, cut * 3 // 2))
            same = around.ids[:known] == ids[:known]
        if size := len(part.after):
            around = self._encode(text[-2 * size :])
            rest, known = (len(around) - _first_from(around, place) for place in (size, size // 2))
            same = same and around.ids[len(around) - known :] == ids[len(ids) - known :]
        if not same:
            raise UserError(
                f"{part.source} is too long to tokenize at once, and this tokenizer gives "
                "different tokens for a part than for the whole (between "
                f"{part.text[:20]!r} and {part.text[-20:]!r}): split the text"
            )
        return encoding, first, len(ids) - rest

    def _encode(self, text: str, *, offsets: bool = True) -> Any:
        if offsets:
            return self.backend.encode(text, add_special_tokens=False)
        # One text at a time: a worker is one thread.
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0]


class _PythonTokenizer(TextTokenizer):
    """A transformers tokenizer without a fast form, which encodes a text as a whole."""

    def __init__(self, tokenizer: Any, *, parse_special_tokens: bool):
        self._tokenizer, self._split = tokenizer, not parse_special_tokens

    def stream(self, text: str, source: str) -> Iterator[list[int]]:
        options = {"split_special_tokens": self._split}
        yield self._tokenizer.encode(text, add_special_tokens=False, **options)


def _first_from(encoding: Any, character: int) -> int:
    """Return the first token that begins at a character or after it."""
    tokens = range(len(encoding))
    return bisect_left(tokens, character, key=lambda i: encoding.token_to_chars(i)[0])
