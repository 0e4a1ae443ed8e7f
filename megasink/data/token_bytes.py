"""Bytes of text per token, which convert a loss per token to bits per byte."""

import json
import re
from collections.abc import Collection
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megasink.data.hf_tokenizer import leading_ids
from megasink.data.text_tokenizer import TextTokenizer, text_tokenizer
from megasink.errors import UserError

_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Any text would do; these have features that tokenizers treat differently: spaces, newlines, tabs,
# digits, contractions, several scripts, characters that few vocabularies hold, and those that NFKC
# and sentencepiece replace or drop.
_PROBES = (
    "a",
    "two words, it's 2048.",
    "x  def f(x):\n\t\treturn  x\r\n\n\n",
    "na\u00efve \u0441\u043b\u043e\u0432\u043e \u6f22\u5b57 \u0e44\u0e17\u0e22 \U0001f642",
    "x\u00b2 \ufb01 \uff21\u3000\u2026 \u200b\ufeff\x01 x",
    "  x",
)


class TokenBytes(NamedTuple):
    """The bytes of text of each token, which convert a loss per token to bits per byte."""

    # [V] int32, V the largest id + 1. Special tokens, and ids without a token, have 0.
    lengths: NDArray[np.int32]
    # 1 if the tokenizer puts a space before a text (as Llama 2 does), else 0. `lengths` counts that
    # space, which is not part of the text. Some tokenizers add it only if the text does not begin
    # with a space; their ids are those of the text without its own.
    prefix: int
    starts: frozenset[int]  # ids before the first token of a text, those of documents included

    def before_texts(self, inputs_T: NDArray[np.int64], bytes_T: NDArray[np.int32]) -> int:
        """Return the bytes of targets that the tokenizer put before texts."""
        return self.prefix * int((np.isin(inputs_T, [*self.starts]) & (bytes_T > 0)).sum())


def token_bytes(tokenizer: Any, first: Collection[int] = ()) -> TokenBytes:
    """Return the bytes of text that each token of a tokenizer stands for."""
    # Lengths sum to the UTF-8 size of a text (after NFC, if it composes) plus `prefix`. Bits per
    # byte are nats of non-special targets / (ln 2 * bytes without those `before_texts`).
    lengths, text = _lengths(tokenizer), text_tokenizer(tokenizer)
    prefix = _extra_bytes(text, lengths, _PROBES[0])
    for probe in _PROBES:
        extra = _extra_bytes(text, lengths, probe)
        if prefix not in (0, 1) or extra not in {prefix, 0 if probe[0] == " " else prefix}:
            raise UserError(
                f"bits per byte: {tokenizer.name_or_path or 'this tokenizer'} drops or rewrites "
                f"text, so its tokens do not add up to the bytes of {probe!r}"
            )
    starts = {tokenizer.eos_token_id, *leading_ids(tokenizer), *first} - {None}
    return TokenBytes(lengths, prefix, frozenset(starts))


def _lengths(tokenizer: Any) -> NDArray[np.int32]:
    backend = tokenizer.backend_tokenizer
    vocab: dict[str, int] = backend.get_vocab(with_added_tokens=True)
    lengths = np.zeros(max(vocab.values()) + 1, dtype=np.int32)
    added = backend.get_added_tokens_decoder()
    spell = _speller(backend)
    for token, i in vocab.items():
        if i not in added:
            lengths[i] = spell(token)
        elif not added[i].special:
            lengths[i] = len(token.encode())  # added tokens match literally
    return lengths


def _speller(backend: Any) -> Any:
    """Return the function that maps a token to its bytes, by the tokenizer's kind of decoder."""
    decoder = json.loads(backend.to_str())["decoder"] or {"type": "no"}
    steps = {step["type"]: step for step in decoder.get("decoders", [decoder])}
    if set(steps) == {"ByteLevel"}:
        return len  # each character of a token stands for one byte
    if "ByteFallback" in steps and set(steps) <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        space = steps.get("Replace", {}).get("pattern", {}).get("String", " ")
        return lambda t: 1 if _BYTE_TOKEN.fullmatch(t) else len(t.replace(space, " ").encode())
    raise UserError(
        f"bits per byte: cannot count the bytes of tokens with {'+'.join(steps)} decoder: use a "
        "byte-level tokenizer, or a sentencepiece tokenizer with byte fallback"
    )


def _extra_bytes(tokenizer: TextTokenizer, lengths: NDArray[np.int32], text: str) -> int:
    return int(lengths[tokenizer.ids(text)].sum()) - len(text.encode())
