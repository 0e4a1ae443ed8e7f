"""Checks for datasets and tokenizers that are not given, or do not exist."""

import json
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from megasink.errors import UserError

_LIST_BYTES = 64 << 20
_FLAGS = ("--data-path", "--train-data-path", "--valid-data-path", "--test-data-path")


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. Imports neither torch nor Megatron."""
    given = args.data_path or args.train_data_path or args.data_args_path
    given = given or args.per_split_data_args_path
    if not given and not args.mock_data:
        yield "no training data: give --data-path PREFIX (made by tools/preprocess_data.py)"
    sources = {
        "--mock-data": args.mock_data,
        "--data-path": args.data_path,
        "--train-data-path, --valid-data-path and --test-data-path": (
            args.train_data_path or args.valid_data_path or args.test_data_path
        ),
    }
    if sum(map(bool, sources.values())) > 1:
        yield f"{' and '.join(flag for flag, value in sources.items() if value)}: choose one"
    for flag, prefix in named_prefixes(args):
        if absent := missing_files(prefix):
            yield f"{flag} {prefix}: {' and '.join(absent)} not found"
    folder = args.tokenizer_model
    if args.tokenizer_type == "HuggingFaceTokenizer":
        if not folder:
            yield "no tokenizer: give --tokenizer-model FOLDER (a Hugging Face folder)"
        elif not Path(folder).is_dir():
            yield f"--tokenizer-model {folder}: no such folder"


def named_prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """Yield the flag and prefix of every dataset on the command line."""
    for flag in _FLAGS:
        words = getattr(args, flag.removeprefix("--").replace("-", "_"))
        yield from ((flag, prefix) for prefix in without_weights(words or []))


def without_weights(words: list[str]) -> Iterator[str]:
    """Yield the prefixes of a blend, without the weights between them."""
    for word in words:
        try:
            float(word)
        except ValueError:
            yield word
        else:
            if Path(f"{word}.bin").exists():
                yield word


def listed_prefixes(args: Namespace) -> Iterator[tuple[str, str]]:
    """Yield the flag and prefix of every dataset that is listed in a file.

    Raises:
        UserError: the file cannot be read, or is not a list of datasets.
    """
    if args.data_args_path:
        flag, path = "--data-args-path", args.data_args_path
        yield from ((flag, prefix) for prefix in without_weights(_read(flag, path).split()))
    if args.per_split_data_args_path:
        flag, path = "--per-split-data-args-path", args.per_split_data_args_path
        try:
            parts = json.loads(_read(flag, path))
            blends = [parts[split] for split in ("train", "valid", "test")]
        except (ValueError, KeyError, TypeError, RecursionError):
            raise UserError(
                f"{flag} {path} is not a JSON object with train, valid and test"
            ) from None
        for blend in blends:
            words = blend.split() if isinstance(blend, str) else blend or []
            yield from ((flag, prefix) for prefix in without_weights(list(map(str, words))))


def _read(flag: str, path: str) -> str:
    try:
        if not Path(path).is_file() or Path(path).stat().st_size > _LIST_BYTES:
            raise UserError(f"{flag} {path} is not a list of prefixes")
        return Path(path).read_text()
    except (OSError, ValueError) as error:
        raise UserError(f"{flag} {path} cannot be read: {error}") from error


def missing_files(prefix: str) -> list[str]:
    """Return the missing files of a dataset."""
    return [prefix + s for s in (".bin", ".idx") if not Path(prefix + s).is_file()]
