"""The tokenizer of a command line, and the number of embedding rows."""

import functools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasink.checkpoints.saved_arguments import read_arguments
from megasink.data.hf_tokenizer import id_count, load_tokenizer, tokenizer_hash
from megasink.data.replaced_tokens import Replacement, problems_of, replacement
from megasink.data.tokenizer_files import read_files
from megasink.errors import ConfigError, UserError
from megasink.megatron.embedding_rows import named_tokens


def problems(args: Namespace) -> Iterator[str]:
    """Yield one message per problem."""
    try:
        tokenizer = tokenizer_of(args)
    except UserError as error:
        yield str(error)
        return
    if tokenizer and not problems_of(args.replace_tokens_at, args.replace_tokens_with):
        try:
            replacement_of(args)
        except UserError as error:
            yield str(error)
    rows = args.padded_vocab_size
    size = tokenizer and id_count(tokenizer)
    if size and rows is not None and size + int(args.sink_token) > rows:
        sink = " and --sink-token needs one more" if args.sink_token else ""
        yield (
            f"the tokenizer {args.tokenizer_model} has {size} tokens{sink}, but the "
            f"embedding has only {rows} rows: raise or drop --padded-vocab-size"
        )
    yield from _row_problems(args)


def _folder(args: Namespace) -> str | None:
    """Return the folder of a transformers tokenizer; None if the command line has none."""
    folder: str | None = args.tokenizer_model
    is_given = args.tokenizer_type == "HuggingFaceTokenizer" and folder
    return folder if is_given and Path(folder or "").is_dir() else None


def tokenizer_of(args: Namespace) -> Any:
    """Return the `FileTokenizer` of a command line, or the transformers one if needed."""
    folder = _folder(args)
    return None if folder is None else _known(folder)


@functools.cache
def _known(folder: str) -> Any:
    files = read_files(folder)
    return files if files is not None and files.is_certain else _loaded(folder)


_loaded = functools.cache(load_tokenizer)


def known_ids(args: Namespace) -> int | None:
    """Return the number of ids in the tokenizer; None if only Megatron knows."""
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size:
        return int(args.vocab_size)
    try:
        tokenizer = tokenizer_of(args)
    except UserError:
        return None  # `problems` reports it
    return None if tokenizer is None else _ids(args.tokenizer_model)


@functools.cache  # every dataset of a rank asks
def _ids(folder: str) -> int:
    return id_count(_known(folder))


def tokenizer_identity(args: Namespace) -> str | None:
    """Return the SHA-256 (hex) of a command line's transformers tokenizer; None without."""
    tokenizer = tokenizer_of(args)
    return None if tokenizer is None else tokenizer_hash(tokenizer)


def replacement_of(args: Namespace) -> Replacement | None:
    """Return the replacement of --replace-tokens-at; None without it."""
    if not args.replace_tokens_at:
        return None
    folder, size = _folder(args), known_ids(args)
    if size is None:
        raise UserError(f"--replace-tokens-at: unsupported --tokenizer-type {args.tokenizer_type}")
    return replacement(
        args.replace_tokens_at,
        args.replace_tokens_with,
        seed=args.seed,
        tokenizer=None if folder is None else _loaded(folder),
        size=size,
    )


def _tokens(args: Namespace) -> int | None:
    """Return the tokens of the tokenizer; None if only its file has them, which Megatron reads."""
    if args.tokenizer_type == "HuggingFaceTokenizer":
        tokenizer = tokenizer_of(args)
        return None if tokenizer is None else id_count(tokenizer)
    size: int | None = args.vocab_size
    return size


def _row_problems(args: Namespace) -> Iterator[str]:
    """Report tokens without rows in `pin_vocabulary`, for a tokenizer that can be loaded."""
    kind, size, rows = args.tokenizer_type, _tokens(args), args.padded_vocab_size
    if size is None:
        if kind != "HuggingFaceTokenizer" and (rows is None or args.sink_token):
            yield f"--tokenizer-type {kind} needs --vocab-size"
        return
    if rows is not None and args.sink_token and rows <= size and kind != "HuggingFaceTokenizer":
        yield (
            f"--padded-vocab-size {rows} leaves no row for --sink-token after the {size} tokens "
            "of the tokenizer: raise or drop --padded-vocab-size"
        )
    yield from _indivisible(args, _rows(args, size))


def _rows(args: Namespace, size: int) -> int:
    """Return the rows of the embedding for this many tokens of the tokenizer."""
    if args.padded_vocab_size is not None:
        return int(args.padded_vocab_size)
    multiple = args.make_vocab_size_divisible_by
    rows = max(size + int(args.sink_token), args.vocab_size or 0)
    return -(-rows // multiple) * multiple


def _indivisible(args: Namespace, rows: int) -> Iterator[str]:
    if args.tensor_model_parallel_size > 0 and rows % args.tensor_model_parallel_size:
        yield (
            f"the {rows} rows of the embedding are not divisible by --tensor-model-parallel-size "
            f"{args.tensor_model_parallel_size}: set --make-vocab-size-divisible-by to a multiple "
            "of this size"
        )


def pin_vocabulary(args: Namespace) -> None:
    """Derive the embedding rows, the token count and the sink token from the tokenizer alone."""
    # Megatron pads to a multiple of 128 * TP, so the softmax would depend on the layout.
    size = _tokens(args)
    if args.tokenizer_type == "HuggingFaceTokenizer":
        # More than the tokenizer's if an imported transformers model has more: all of them count.
        args.vocab_size = max(size or 0, args.vocab_size or 0, _tokens_of_checkpoint(args))
    # One past the tokenizer's last token: no text contains it.
    args.sink_token_id = size if args.sink_token else None
    args.padded_vocab_size = _rows(args, size or 0)
    if indivisible := list(_indivisible(args, args.padded_vocab_size)):  # of a checkpoint's tokens
        raise ConfigError(indivisible)


def _tokens_of_checkpoint(args: Namespace) -> int:
    """Return the token count of the model that training starts from; 0 if unknown."""
    config = Path(args.load).parent / "config.json" if args.load else None
    if config is None or not config.is_file():
        return 0
    return named_tokens(read_arguments(config)) or 0
