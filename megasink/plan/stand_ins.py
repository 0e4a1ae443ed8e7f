"""Stand-ins of a plan for missing data and tokenizer."""

import sys
from collections.abc import Sequence

from megasink.megatron.arguments import DEFAULTS
from megasink.options.flags import flag_of
from megasink.options.megatron_flags import having
from megasink.training import recipes
from megasink.training.flag_file import named_values


def with_stand_ins(argv: Sequence[str], flags: Sequence[str]) -> list[str]:
    """Add stand-ins for missing data and tokenizer: memory depends on the vocabulary alone.

    Mock data, and a tokenizer of --vocab-size tokens, or of the recipe's size.
    """
    given = {f"--{name}": values for name, values in named_values(flags)}
    added, notes = list[str](), list[str]()
    if given.keys().isdisjoint(map(flag_of, having("data"))):
        added.append("--mock-data")
        notes.append("no data")
    kind = DEFAULTS["tokenizer_type"]
    if "--tokenizer-model" not in given and given.get("--tokenizer-type", [kind]) == [kind]:
        where, size = "--vocab-size", "".join(given.get("--vocab-size", []))
        if "--vocab-size" not in given:
            where, size = "the recipe's", str(recipes.vocabulary(argv) or "")
        if size.isdecimal() and int(size) > 1:
            # A tokenizer of numbers has one token more, the end of a document.
            added += ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(int(size) - 1)]
            notes.append(f"no tokenizer: a vocabulary of {int(size):,} tokens ({where})")
    if notes:
        print(f"megasink: planned with {', '.join(notes)}", file=sys.stderr)
    return [*flags, *added]
