"""What a command line gets wrong about data and tokenizer, found before anything is built."""

import functools
from argparse import Namespace
from pathlib import Path
from typing import Any

from megasink.checkpoint.vocabulary import named_tokens
from megasink.errors import ConfigError, UserError

_DEFAULT_SPLIT = "969,30,1"  # Megatron's (arguments.py:651), set after these checks


def problems(args: Namespace) -> list[str]:
    """Everything wrong with the data of parsed arguments, a sentence each."""
    found = missing(args)
    for prefix in args.data_path or []:
        if not _is_weight(prefix) and not _missing_files(prefix):
            found += _empty_parts(prefix, args.split)
    folder = args.tokenizer_model
    if args.tokenizer_type == "HuggingFaceTokenizer" and folder and Path(folder).is_dir():
        found += _vocabulary(args)
    return found


def missing(args: Namespace) -> list[str]:
    """Data and tokenizers that are not named, or not there."""
    found = []
    given = args.data_path or args.train_data_path or args.data_args_path
    given = given or args.per_split_data_args_path
    if not given and not args.mock_data:
        found.append("no training data: give --data-path PREFIX (made by tools/preprocess_data.py)")
    apart = args.train_data_path or args.valid_data_path or args.test_data_path
    sources = {
        "--mock-data": args.mock_data,
        "--data-path": args.data_path,
        "--train-data-path, --valid-data-path and --test-data-path": apart,
    }
    if sum(map(bool, sources.values())) > 1:
        found.append(f"{' and '.join(flag for flag, so in sources.items() if so)}: choose one")
    prefixes = [("--data-path", prefix) for prefix in args.data_path or []]
    for kind in ("train", "valid", "test"):
        flag = f"{kind}_data_path"
        prefixes += [(f"--{kind}-data-path", prefix) for prefix in getattr(args, flag) or []]
    for flag, prefix in prefixes:
        if not _is_weight(prefix) and (absent := _missing_files(prefix)):
            found.append(f"{flag} {prefix}: {' and '.join(absent)} not found")
    folder = args.tokenizer_model
    if args.tokenizer_type == "HuggingFaceTokenizer":
        if not folder:
            found.append("no tokenizer: give --tokenizer-model FOLDER (a Hugging Face folder)")
        elif not Path(folder).is_dir():
            found.append(f"--tokenizer-model {folder}: no such folder")
    return found


def _missing_files(prefix: str) -> list[str]:
    return [prefix + s for s in (".bin", ".idx") if not Path(prefix + s).is_file()]


def _empty_parts(prefix: str, given: str | None) -> list[str]:
    """Parts of a split that get no document: Megatron counts epochs over them without an end.

    gpt_dataset.py:694 adds the tokens of one epoch, here 0, until there are enough.
    """
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    from megasink.data.index import sequence_lengths

    lengths = sequence_lengths(prefix)
    if lengths is None:
        return []  # `data_files` says what is wrong
    documents = len(lengths)
    split = given or _DEFAULT_SPLIT
    try:
        parts = convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except (AssertionError, ValueError, ZeroDivisionError):
        return [f"--split {split}: give three weights: train, validation, test"]
    empty = [
        name
        for name, part in zip(("training", "validation", "test"), parts, strict=True)
        if part is not None
        and not (lengths[round(part[0] * documents) : round(part[1] * documents)] > 0).any()
    ]
    if not empty:
        return []
    whose = "" if given else " (Megatron's default)"
    return [
        f"--split {split}{whose} gives the {' and the '.join(empty)} part none of the {documents} "
        f"documents of {prefix}: give each part that you want at least one, and 0 to the others, "
        f"such as --split {_split_that_fits(documents)}"
    ]


def _split_that_fits(documents: int) -> str:
    """The smallest share for validation that holds a document; one document is for training."""
    for percent in (1, 5, 10, 20, 30, 50):
        if 0 < round((100 - percent) / 100 * documents) < documents:
            return f"{100 - percent},{percent},0"
    return "1,0,0"


def _vocabulary(args: Namespace) -> list[str]:
    from megasink.data.sidecar import mismatch

    try:
        tokenizer = _tokenizer(args.tokenizer_model)
    except UserError as error:
        return [str(error)]
    size = len(tokenizer)
    found = []
    rows, needed = args.padded_vocab_size, size + int(args.sink_token)
    if rows is not None and needed > rows:
        sink = " and --sink-token needs one more" if args.sink_token else ""
        found.append(
            f"the tokenizer {args.tokenizer_model} has {size} tokens{sink} but the embedding only "
            f"{rows} rows: raise --padded-vocab-size or drop it"
        )
    for prefix in args.data_path or []:
        if not _is_weight(prefix):
            problem = mismatch(prefix, tokenizer)
            if problem:
                found.append(f"--data-path {prefix}: {problem}")
    return found


@functools.cache
def _tokenizer(folder: str) -> Any:
    """Loaded once: its problems and its size are asked for one after the other."""
    from megasink.data.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def _is_weight(text: str) -> bool:
    """--data-path may hold weights between the prefixes."""
    try:
        float(text)
    except ValueError:
        return False
    return not Path(text + ".bin").exists()


def pin_vocabulary(args: Namespace) -> None:
    """Set the rows of the embedding, those that count, and the sink token from the tokenizer alone.

    Megatron pads to a multiple of 128 * TP, so that a checkpoint trained under one layout has
    another softmax under the next (core/tokenizers/utils/build_tokenizer.py:124).

    Raises:
        ConfigError: the rows do not divide by the tensor-parallel size.
    """
    size = args.vocab_size
    if args.tokenizer_type == "HuggingFaceTokenizer":
        size = len(_tokenizer(args.tokenizer_model))
        # More than the tokenizer's where a model of transformers has more: they all count.
        args.vocab_size = max(size, args.vocab_size or 0, _tokens_of_checkpoint(args))
    elif size is not None and args.tokenizer_type == "NullTokenizer":
        size += 1  # its end-of-document token
    if size is None and (args.padded_vocab_size is None or args.sink_token):
        raise ConfigError([f"--tokenizer-type {args.tokenizer_type} needs --vocab-size"])
    # One past the tokenizer's last token: no text holds it.
    args.sink_token_id = size if args.sink_token else None
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by
        rows = max(size + int(args.sink_token), args.vocab_size or 0)
        args.padded_vocab_size = -(-rows // multiple) * multiple
    elif args.sink_token and args.padded_vocab_size <= size:
        raise ConfigError(
            [
                f"--padded-vocab-size {args.padded_vocab_size} has no row for --sink-token beside "
                f"the {size} tokens of the tokenizer: raise it or drop it"
            ]
        )
    if args.padded_vocab_size % args.tensor_model_parallel_size:
        raise ConfigError(
            [
                f"the {args.padded_vocab_size} rows of the embedding are not divisible by "
                f"--tensor-model-parallel-size {args.tensor_model_parallel_size}: set "
                "--make-vocab-size-divisible-by to a multiple of it"
            ]
        )


def _tokens_of_checkpoint(args: Namespace) -> int:
    """Those of the model that training starts from; 0 where they are not known."""
    # Checks of flags do without torch, which this imports.
    from megasink.checkpoint.saved_arguments import read_arguments

    config = Path(args.load).parent / "config.json" if args.load else None
    if config is None or not config.is_file():
        return 0
    return named_tokens(read_arguments(config)) or 0
