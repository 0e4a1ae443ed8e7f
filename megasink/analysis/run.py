"""Run an analysis of a model that is ready for probing, and write its results."""

import contextlib
import hashlib
import sys
from pathlib import Path
from typing import Any

import numpy as np

from megasink.analysis.capture.base import ProbedModel
from megasink.analysis.capture.geometry import project, read_rows
from megasink.analysis.capture.identity import identity
from megasink.analysis.capture.inputs import data_hash, shown
from megasink.analysis.capture.maps import geometry, named_heads, telling_heads
from megasink.analysis.capture.ranks import Ranks
from megasink.analysis.capture.samples import Inputs, inputs_of
from megasink.analysis.capture.shards import PartialFolder
from megasink.analysis.folder import read_analysis
from megasink.analysis.measure import measure
from megasink.analysis.metrics import metrics
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.results import Results, RunFacts
from megasink.analysis.results_files import holding
from megasink.analysis.write import write_numbers, write_own_page
from megasink.errors import UserError


def analyze(
    model: ProbedModel,
    options: AnalysisOptions,
    ranks: Ranks,
    *,
    inputs: Inputs | None = None,
    of_trace: bool = False,
) -> Results | None:
    """Run the samples that the options select, and write the measurements.

    Measurements stay in OUTPUT/partial until everything is written; an analysis of the same model,
    samples and options resumes from there.

    Args:
        ranks: processes that share the samples.
        inputs: texts in memory; None for those that the options name.
        of_trace: draw nothing, and return the results that OUTPUT already holds of this analysis.

    Returns:
        contents of results.json; None on every process except rank 0.

    Raises:
        UserError: sequences exceed the positions, token ids exceed the vocabulary, there is no
            text, `--maps` names a missing head, or the folder cannot be written, is written by
            another process, or holds other results or another unfinished analysis.
    """
    output = options.output
    assert output is not None
    heads = model.heads
    named = named_heads(options.maps or (), heads)
    inputs = inputs_of(options, model) if inputs is None else inputs
    samples = inputs.samples
    ranks.enter(str(output))
    facts = identity(model, samples, options)
    # A derived metric changes the results, but no shard.
    drawn = {
        "--name": model.facts["name"],
        **options.by_flag("seed", "maps", "map_length"),
        "metrics": sorted(metrics()),
    }
    digest = hashlib.sha256(repr((facts, drawn)).encode()).hexdigest()
    if of_trace and (made := _made_before(output, digest)) is not None:
        return None if ranks.rank else made
    with holding(options, "analyze", facts | drawn, ranks) as record:
        partial = PartialFolder(output / "partial", facts, overwrite=options.overwrite)
        token_bytes = bytes_by_token(model.tokenizer, ranks) if options.loss else None
        measurements = measure(
            model, samples, options, token_bytes=token_bytes, partial=partial, ranks=ranks
        )
        if measurements is None:
            return None
        about = shown(sample.dataset for sample in samples)
        read = [sample for sample in samples if sample.dataset in about]
        points = project(read_rows(model.open_probe, read, device=model.device), seed=options.seed)
        maps = None
        if options.maps is not None:
            values = measurements.analysis_values(options.seed).overall
            maps = geometry(
                model.open_probe,
                [samples[sample.index] for sample in measurements.samples],
                heads,
                named or telling_heads(values["awft"].numpy(), values["importance"].numpy()),
                length=options.map_length + len(model.first),
                batch_size=options.batch_size,
                device=model.device,
                text_of=lambda token: model.tokenizer.decode([token]),
            )
        run = run_facts(model, inputs, options, identity=digest, weights=facts["weights"])
        record()
        results = write_numbers(output, measurements, samples, model.facts, run, points, maps)
        if not of_trace:
            write_own_page(output, results)
        partial.remove()
    return results


def run_facts(
    model: ProbedModel, inputs: Inputs, options: AnalysisOptions, **hashes: Any
) -> RunFacts:
    """Return what results record of the options and the inputs.

    Args:
        hashes: `identity` and `weights`.
    """
    return RunFacts(
        **options.some("data", "inputs", "bos", "max_samples", "seed"),
        device=str(model.device),
        data_sha256=data_hash(inputs.samples),
        **inputs.facts,
        **hashes,
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
