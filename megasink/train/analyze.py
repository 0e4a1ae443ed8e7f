"""`megasink analyze` and `megasink sweep` of any model, and `megasink trace` over checkpoints."""

import argparse
import contextlib
import csv
import gc
import json
import logging
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megasink.checkpoint.find import find_checkpoint
from megasink.checkpoint.intact import iterations
from megasink.errors import UserError
from megasink.probe import options
from megasink.probe.analysis import analyze
from megasink.probe.cli import open_transformers
from megasink.probe.ranks import Ranks, parse, taking_part
from megasink.probe.sweep import check_sweep, sweep, sweep_parser
from megasink.process import prepare_process
from megasink.report.trace import ROWS, write_trace


def main(argv: Sequence[str] | None = None) -> int:
    """Measure a model's attention sinks, heads and hidden states on texts, in one pass.

    MODEL is a folder of transformers, or a run of megasink and its checkpoints, trained under any
    layout; nothing is downloaded, and no code of the folder runs. Writes results.json, samples.npz,
    tables/*.csv, figures/*.png and report.html into the output folder. A run that was killed goes
    on where it stopped when the same command runs again, and torchrun shares the samples among the
    processes that it starts.
    """
    with taking_part() as ranks:
        args = parse(options.parser(description=main.__doc__), argv, ranks)
        is_ours = is_run(args.model)
        options.check(args, is_run=is_ours)
        _measure(args, is_ours, ranks, analyze)
    return 0


def sweep_main(argv: Sequence[str] | None = None) -> int:
    """Measure a model on the same texts at several lengths, with BOS, without, and repeated.

    Every combination of --lengths, --bos and --first-token-copies is one row of sweep.csv: sink
    rates, inactive heads by thresholds that stay the same, massive activations, and the loss on the
    same tokens. Beside it sweep.json, sweep.npz and sweep.png; a sweep that was killed goes on.
    """
    with taking_part() as ranks:
        args = parse(sweep_parser(sweep_main.__doc__), argv, ranks)
        is_ours = is_run(args.model)
        check_sweep(args, is_run=is_ours)
        _measure(args, is_ours, ranks, sweep)
    return 0


def _measure(
    args: argparse.Namespace, is_ours: bool, ranks: Ranks, measure: Callable[..., Any]
) -> None:
    """Load what the command line names, of either kind, and measure it."""
    if not is_ours:
        open_transformers(args, ranks, measure)
        return
    find_checkpoint(args.model)  # before the seconds that the imports take
    _prepare(args)
    from megasink.checkpoint.load import single_process

    with single_process():
        _open(args, None, ranks, measure)


def trace_main(argv: Sequence[str] | None = None) -> int:
    """Follow sinks, head imbalance, norms and the circuit's stage over the checkpoints of a run.

    Writes one analysis per checkpoint, and report.html, trace.csv and trace.png over all of them.
    """
    with taking_part() as ranks:
        args = parse(options.parser("megasink trace", trace_main.__doc__), argv, ranks)
        options.check(args, is_run=True)
        newest = find_checkpoint(args.model)
        steps = sorted(iterations(newest.folder.parent))
        _prepare(args)
        from megasink.checkpoint.load import single_process

        root, rows, name = args.output, [], args.name or args.model.resolve().name
        with single_process():
            for step in steps:
                args.output = root / f"iter_{step:07d}"
                args.name = f"step {step}"
                found, tokens = _open(args, step, ranks, analyze)
                if found is not None:
                    rows.append(_row(step, found, tokens))
                gc.collect()
        if ranks.rank == 0:
            _write_trace(root, rows, name)
    return 0


def _write_trace(root: Path, rows: list[dict[str, Any]], name: str) -> None:
    with (root / "trace.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, ROWS)
        writer.writeheader()
        writer.writerows(rows)
    write_trace(rows, root, name)
    print(f"wrote {root}/report.html, trace.csv, trace.png and {len(rows)} analyses")


def is_run(path: Path) -> bool:
    """Whether a folder is a run of megasink, or a checkpoint of one; else one of transformers.

    Raises:
        UserError: a config.json that is not JSON.
    """
    config = path / "config.json"
    if config.is_file():
        try:
            return "arguments" in json.loads(config.read_text())
        except ValueError as error:
            raise UserError(f"{config} is not JSON: {error}") from error
    with contextlib.suppress(UserError):
        find_checkpoint(path)
        return True
    return False


def _prepare(args: argparse.Namespace) -> None:
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    prepare_process(["--cpu"] if args.device == "cpu" else [])


def _open(
    args: argparse.Namespace,
    iteration: int | None,
    ranks: Ranks,
    measure: Callable[..., dict[str, Any] | None],
) -> tuple[dict[str, Any] | None, int]:
    """Measure one checkpoint: what was found, and the tokens that it was trained on."""
    from megasink.checkpoint.load import load_model
    from megasink.probe.megatron_model import MegatronProbe

    ranks.device(args.device)
    loaded = load_model(args.model, iteration, args.tokenizer)
    trained, config = loaded.args, loaded.model.config
    heads = [config.num_attention_heads] * config.num_layers
    found = measure(
        args,
        lambda recorder: MegatronProbe(loaded.model, recorder, recorder.needs),
        module=loaded.model,
        ranks=ranks,
        heads=heads,
        tokenizer=loaded.tokenizer,
        vocabulary=len(loaded.tokenizer),
        positions=trained.max_position_embeddings,
        first=(trained.sink_token_id,) if trained.sink_token else (),
        model={
            "name": args.name or args.model.resolve().name,
            "kind": f"{_attention_name(trained)} attention, step {loaded.iteration}",
            "attention": config.attention_kernel,
            "dtype": str(trained.params_dtype).removeprefix("torch."),
            "parameters": sum(p.numel() for p in loaded.model.parameters()),
        },
    )
    return found, loaded.iteration * trained.global_batch_size * trained.seq_length


def _attention_name(trained: argparse.Namespace) -> str:
    """Whose weights are no softmax is said: their scores are proxies (P2.37)."""
    similarity = getattr(trained, "attention_similarity", "softmax")
    variant: str = trained.attention_variant
    return variant if similarity == "softmax" else f"{similarity} (proxy weights)"


def _row(step: int, found: dict[str, Any], tokens: int) -> dict[str, Any]:
    """One line of trace.csv."""
    ratio = torch.tensor([r for r in found["massive_ratio"][2::2] if r is not None])
    return {
        "step": step,
        "tokens": tokens,
        "sink_rate": found["sink_rate"]["0.3"][0],
        "first_token_attention": found["first_token_attention"],
        "imbalance": found["imbalance"],
        "bits_per_byte": found.get("bits_per_byte"),
        "nats_per_token": found.get("nats_per_token"),
        "massive_ratio": float(ratio.max()),
        "mean_max_activation": found["mean_max_activation"],
        "stage": found["circuit"]["stage"],
        "sink_centre": found["circuit"]["sink_centre_by_attention"],
    }
