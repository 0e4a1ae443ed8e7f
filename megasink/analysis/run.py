"""Run an analysis of a model that is ready for probing, and write its results."""

import argparse
import contextlib
import hashlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.geometry import project, read_rows
from megasink.analysis.capture.identity import identity
from megasink.analysis.capture.inputs import Sample
from megasink.analysis.capture.maps import asked_heads, geometry, telling_heads
from megasink.analysis.capture.measurements import Measurements
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.capture.recorder import Recorder
from megasink.analysis.capture.run import run
from megasink.analysis.capture.samples import model_samples
from megasink.analysis.capture.shards import PartialFolder
from megasink.analysis.folder import read_analysis
from megasink.analysis.metrics import metrics
from megasink.analysis.results import Results
from megasink.analysis.write import write_analysis
from megasink.errors import UserError
from megasink.output_folder import results_in


def analyze(
    args: argparse.Namespace, model: ProbedModel, ranks: Ranks, *, again: bool = True
) -> Results | None:
    """Run the samples that the command line selects, and write the measurements.

    Measurements stay in OUTPUT/partial until everything is written; an analysis of the same model,
    samples and options resumes from there.

    Args:
        ranks: processes that share the samples.
        again: False returns the existing results if OUTPUT already holds this analysis.

    Returns:
        contents of results.json; None on every process except rank 0.

    Raises:
        UserError: sequences exceed the positions, token ids exceed the vocabulary, there is no
            text, `--maps` names a missing head, or the folder cannot be written, is written by
            another process, or holds other results or another unfinished analysis.
    """
    heads, first = model.heads, model.first
    asked = asked_heads(args.maps or [], heads)
    samples = model_samples(args, model)
    recorder = Recorder(heads, positions=args.positions, columns=args.columns)
    ranks.enter(str(args.output))
    facts = identity(args, model.module, samples, model.facts, recorder.metrics)
    # A derived metric changes the results, but no shard.
    drawn = (args.name, args.seed, args.maps, args.map_length, sorted(metrics()))
    digest = hashlib.sha256(repr((facts, drawn)).encode()).hexdigest()
    if not again and (made := _made_before(args.output, digest)) is not None:
        return None if ranks.rank else made
    names = ("--name", "--seed", "--maps", "--map-length", "metrics")
    settings = facts | dict(zip(names, drawn, strict=True))
    overwrite, first_rank = args.overwrite, not ranks.rank
    with results_in(
        args.output, "analyze", settings, overwrite=overwrite, writes=first_rank
    ) as record:
        partial = PartialFolder(args.output / "partial", facts, overwrite=overwrite)
        measurements = _measured(args, model, samples, recorder, partial, ranks)
        if measurements is None:
            return None
        points = project(read_rows(model.open_probe, samples, device=model.device), seed=args.seed)
        maps = None
        if args.maps is not None:
            values = measurements.analysis_values(args.seed).whole
            maps = geometry(
                model.open_probe,
                [samples[sample.index] for sample in measurements.samples],
                heads,
                asked or telling_heads(values["awft"].numpy(), values["importance"].numpy()),
                length=args.map_length + len(first),
                batch_size=args.batch_size,
                device=model.device,
                text_of=lambda token: model.tokenizer.decode([token]),
            )
        options = vars(args) | {"identity": digest, "weights": facts["weights"]}
        record()
        results = write_analysis(
            args.output, measurements, samples, model.facts, options, points, maps
        )
        partial.remove()
    return results


def _measured(
    args: argparse.Namespace,
    model: ProbedModel,
    samples: Sequence[Sample],
    recorder: Recorder,
    partial: PartialFolder,
    ranks: Ranks,
) -> Measurements | None:
    """Run the samples; None on every process except rank 0."""
    with model.open_probe(recorder) as probe:
        return run(
            probe,
            recorder,
            samples,
            batch_size=args.batch_size,
            device=model.device,
            loss=args.loss,
            token_bytes=bytes_by_token(model.tokenizer, ranks) if args.loss else None,
            partial=partial,
            ranks=ranks,
        )


def _made_before(output: Path, digest: str) -> Results | None:
    """Return the results of this very analysis, if everything of it was written."""
    if (output / "partial").exists() or not (output / "results.json").is_file():
        return None
    with contextlib.suppress(UserError):  # another format: measure again
        results = read_analysis(output).results
        return results if results.run.identity == digest else None
    return None


def bytes_by_token(tokenizer: Any, ranks: Ranks) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """Return the bytes of each token; None, with a message, if they do not add up."""
    from megasink.data.token_bytes import token_bytes

    try:
        return token_bytes(tokenizer)
    except UserError as error:
        if not ranks.rank:
            print(f"megasink: {error}; reporting perplexity only", file=sys.stderr)
        return None
