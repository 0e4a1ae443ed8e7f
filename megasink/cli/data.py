"""`megasink data`: tokenize a corpus, with a given tokenizer or one trained on it."""

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from megasink.checkpoints.run_tokenizer import tokenizer_problem
from megasink.console.printable import say, say_next
from megasink.data import resume
from megasink.data.corpus import MAX_DOCUMENT_BYTES, Corpus, default_workers
from megasink.data.dataset_files import Validation, output_problems, part_of, validation_of
from megasink.data.hf_tokenizer import MIN_VOCAB_SIZE, folder_problem, train_tokenizer
from megasink.data.text_tokenizer import add_parse_special_tokens
from megasink.errors import ConfigError, Signalled
from megasink.options.command_parser import CommandParser

if TYPE_CHECKING:
    from megasink.data.preprocess import PreprocessReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `megasink data` to `parser`."""
    text = "text or .jsonl (also .gz, .zst) or .parquet file, or a folder of them"
    parser.add_argument("inputs", nargs="+", metavar="INPUT", help=text)
    parser.add_argument(
        "--output", type=Path, required=True, metavar="PREFIX", help="write PREFIX.bin, PREFIX.idx"
    )
    tokenizer = parser.add_mutually_exclusive_group(required=True)
    tokenizer.add_argument(
        "--tokenizer", type=Path, metavar="FOLDER", help="use this Hugging Face tokenizer"
    )
    tokenizer.add_argument(
        "--train-tokenizer", type=int, metavar="VOCAB_SIZE", help="first train a tokenizer"
    )
    text = "where to write the trained tokenizer (default: PREFIX-tokenizer)"
    parser.add_argument("--tokenizer-output", type=Path, metavar="FOLDER", help=text)
    text = "give the trained tokenizer a BOS token, added before every text (default: none)"
    parser.add_argument("--tokenizer-bos", action="store_true", help=text)
    add_parse_special_tokens(parser)
    text = "JSON key or parquet column of the text (default: %(default)s)"
    parser.add_argument("--json-key", default="text", metavar="KEY", help=text)
    parser.add_argument(
        "--split-documents",
        choices=("auto", "paragraphs", "never"),
        default="auto",
        help="paragraphs: split every text file into documents of whole paragraphs; auto (the "
        "default): only if there is one input file, since one document leaves none for validation",
    )
    text = (
        "draw this share of the documents at random, such as 0.05, into PREFIX-validation; "
        "train --data-path PREFIX then validates with them, in place of --split"
    )
    parser.add_argument("--validation", type=float, metavar="SHARE", help=text)
    text = "seed for --validation (default: %(default)s)"
    parser.add_argument("--validation-seed", type=int, metavar="N", help=text, default=1234)
    text = "reject longer documents, to bound memory use (default: %(default)s)"
    parser.add_argument(
        "--max-document-bytes", type=int, default=MAX_DOCUMENT_BYTES, metavar="N", help=text
    )
    text = (
        "read only part K of N and write PREFIX-K-of-N; make the parts on different "
        "machines, then join them with megasink data --merge PREFIX"
    )
    parser.add_argument("--partition", type=_partition, metavar="K/N", help=text)
    text = "join the parts made by --partition into PREFIX; only --overwrite can be added"
    parser.add_argument("--merge", metavar="PREFIX", help=text)
    text = "tokenizing processes (default: one per CPU, here %(default)s)"
    parser.add_argument("--workers", type=int, default=default_workers(), metavar="N", help=text)
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")


def _partition(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a part: use the part's number and the number of parts, such as 1/8"
        )
    return int(part), int(parts)


def run(args: argparse.Namespace) -> None:
    """Execute the parsed `args`, and print a summary."""
    if args.partition:
        args.output = part_of(args.output, *args.partition)
    trained_as = None
    if args.train_tokenizer is not None:
        trained_as = (args.train_tokenizer, args.tokenizer_bos)

    # A killed run of the same command has trained it, and may have tokenized part of the data.
    before = resume.load(args.output)
    is_trained = trained_as is not None and before is not None and before.trained == trained_as
    corpus, folder = _checked(args, is_trained=is_trained)
    if args.train_tokenizer is not None and not is_trained:
        trained = train_tokenizer(
            corpus.tracked("reading texts for the tokenizer"),
            args.train_tokenizer,
            folder,
            bos=args.tokenizer_bos,
            overwrite=args.overwrite,
        )
        print(
            f"trained {folder}: {args.train_tokenizer} tokens from {_mb(trained.sample_bytes)} "
            f"of {_mb(trained.corpus_bytes)} in {trained.seconds:.1f} s"
        )
    try:
        from megasink.data.preprocess import preprocess

        start = time.perf_counter()
        report = preprocess(
            corpus,
            args.output,
            folder,
            workers=args.workers,
            overwrite=args.overwrite,
            trained=trained_as,
            parse_special_tokens=args.parse_special_tokens,
            validation=args.validation and Validation(args.validation, args.validation_seed),
        )
    except Signalled as stop:
        if trained_as is not None:
            stop.kept = stop.kept or f"; {folder} is complete: continue with --tokenizer"
        raise
    if corpus.is_split:
        whole = " (--split-documents never keeps it whole)" * (args.split_documents == "auto")
        say(
            f"text is split at blank lines, into {report.documents:,} "
            f"document{'s' * (report.documents != 1)}{whole}"
        )
    say(_summary(report, time.perf_counter() - start))
    if args.partition:
        return
    flags = ("--data-path", args.output, "--tokenizer-model", folder)
    say_next(
        "train a small model on it", "train", "--recipe", "tiny", *flags, "--run-dir", "runs/tiny"
    )


def main(argv: Sequence[str]) -> int:
    """Tokenize text into the .bin/.idx files that Megatron trains on."""
    if any(word.partition("=")[0] == "--merge" for word in argv):
        return _merge(argv)
    parser = CommandParser(prog="megasink data", description=main.__doc__)
    add_arguments(parser)
    args = parser.first_screen(
        "megasink data texts/ --output data/text --train-tokenizer 8000"
    ).parse_args(argv)
    run(args)
    return 0


def _merge(argv: Sequence[str]) -> int:
    """Join the parts PREFIX-1-of-N ... PREFIX-N-of-N of --partition to PREFIX.

    The .bin and .idx have the bytes of a run without --partition. The parts stay.
    """
    parser = CommandParser(prog="megasink data --merge", description=_merge.__doc__)
    parser.add_argument(
        "--merge", type=Path, metavar="PREFIX", help="the --output used with --partition"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace existing files")
    args = parser.first_screen("megasink data --merge data/text").parse_args(argv)
    from megasink.data.merge import merge

    merged = merge(args.merge, overwrite=args.overwrite)
    say(
        f"{merged['documents']:,} documents, {merged['tokens']:,} tokens\n"
        f"wrote {args.merge}.bin {args.merge}.idx; the parts may be removed"
    )
    return 0


def _checked(args: argparse.Namespace, *, is_trained: bool) -> tuple[Corpus, Path]:
    """Return the corpus, and the folder of the tokenizer to use or to train."""
    problems = output_problems(args.output, args.inputs, overwrite=args.overwrite)
    if args.validation is not None:
        other = validation_of(args.output)
        problems += output_problems(other, args.inputs, overwrite=args.overwrite)
        if not 0 < args.validation <= 0.5:
            problems.append(f"--validation {args.validation:g}: use more than 0 and at most 0.5")
    corpus = None
    try:
        corpus = Corpus(
            args.inputs,
            json_key=args.json_key,
            max_document_bytes=args.max_document_bytes,
            partition=args.partition,
            split=args.split_documents,
        )
    except ConfigError as error:
        problems += error.problems
    if args.workers < 1:
        problems.append(f"--workers {args.workers}: use 1 or more")
    if args.train_tokenizer is None:
        folder = args.tokenizer
        if problem := tokenizer_problem(folder):
            problems.append(f"--tokenizer {problem}")
        if args.tokenizer_output:
            problems.append("--tokenizer-output needs --train-tokenizer, not --tokenizer")
        if args.tokenizer_bos:
            problems.append(
                "--tokenizer-bos needs --train-tokenizer: an existing one keeps its own BOS"
            )
    else:
        default = args.output.with_name(args.output.name + "-tokenizer")
        folder = args.tokenizer_output or default
        if args.train_tokenizer < MIN_VOCAB_SIZE:
            problems.append(
                f"--train-tokenizer {args.train_tokenizer} is too small: "
                f"use {MIN_VOCAB_SIZE} or more"
            )
        problem = folder_problem(folder, overwrite=args.overwrite)
        if args.partition:
            problems.append(
                "--train-tokenizer with --partition would train a different tokenizer for every "
                "part: train one first, and pass it with --tokenizer"
            )
        if problem and not is_trained:
            problems.append(problem)
    if problems or corpus is None:
        raise ConfigError(problems)
    return corpus, folder


def _summary(report: "PreprocessReport", seconds: float) -> str:
    skipped = report.skipped
    lines = [
        f"{report.documents:,} documents, {_mb(report.text_bytes)}, {report.tokens:,} tokens "
        f"({report.text_bytes / report.tokens:.2f} bytes per token) in {seconds:.1f} s"
    ]
    if (drawn := report.validation) is not None:
        lines.append(
            f"validation: {drawn.documents:,} more documents, {drawn.tokens:,} tokens "
            f"({drawn.tokens / (drawn.tokens + report.tokens):.1%} of all)"
        )
    if skipped.invalid_utf8:
        lines.append(
            f"skipped, not UTF-8 text: {skipped.invalid_utf8} ({', '.join(skipped.examples)}"
            f"{', ...' if skipped.invalid_utf8 > len(skipped.examples) else ''})"
        )
    if skipped.empty:
        lines.append(f"skipped, empty: {skipped.empty}")
    lines.append("wrote " + " ".join(map(str, report.files)))
    return "\n".join(lines)


def _mb(size: int) -> str:
    return f"{size / 1e6:.2f} MB"
