"""Recognize data of `megasink data --chat`, and check it.

Its sidecar says what it is: a flag could only repeat it or be wrong.
"""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megasink.data.object_store import is_stored
from megasink.data.output import LOSS_MASK
from megasink.data.sidecar import read_sidecar
from megasink.flags import flag_of
from megasink.training.checks.blends import named_prefixes
from megasink.training.checks.data import missing_files

# They name caches or counts of text, which chat data does not have.
_OF_TEXT = (
    "per_dataset_sequences_path",
    "dataloader_fast_cache_load",
    "dataloader_defer_npy_index_mmap",
)


def recognize(args: Namespace) -> None:
    """Set ``args.chat_data``, and what training on it means, if a dataset of a run is chat data.

    Its samples are packs of whole conversations (--dataloader-inter-document-masking), of which few
    tokens are targets, and not the same number in every microbatch: only with
    --calculate-per-token-loss does each target count the same.
    """
    # The first stands for all: `problems` refuses a mixture, on the rank that reads every sidecar.
    args.chat_data = any(map(_is_chat, list(named_prefixes(args))[:1]))
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
    if args.rank:  # rank 0 reports them
        return
    prefixes = [p for p in named_prefixes(args) if not is_stored(p)]  # `data_files` looks there
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
    for name in _OF_TEXT:
        if getattr(args, name):
            yield f"{flag_of(name)} with chat data, which has no sample indices: drop it"
    if args.eod_mask_loss:
        yield (
            "--eod-mask-loss with chat data: its loss mask has the end-of-turn tokens to learn; "
            "drop it"
        )


def _is_chat(prefix: str) -> bool:
    return Path(f"{prefix}.json").is_file() and read_sidecar(prefix).get("kind") == "chat"
