"""Count the embedding rows that are tokens; the rest are padding, excluded from every softmax."""

from collections.abc import Mapping
from typing import Any


def counted_rows(arguments: Mapping[str, Any]) -> int:
    """Return the number of leading rows that the softmax covers; all rows if unknown."""
    rows = int(arguments["padded_vocab_size"])
    tokens = named_tokens(arguments)
    return rows if tokens is None else min(rows, tokens)


def named_tokens(arguments: Mapping[str, Any]) -> int | None:
    """Return `text_tokens` with the sink token, which is never a target."""
    tokens, sink = text_tokens(arguments), arguments.get("sink_token_id")
    return tokens if tokens is None or sink is None else max(tokens, sink + 1)


def text_tokens(arguments: Mapping[str, Any]) -> int | None:
    """Return the number of tokens of texts that a run's arguments specify; None if unknown.

    Counts the tokenizer's tokens, or for an imported model all its rows in transformers (which may
    be more). For other tokenizer types only Megatron knows how many tokens they add.
    """
    tokens, kind = arguments.get("vocab_size"), arguments.get("tokenizer_type")
    if not tokens or kind not in ("HuggingFaceTokenizer", "NullTokenizer"):
        return None
    return int(tokens)


def with_tokens(arguments: Mapping[str, Any], tokens: int | None) -> dict[str, Any]:
    """Return a run's arguments with `vocab_size` at least the tokenizer's size, if known."""
    if tokens is None or arguments.get("tokenizer_type") != "HuggingFaceTokenizer":
        return dict(arguments)
    return {**arguments, "vocab_size": max(tokens, arguments.get("vocab_size") or 0)}
