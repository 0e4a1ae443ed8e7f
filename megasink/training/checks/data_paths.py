"""Checks for missing datasets and tokenizers."""

import os
import socket
from argparse import Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path

from megasink.data.dataset_files import is_stored, url_problem
from megasink.data.replaced_tokens import problems_of
from megasink.files.system_errors import missing_folder
from megasink.options.dataclass_flags import flag_of
from megasink.options.megatron_flags import having
from megasink.training.dataset_blends import blends, named_prefixes, parts

_SHOWN = 8
_WITH_IDS = ("HuggingFaceTokenizer", "NullTokenizer")


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem. Imports neither torch nor Megatron."""
    yield from _place_problems(args)
    yield from _source_problems(args)
    yield from _replaced_tokens(args)
    yield from missing(args)
    if stored := [prefix for prefix in named_prefixes(args) if is_stored(prefix)]:
        yield from stored_problems(args, stored)
    is_given = args.tokenizer_model or "tokenizer_model" in args.refused_flags
    if args.tokenizer_type == "HuggingFaceTokenizer" and not is_given:
        yield "no tokenizer: give --tokenizer-model FOLDER (a Hugging Face folder)"


def _place_problems(args: Namespace) -> Iterator[str]:
    """Report URLs of object stores where only file systems are read and written."""
    for name in ("run_dir", *having("place")):
        value = getattr(args, name, None)
        if value and is_stored(value):
            yield (
                f"{flag_of(name)} is in an object store: give a folder (copy checkpoints with "
                "aws s3 sync or rclone)"
            )


def stored_problems(args: Namespace, prefixes: Sequence[str]) -> Iterator[str]:
    """Report what keeps Megatron from reading data in object stores; it asserts later."""
    yield from dict.fromkeys(filter(None, map(url_problem, prefixes)))
    first = f"{prefixes[0].partition('://')[0]}:// data"
    if args.object_storage_cache_path is None:
        yield f"{first} needs --object-storage-cache-path FOLDER for its downloaded indices"
    if args.mmap_bin_files:
        yield f"{first} needs --no-mmap-bin-files: objects in a store cannot be memory-mapped"
    if any(prefix.startswith("msc://") for prefix in prefixes) and not args.enable_msc:
        yield "msc:// data needs --enable-msc"


def _source_problems(args: Namespace) -> Iterator[str]:
    per_split = [f"{split}_data_path" for split in ("train", "valid", "test")]
    names = ["mock_data", "data_path", "data_args_path", *per_split, "per_split_data_args_path"]
    given = [name for name in names if getattr(args, name)]
    if not given and args.refused_flags.isdisjoint(names):
        yield "no training data: give --data-path PREFIX (made by megasink data)"
    if len(given) > 1 and not set(given) <= set(per_split):
        yield f"{' and '.join(map(flag_of, given))}: choose one"
    by_part = not {*per_split, "per_split_data_args_path"}.isdisjoint(given)
    if args.split and by_part:
        yield (
            f"--split {args.split} with {flag_of(given[-1])}, which already gives each part its "
            "own data: drop one"
        )
    trains, *_ = parts(args)
    if given and not trains and not args.skip_train:
        what = f"{flag_of(given[-1])} alone" if by_part else f"--split {args.split}"
        yield f"{what} provides no training data: add some, or pass --skip-train"
    if args.data_args_path and not args.split:
        yield "--data-args-path without --split: give three weights, such as --split 99,1,0"
    if args.object_storage_cache_path and not any(map(is_stored, named_prefixes(args))):
        yield "--object-storage-cache-path without s3:// or msc:// data: drop it"


def _replaced_tokens(args: Namespace) -> Iterator[str]:
    positions, flag = args.replace_tokens_at or [], "--replace-tokens-at"
    yield from problems_of(positions, args.replace_tokens_with)
    if not positions:
        return
    length = args.seq_length
    yield from (
        f"{flag} {position}: with --seq-length {length}, use positions from 0 to {length - 1}"
        for position in positions
        if length and position >= length
    )
    if args.mock_data:
        yield f"{flag} needs text, but --mock-data has none: drop one of the two"
    if args.tokenizer_type not in _WITH_IDS:
        yield f"{flag} with --tokenizer-type {args.tokenizer_type}: use a Hugging Face tokenizer"


def missing(args: Namespace) -> Iterator[str]:
    """Report words that are not a blend, datasets with missing files, and a missing tokenizer."""
    rank = os.environ.get("RANK", "0")
    where = "" if rank == "0" else f" on {socket.gethostname()}"
    # One rank of each node: files may be local to a node, and every rank of a large job would ask
    # the file system for every file.
    for blend in blends(args) if os.environ.get("LOCAL_RANK", "0") == "0" else ():
        if blend.problem:
            yield blend.problem
        absent = {p: m for p in blend.prefixes if not is_stored(p) and (m := missing_files(p))}
        for prefix, files in list(absent.items())[:_SHOWN]:
            text = f"{blend.flag} {prefix}: {' and '.join(files)} not found{where}"
            stem = prefix.removesuffix(".bin").removesuffix(".idx")
            if stem != prefix and not missing_files(stem):
                text += f": give {stem}, the prefix of both files"
            elif Path(prefix).is_dir():
                text += f": {prefix} is a folder; give the --output of megasink data"
            yield text
        if len(absent) > _SHOWN:
            yield (
                f"{blend.flag}: {len(absent)} of {len(blend.prefixes)} datasets are "
                f"incomplete{where}; the first {_SHOWN} are above"
            )
    folder = args.tokenizer_model
    if args.tokenizer_type == "HuggingFaceTokenizer" and folder and not Path(folder).is_dir():
        yield f"--tokenizer-model {missing_folder(Path(folder))}"


def missing_files(prefix: str) -> list[str]:
    """Return the missing files of a dataset."""
    files = [prefix + suffix for suffix in (".bin", ".idx")]
    return [path for path in files if not Path(path).is_file()]
