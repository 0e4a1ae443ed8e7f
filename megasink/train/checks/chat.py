"""Recognize data of `megasink data --chat`, and check it.

Its sidecar says what it is: a flag could only repeat it or be wrong.
"""

import contextlib
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megasink.data.output import LOSS_MASK
from megasink.data.sidecar import read_sidecar
from megasink.errors import UserError
from megasink.train.checks.data import listed_prefixes, missing_files, named_prefixes


def recognize(args: Namespace) -> None:
    """Set ``args.chat_data``, and what training on it means, if a dataset of a run is chat data.

    Its samples are packs of whole conversations (--dataloader-inter-document-masking), of which few
    tokens are targets, and not the same number in every microbatch: only with
    --calculate-per-token-loss does each target count the same.
    """
    args.chat_data = any(_is_chat(prefix) for _, prefix in _prefixes(args))
    if args.chat_data:
        args.dataloader_inter_document_masking = args.calculate_per_token_loss = True


def description() -> str:
    """Return a line about what `recognize` has set."""
    return (
        "chat data: packs of whole conversations that do not see each other, loss on responses "
        "alone, every target counts the same (--dataloader-inter-document-masking "
        "--calculate-per-token-loss)"
    )


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. Reads sidecars. Imports neither torch nor Megatron."""
    prefixes = list(dict.fromkeys(prefix for _, prefix in _prefixes(args)))
    chats = [prefix for prefix in prefixes if _is_chat(prefix)]
    texts = [prefix for prefix in prefixes if prefix not in chats]
    for prefix in texts:
        if not missing_files(prefix + LOSS_MASK):
            yield (
                f"{prefix}{LOSS_MASK}.idx is a mask of chat data, but {prefix}.json does not say "
                "that this is chat data: restore it, or make the data again"
            )
    if not chats:
        return
    if texts:
        yield (
            f"{chats[0]} is chat data and {texts[0]} is not: their samples differ; train on one "
            "kind at a time, or convert the text to conversations"
        )
    for prefix in chats:
        made_for = read_sidecar(prefix).get("seq_length")
        if args.seq_length and made_for != args.seq_length:
            yield (
                f"--seq-length {args.seq_length}: {prefix} was made for {made_for} tokens; give "
                f"--seq-length {made_for}, or make the data again"
            )
        if absent := missing_files(prefix + LOSS_MASK):
            yield f"{prefix}: {' and '.join(absent)} not found: make the data again"
    if args.eod_mask_loss:
        yield (
            "--eod-mask-loss with chat data: its loss mask has the end-of-turn tokens to learn; "
            "drop it"
        )


def _prefixes(args: Namespace) -> list[tuple[str, str]]:
    found = list(named_prefixes(args))
    with contextlib.suppress(UserError):  # `data_files` reports it
        found += listed_prefixes(args)
    return found


def _is_chat(prefix: str) -> bool:
    return Path(f"{prefix}.json").is_file() and read_sidecar(prefix).get("kind") == "chat"
