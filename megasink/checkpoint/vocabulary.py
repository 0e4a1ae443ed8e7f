"""How many rows of a run's embedding are tokens: the others pad it, and no softmax counts them."""

from collections.abc import Mapping
from typing import Any


def counted_rows(arguments: Mapping[str, Any]) -> int:
    """Rows that take part in a softmax, the first of the vocabulary; all where it is not known.

    Args:
        arguments: of a run, as `pin_vocabulary` or `with_tokens` left them.
    """
    rows = int(arguments["padded_vocab_size"])
    tokens = named_tokens(arguments)
    return rows if tokens is None else min(rows, tokens)


def named_tokens(arguments: Mapping[str, Any]) -> int | None:
    """The tokens that the arguments of a run name; None where they name none.

    Those of the tokenizer; of an imported model all rows that it has in transformers, which may be
    more; and the sink token, which is no target of any text but was always among them. Of other
    kinds of tokenizers only Megatron knows how many tokens they add.
    """
    tokens, kind = arguments.get("vocab_size"), arguments.get("tokenizer_type")
    if not tokens or kind not in ("HuggingFaceTokenizer", "NullTokenizer"):
        return None
    if kind == "NullTokenizer":
        tokens += 1  # its end-of-document token
    sink = arguments.get("sink_token_id")
    return int(tokens) if sink is None else max(int(tokens), sink + 1)


def with_tokens(arguments: Mapping[str, Any], tokens: int | None) -> dict[str, Any]:
    """The arguments of a run with at least the tokens of its tokenizer in `vocab_size`.

    Args:
        tokens: of a tokenizer of transformers; None where it is not known.
    """
    if tokens is None or arguments.get("tokenizer_type") != "HuggingFaceTokenizer":
        return dict(arguments)
    return {**arguments, "vocab_size": max(tokens, arguments.get("vocab_size") or 0)}
