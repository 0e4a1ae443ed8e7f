"""What is wrong inside the data sets of a command line, found before anything is built."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megasink.data.index import data_problem
from megasink.errors import UserError
from megasink.train.checks import data

_LIST_BYTES = 64 << 20
_LISTS = ("--data-args-path", "--per-split-data-args-path")


def problems(args: Namespace) -> list[str]:
    """A sentence for each. Sizes, and at most 50 MB of each data set, are read."""
    if args.mock_data:
        return []
    found = []
    if args.data_args_path and not args.split:
        found.append("--data-args-path without --split: give three weights, such as 99,1,0")
    known = vocabulary(args)
    try:
        for flag, prefix in dict.fromkeys(_prefixes(args)):
            missing = [s for s in (".bin", ".idx") if not Path(f"{prefix}{s}").exists()]
            # `data` says so of prefixes on the command line
            if missing and flag in _LISTS:
                names = " and ".join(f"{prefix}{s}" for s in missing)
                found.append(f"{flag} names {prefix}: {names} not found")
            elif not missing and (problem := data_problem(prefix, known)):
                found.append(f"{flag} {prefix}: {problem}")
    except UserError as error:
        found.append(str(error))
    return found


def vocabulary(args: Namespace) -> int | None:
    """How many ids the tokenizer has; None where only Megatron knows."""
    if args.tokenizer_type == "HuggingFaceTokenizer":
        folder = args.tokenizer_model
        if not folder or not Path(folder).is_dir():
            return None
        try:
            # not len(tokenizer): some vocabularies have holes
            return max(data._tokenizer(folder).get_vocab().values()) + 1
        except UserError:
            return None  # said elsewhere
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size:
        return int(args.vocab_size) + 1  # its end-of-document token
    return None


def _prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """Flag and prefix of every data set that is named."""
    lists = {
        f"--{kind}data-path": getattr(args, f"{kind.replace('-', '_')}data_path")
        for kind in ("", "train-", "valid-", "test-")
    }
    if args.data_args_path:
        lists["--data-args-path"] = _read("--data-args-path", args.data_args_path).split()
    if args.per_split_data_args_path:
        flag, path = "--per-split-data-args-path", args.per_split_data_args_path
        try:
            parts = json.loads(_read(flag, path))
            found = [parts[split] for split in ("train", "valid", "test")]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(f"{flag} {path} is no JSON object of train, valid and test") from None
        split = [part.split() if isinstance(part, str) else part or [] for part in found]
        lists[flag] = [prefix for part in split for prefix in part]
    for flag, prefixes in lists.items():
        for prefix in prefixes or []:
            if not data._is_weight(prefix):
                yield flag, prefix


def _read(flag: str, path: str) -> str:
    try:
        if not Path(path).is_file() or Path(path).stat().st_size > _LIST_BYTES:
            raise UserError(f"{flag} {path} is no file of prefixes")
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be read: {error}") from error
