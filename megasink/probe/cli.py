"""`megasink analyze`: sinks, heads and circuit of a model, as tables, figures and one page."""

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megasink.errors import ConfigError, UserError
from megasink.probe.inputs import BOS, KINDS, Sample, data_hash, text_samples, token_samples
from megasink.probe.recorder import Captured, Recorder
from megasink.probe.run import Probe, run
from megasink.probe.summary import all_scores, summarise
from megasink.report.analysis import read_analysis, write_tables
from megasink.report.analysis_figures import figures
from megasink.report.analysis_page import in_words, page

DTYPES = {"auto": "auto", "float32": torch.float32, "bfloat16": torch.bfloat16}
SYNTHETIC = 100
"""Sequences of random and of repeated tokens, as in P2."""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model's attention sinks, heads and hidden states on texts, in one pass.

    MODEL is a folder of transformers, or a run of megasink and its checkpoints; nothing is
    downloaded, and no code of the folder runs. Writes results.json, samples.npz, tables/*.csv,
    figures/*.png and report.html into the output folder.
    """
    args = parser().parse_args(argv)
    check(args)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            args.tokenizer or args.model, local_files_only=True
        )
        model = AutoModelForCausalLM.from_pretrained(
            args.model,
            dtype=DTYPES[args.dtype],
            attn_implementation=args.attn_implementation,
            local_files_only=True,
        )
    except (OSError, ValueError) as error:
        raise UserError(f"transformers cannot load {args.model}: {error}") from error
    model = model.eval().to(args.device)
    from megasink.probe.blocks import find_blocks
    from megasink.probe.transformers_model import TransformersProbe, model_problems

    problems = model_problems(model)
    if problems:
        raise ConfigError(problems)
    config = model.config.get_text_config()
    analyze(
        args,
        lambda recorder: TransformersProbe(model, recorder, recorder.needs),
        heads=[config.num_attention_heads if b.attention else 0 for b in find_blocks(model)],
        tokenizer=tokenizer,
        vocabulary=config.vocab_size,
        positions=getattr(config, "max_position_embeddings", None),
        model={
            "name": args.name or args.model.resolve().name,
            "kind": type(model).__name__,
            "attention": model.config._attn_implementation,
            "dtype": str(model.dtype).removeprefix("torch."),
            "parameters": model.num_parameters(),
        },
    )
    return 0


def analyze(
    args: argparse.Namespace,
    open_probe: Callable[[Recorder], AbstractContextManager[Probe]],
    *,
    heads: list[int],
    tokenizer: Any,
    vocabulary: int,
    positions: int | None,
    model: dict[str, Any],
    first: tuple[int, ...] = (),
) -> dict[str, Any]:
    """Run the samples that the command line asks for, and write what was found.

    Args:
        args: of `parser`.
        open_probe: makes the probe that reports to a recorder.
        heads: of each layer.
        vocabulary: ids that the model knows.
        positions: that it was trained with; None for no limit.
        model: what results.json says about it.
        first: tokens before every sequence, such as a sink token (P2.23).

    Returns:
        results.json.

    Raises:
        UserError: sequences longer than the positions, or no text.
    """
    longest = args.seq_length + len(first)
    if positions is not None and longest > positions:
        raise UserError(
            f"--seq-length {args.seq_length} is longer than the {positions - len(first)} positions "
            f"of {args.model}: use at most {positions - len(first)}"
        )
    samples = [
        replace(sample, tokens=(*first, *sample.tokens))
        for sample in _samples(args, tokenizer, vocabulary)
    ]
    recorder = Recorder(heads, positions=args.positions, columns=args.columns)
    with open_probe(recorder) as probe:
        captured = run(
            probe,
            recorder,
            samples,
            batch_size=args.batch_size,
            device=args.device,
            loss=args.loss,
            token_bytes=_token_bytes(tokenizer) if args.loss else None,
        )
    return write_analysis(args.output, captured, samples, model, vars(args))


def write_analysis(
    output: Path,
    captured: Captured,
    samples: Sequence[Sample],
    model: dict[str, Any],
    options: dict[str, Any],
) -> dict[str, Any]:
    """Write everything about one model into a folder, and print its summary.

    Args:
        options: of the command line; "seed" among them.

    Returns:
        results.json.
    """
    output.mkdir(parents=True, exist_ok=True)
    kept = ("data", "inputs", "bos", "seq_length", "max_samples", "seed", "device")
    facts = {key: options[key] for key in kept if key in options}
    found = summarise(captured, model=model, run={**facts, "data_sha256": data_hash(samples)})
    scores = all_scores(captured, int(options["seed"]))
    arrays: dict[str, Any] = {f"score/{name}": values for name, values in scores.items()}
    arrays |= {f"metric/{name}": values for name, values in captured.values.items()}
    arrays["tokens"] = np.asarray([sample["tokens"] for sample in captured.samples])
    arrays["source"] = np.asarray([str(sample["source"]) for sample in captured.samples])
    np.savez_compressed(output / "samples.npz", **arrays)
    (output / "results.json").write_text(json.dumps(found, indent=1))
    write_report([output], output)
    print(in_words(read_analysis(output)))
    for entry in captured.non_finite:
        print(
            f"megasink: warning: {entry.source} has infinite or NaN values in layers "
            f"{entry.layers}, heads {entry.heads}: left out of every average",
            file=sys.stderr,
        )
    print(f"wrote {output}/report.html, results.json, samples.npz, tables/, figures/")
    return found


def write_report(folders: Sequence[Path], output: Path) -> None:
    """The page and figures of one or several analyses; tables only where there is one."""
    analyses = [read_analysis(folder) for folder in folders]
    pictures = figures(analyses)
    (output / "figures").mkdir(parents=True, exist_ok=True)
    for name, png in pictures.items():
        (output / "figures" / f"{name}.png").write_bytes(png)
    (output / "report.html").write_text(page(analyses, pictures))
    if len(analyses) == 1:
        write_tables(analyses[0], output / "tables")


def report_main(argv: Sequence[str] | None = None) -> int:
    """Draw one page about several analyses: figures over each other, distances between models."""
    parser = argparse.ArgumentParser(prog="megasink report", description=report_main.__doc__)
    parser.add_argument("analyses", type=Path, nargs="+", help="output folders of megasink analyze")
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    args = parser.parse_args(argv)
    write_report(args.analyses, args.output)
    print(f"wrote {args.output}/report.html")
    return 0


def parser(
    prog: str = "megasink analyze", description: str | None = main.__doc__
) -> argparse.ArgumentParser:
    """The options of every analysis."""
    parser = argparse.ArgumentParser(prog=prog, description=description, allow_abbrev=False)
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="folder of transformers, or a run"
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="TEXT",
        help="text, .jsonl(.gz, .zst) or .parquet files, or folders; each one is a dataset",
    )
    parser.add_argument("--output", type=Path, required=True, help="folder to write")
    parser.add_argument("--name", help="of the model, in tables and figures; default: its folder's")
    parser.add_argument("--tokenizer", type=Path, help="folder; default: MODEL")
    parser.add_argument("--json-key", default="text", help="key of the text (default: text)")
    parser.add_argument(
        "--inputs",
        nargs="+",
        choices=KINDS,
        default=["natural"],
        help="beside the texts, random tokens or one repeated token (default: natural)",
    )
    parser.add_argument(
        "--max-samples", type=int, default=100, help="sequences of each dataset (default: 100)"
    )
    parser.add_argument(
        "--seq-length", type=int, default=512, help="tokens of a sequence at most (default: 512)"
    )
    parser.add_argument("--batch-size", type=int, default=8, help="sequences at once (default: 8)")
    parser.add_argument(
        "--bos", choices=BOS, default="auto", help="auto leaves it to the tokenizer (default: auto)"
    )
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="default: the model's")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--attn-implementation", choices=("sdpa", "eager"), help="default: the model's own"
    )
    parser.add_argument("--positions", type=int, default=64, help="of the curves (default: 64)")
    parser.add_argument("--columns", type=int, default=8, help="keys with a sink rate (default: 8)")
    parser.add_argument("--seed", type=int, default=1234, help="of random tokens and scores")
    parser.add_argument(
        "--no-loss", dest="loss", action="store_false", help="do not compute logits and loss"
    )
    return parser


def check(args: argparse.Namespace, *, is_run: bool = False) -> None:
    """Everything that shows before a model is loaded, in one message.

    Args:
        is_run: MODEL is a run of megasink, which is known to be there.

    Raises:
        ConfigError: with all of it.
    """
    problems = []
    if is_run and args.attn_implementation is not None:
        problems.append("--attn-implementation is for transformers: a run has its own kernel")
    if is_run and args.dtype != "auto":
        problems.append("--dtype is for transformers: a run is read in the dtype of its training")
    if not is_run and not (args.model / "config.json").is_file():
        problems.append(
            f"{args.model} is no folder of transformers (no config.json): nothing is downloaded"
        )
    if "natural" in args.inputs and not args.data:
        problems.append("no --data: name text files or folders (or --inputs random repeated)")
    if "natural" not in args.inputs and args.data:
        problems.append("--data goes with --inputs natural: add it")
    for flag, least in (
        ("max_samples", 1),
        ("seq_length", 2),
        ("batch_size", 1),
        ("positions", 1),
        ("columns", 1),
    ):
        value = getattr(args, flag)
        if value < least:
            problems.append(f"--{flag.replace('_', '-')} {value}: at least {least}")
    if args.tokenizer is not None and not args.tokenizer.is_dir():
        problems.append(f"--tokenizer {args.tokenizer} is no folder: nothing is downloaded")
    if args.output.exists() and not args.output.is_dir():
        problems.append(f"--output {args.output} is a file: name a folder")
    if problems:
        raise ConfigError(problems)


def _samples(args: argparse.Namespace, tokenizer: Any, vocabulary: int) -> list[Sample]:
    samples: list[Sample] = []
    if "natural" in args.inputs:
        samples += text_samples(
            tokenizer,
            args.data,
            seq_length=args.seq_length,
            max_samples=args.max_samples,
            bos=args.bos,
            json_key=args.json_key,
        )
    for kind in ("random", "repeated"):
        if kind in args.inputs:
            samples += token_samples(
                kind,
                min(args.max_samples, SYNTHETIC),
                args.seq_length,
                min(vocabulary, len(tokenizer)),
                args.seed,
                tokenizer.all_special_ids,
            )
    return samples


def _token_bytes(tokenizer: Any) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """For bits per byte; None, with a line, where the tokens do not add up to bytes."""
    from megasink.data.token_bytes import token_bytes

    try:
        return token_bytes(tokenizer)
    except UserError as error:
        print(f"megasink: {error}; perplexity only", file=sys.stderr)
        return None
