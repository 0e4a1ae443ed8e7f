"""Run an analysis of a model that is ready for probing, and write its results."""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import replace

from megasink.analysis.analysis_folder import Arrays, analysis_of, read_analysis
from megasink.analysis.analysis_object import Analysis
from megasink.analysis.analysis_summary import summarize
from megasink.analysis.capture.attention_maps import Head, extreme_heads, geometry, named_heads
from megasink.analysis.capture.first_token_geometry import project, read_rows
from megasink.analysis.capture.input_samples import Inputs, inputs_of, shown
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.capture.probed_models import analysis_identity
from megasink.analysis.measure import measure
from megasink.analysis.metrics import metrics
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.pages.analysis_page import write_numbers, write_own_page
from megasink.analysis.ranks import Ranks
from megasink.analysis.result_store import Store, holding, key_of
from megasink.data.token_bytes import TokenBytes, token_bytes
from megasink.errors import UserError


def analyze(
    model: ProbedModel,
    options: AnalysisOptions,
    ranks: Ranks | None = None,
    *,
    inputs: Inputs | None = None,
    of_trace: bool = False,
) -> Analysis | None:
    """Run the samples that the options select, and write the results; None on ranks but 0."""
    output, ranks = options.output, ranks or Ranks()
    named = named_heads(options.maps or (), model.heads)
    inputs = inputs_of(options, model) if inputs is None else inputs
    if output is None:
        made = _measured(model, options, inputs, named, Store(ranks=ranks))
        return made and made[0]
    facts = analysis_identity(model, inputs.samples, options)
    # A derived metric changes the results, but no shard.
    drawn = {
        "--name": model.facts["name"],
        **options.by_flag("seed", "maps", "map_length"),
        "metrics": sorted(metrics()),
    }
    digest = key_of([facts, drawn])
    inputs = Inputs(
        inputs.samples, replace(inputs.facts, identity=digest, weights=facts["weights"])
    )
    # A trace draws nothing, and takes over analyses of the same settings.
    if of_trace and (output / "results.json").is_file() and not (output / "partial").exists():
        with contextlib.suppress(UserError):  # another format: measure again
            before = read_analysis(output)
            if before.results.run.identity == digest:
                return None if ranks.rank else before
    with holding(options, "analyze", facts | drawn, ranks) as record:
        store = Store(output / "partial", facts, ranks, overwrite=options.overwrite)
        made = _measured(model, options, inputs, named, store)
        if made is None:
            return None
        record()
        write_numbers(output, *made)
        if not of_trace:
            write_own_page(output, made[0])
        store.remove()
    return made[0]


def _measured(
    model: ProbedModel,
    options: AnalysisOptions,
    inputs: Inputs,
    named: Sequence[Head],
    store: Store,
) -> tuple[Analysis, Arrays] | None:
    """Run the samples and short extra passes; return the analysis and samples.npz on rank 0."""
    samples = inputs.samples
    token_bytes = bytes_by_token(model, store.ranks) if options.loss else None
    measurements = measure(model, samples, options, token_bytes=token_bytes, store=store)
    if measurements is None:
        return None
    about = shown(sample.dataset for sample in samples)
    read = [sample for sample in samples if sample.dataset in about]
    points, facts = project(
        read_rows(model.open_probe, read, device=model.device), seed=options.seed
    )
    values, maps = measurements.analysis_values(options.seed), {}
    if options.maps is not None:
        awft_LH, importance_LH = (values.overall[n].numpy() for n in ("awft", "importance"))
        maps = geometry(
            model.open_probe,
            [samples[sample.index] for sample in measurements.samples],
            model.heads,
            named or extreme_heads(awft_LH, importance_LH),
            length=options.map_length + len(model.first),
            batch_size=options.batch_size,
            device=model.device,
            text_of=lambda token: model.tokenizer.decode([token]),
        )
    results = summarize(
        measurements,
        values,
        model=model.facts,
        run=inputs.facts,
        inputs=samples,
        geometry=facts,
    )
    arrays = measurements.arrays(options.seed)
    return analysis_of(results, arrays, maps, points), arrays


def bytes_by_token(model: ProbedModel, ranks: Ranks) -> TokenBytes | None:
    """Return the bytes of each token; None, with a message, if they do not add up."""
    try:
        return token_bytes(model.tokenizer, model.first)
    except UserError as error:
        if not ranks.rank:
            print(f"megasink: {error}; reporting only perplexity", file=sys.stderr)
        return None
