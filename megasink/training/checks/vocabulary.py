"""The tokenizer of a command line, and the number of embedding rows."""

import functools
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megasink.data.replaced_tokens import Replacement, problems_of, replacement
from megasink.errors import ConfigError, UserError
from megasink.megatron.vocabulary import named_tokens


def problems(args: Namespace) -> Iterator[str]:
    try:
        tokenizer = transformers_tokenizer(args)
    except UserError as error:
        yield str(error)
        return
    if tokenizer and not problems_of(args.replace_tokens_at, args.replace_tokens_with):
        try:
            replacement_of(args)
        except UserError as error:
            yield str(error)
    rows = args.padded_vocab_size
    if tokenizer and rows is not None and len(tokenizer) + int(args.sink_token) > rows:
        sink = " and --sink-token needs one more" if args.sink_token else ""
        yield (
            f"the tokenizer {args.tokenizer_model} has {len(tokenizer)} tokens{sink}, but the "
            f"embedding only {rows} rows: raise --padded-vocab-size or drop it"
        )


def transformers_tokenizer(args: Namespace) -> Any:
    """Load the transformers tokenizer of a command line; None if it has none.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    folder = args.tokenizer_model
    if args.tokenizer_type != "HuggingFaceTokenizer" or not folder or not Path(folder).is_dir():
        return None
    return _loaded(folder)


@functools.cache
def _loaded(folder: str) -> Any:
    from megasink.data.tokenizer import load_tokenizer

    return load_tokenizer(folder)


def known_ids(args: Namespace) -> int | None:
    """Return the number of ids in the tokenizer; None if only Megatron knows."""
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size:
        return int(args.vocab_size) + 1  # its end-of-document token
    try:
        tokenizer = transformers_tokenizer(args)
    except UserError:
        return None  # `problems` reports it
    return None if tokenizer is None else _ids(args.tokenizer_model)


@functools.cache
def _ids(folder: str) -> int:
    # Not len(tokenizer): some vocabularies have holes. Once: every dataset of a rank asks.
    return int(max(_loaded(folder).get_vocab().values())) + 1


def tokenizer_identity(args: Namespace) -> str | None:
    """Return the SHA-256 (hex) of a command line's tokenizer; None if it has none of transformers.

    Raises:
        UserError: the tokenizer cannot be loaded.
    """
    tokenizer = transformers_tokenizer(args)
    return None if tokenizer is None else _hash(args.tokenizer_model)


@functools.cache
def _hash(folder: str) -> str:
    from megasink.data.tokenizer import tokenizer_hash

    return tokenizer_hash(_loaded(folder))


def replacement_of(args: Namespace) -> Replacement | None:
    """Return what --replace-tokens-at replaces; None without it.

    Raises:
        UserError: the vocabulary does not have the token.
    """
    if not args.replace_tokens_at:
        return None
    tokenizer = transformers_tokenizer(args)
    size = known_ids(args)
    if size is None:
        raise UserError(f"--replace-tokens-at with --tokenizer-type {args.tokenizer_type}")
    return replacement(
        args.replace_tokens_at,
        args.replace_tokens_with,
        seed=args.seed,
        tokenizer=tokenizer,
        size=size,
    )


def pin_vocabulary(args: Namespace) -> None:
    """Derive the embedding rows, the token count and the sink token from the tokenizer alone.

    Megatron pads to a multiple of 128 * TP, which would give a checkpoint a different softmax under
    a different layout (core/tokenizers/utils/build_tokenizer.py:124).

    Raises:
        ConfigError: the rows are not divisible by the tensor-parallel size.
    """
    size = args.vocab_size
    if args.tokenizer_type == "HuggingFaceTokenizer":
        size = len(_loaded(args.tokenizer_model))
        # More than the tokenizer's if an imported transformers model has more: all of them count.
        args.vocab_size = max(size, args.vocab_size or 0, _tokens_of_checkpoint(args))
    elif size is not None and args.tokenizer_type == "NullTokenizer":
        size += 1  # its end-of-document token
    if size is None and (args.padded_vocab_size is None or args.sink_token):
        raise ConfigError(f"--tokenizer-type {args.tokenizer_type} needs --vocab-size")
    # One past the tokenizer's last token: no text contains it.
    args.sink_token_id = size if args.sink_token else None
    if args.padded_vocab_size is None:
        multiple = args.make_vocab_size_divisible_by
        rows = max(size + int(args.sink_token), args.vocab_size or 0)
        args.padded_vocab_size = -(-rows // multiple) * multiple
    elif args.sink_token and args.padded_vocab_size <= size:
        raise ConfigError(
            f"--padded-vocab-size {args.padded_vocab_size} has no row for --sink-token beside "
            f"the {size} tokens of the tokenizer: raise it or drop it"
        )
    if args.padded_vocab_size % args.tensor_model_parallel_size:
        raise ConfigError(
            f"the {args.padded_vocab_size} rows of the embedding are not divisible by "
            f"--tensor-model-parallel-size {args.tensor_model_parallel_size}: set "
            "--make-vocab-size-divisible-by to a multiple of it"
        )


def _tokens_of_checkpoint(args: Namespace) -> int:
    """Return the token count of the model that training starts from; 0 if unknown."""
    # It imports torch, which flag checks avoid.
    from megasink.checkpoints.saved_arguments import read_arguments

    config = Path(args.load).parent / "config.json" if args.load else None
    if config is None or not config.is_file():
        return 0
    return named_tokens(read_arguments(config)) or 0
