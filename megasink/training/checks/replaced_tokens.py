"""Checks of --replace-tokens-at and --replace-tokens-with."""

from argparse import Namespace
from collections.abc import Iterator

from megasink.data.replaced_tokens import problems_of

_TOKENIZERS = ("HuggingFaceTokenizer", "NullTokenizer")


def problems(args: Namespace) -> Iterator[str]:
    positions, flag = args.replace_tokens_at or [], "--replace-tokens-at"
    yield from problems_of(positions, args.replace_tokens_with)
    if not positions:
        return
    length = args.seq_length
    yield from (
        f"{flag} {position}: --seq-length {length} has the positions 0 to {length - 1}"
        for position in positions
        if length and position >= length
    )
    if args.mock_data:
        yield f"{flag} with --mock-data, which is no text: drop it, or train on text"
    if args.tokenizer_type not in _TOKENIZERS:
        yield f"{flag} with --tokenizer-type {args.tokenizer_type}: use a Hugging Face tokenizer"
