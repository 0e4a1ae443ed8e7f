"""Stand-ins of a plan for missing data and tokenizer."""

import sys
from collections.abc import Sequence

from megasink.megatron.arguments import DEFAULTS
from megasink.options.megatron_flags import having
from megasink.training import early, recipes


def with_stand_ins(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Add stand-ins for missing data and tokenizer: memory depends on the vocabulary alone.

    Mock data, and a tokenizer of --vocab-size tokens, or of the recipe's size.
    """
    args = early.read(flags)
    if not hasattr(args, "flag_problems"):  # another Megatron: the ranks report missing flags
        return list(flags)
    added, notes = list[str](), list[str]()
    if not any(getattr(args, name) for name in having("data")):
        added.append("--mock-data")
        notes.append("no data")
    if args.tokenizer_model is None and args.tokenizer_type == DEFAULTS["tokenizer_type"]:
        where, size = "--vocab-size", args.vocab_size
        if size is None:
            where, size = "the recipe's", recipes.vocabulary(argv)
        if size is not None and size > 1:
            # A tokenizer of numbers has one more token, the end of a document.
            added += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(size - 1)]
            notes.append(f"no tokenizer: a vocabulary of {size:,} tokens ({where})")
    if notes:
        print(f"megasink: planned with {', '.join(notes)}", file=sys.stderr)
    return [*flags, *added]
