"""`megasink sweep`: one model on the same texts at several lengths, BOS settings and first tokens.

Rows of the papers: P2.3, P3.24, P4.3, P4.4.

Shapes: R rows of the sweep, N samples, L layers, H heads.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

import megasink
from megasink.analysis.analysis_summary import LAYER_SHARE, metric_results, scores_of
from megasink.analysis.capture.input_samples import (
    Reader,
    Sample,
    data_hash,
    dataset_names,
    repeated_first_token,
    replacement_for,
    with_replaced_tokens,
)
from megasink.analysis.capture.measurements import AnalysisValues, Measurements
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.capture.probed_models import analysis_identity
from megasink.analysis.measure import measure
from megasink.analysis.metrics import metrics
from megasink.analysis.metrics.inactive_heads import inactive, share_by_layer, threshold
from megasink.analysis.options import SweepOptions
from megasink.analysis.pages.sweep_page import write_sweep
from megasink.analysis.ranks import Ranks
from megasink.analysis.result_schemas import FORMAT, ModelFacts, SweepResults, SweepRow
from megasink.analysis.result_store import Store, holding
from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import leading_ids
from megasink.data.replaced_tokens import Replacement
from megasink.errors import UserError
from megasink.files.checked_fields import to_json

METRICS = ("alpha", "awft", "ahon", "importance", "massive_ratio")
SCORES = ("awft", "ahon_ln")
"""Scores whose inactive heads are counted (P3.24)."""
SEED = 0
"""Seed of the random baseline, which a sweep does not show."""


class Setting(NamedTuple):
    """One row of a sweep."""

    length: int  # text tokens; BOS and copies are extra
    bos: str  # "add" or "none"
    copies: int  # copies of BOS or, without BOS, of the first token of the text

    @property
    def label(self) -> str:
        return f"{self.length}-{self.bos}-x{self.copies}"


def sweep(model: ProbedModel, options: SweepOptions, ranks: Ranks) -> SweepResults | None:
    """Run every combination and write the measurements; None on every rank but 0."""
    output = options.output
    assert output is not None
    partial = output / "partial"
    tokenizer, positions, first = model.tokenizer, model.positions, model.first
    settings = settings_of(options, tokenizer)
    longest = max(s.length + s.copies - (s.bos == "none") for s in settings) + len(first)
    if positions is not None and longest > positions:
        raise UserError(
            f"--lengths {max(options.lengths)} makes sequences of {longest} tokens, including "
            f"those before the text, but {model.facts['name']} has {positions} positions: use "
            "shorter lengths"
        )
    contents = contents_of(options, tokenizer)
    replaced = replacement_for(options, model)
    facts = analysis_identity(model, contents, options, METRICS)
    about = facts | options.by_flag("max_samples", "lengths", "first_token_copies")
    about |= {"--bos": options.beginnings, "--name": model.facts["name"]}
    about |= {"replaced": None if replaced is None else [replaced.positions, replaced.value]}
    with holding(options, "sweep", about, ranks) as record:
        measured = []
        for setting in settings:
            samples = samples_of(setting, contents, first, tokenizer.bos_token_id, replaced)
            own = facts | {"data": data_hash(samples)}
            store = Store(partial / setting.label, own, ranks, overwrite=options.overwrite)
            found = measure(model, samples, options, METRICS, store=store)
            if found is not None:
                measured.append((setting, found))
        if ranks.rank:
            return None
        results, arrays = _results(options, model, contents, replaced, measured)
        record()
        write_sweep(results, arrays, output)
        Store(partial).remove()
    return results


def _results(
    options: SweepOptions,
    model: ProbedModel,
    contents: Sequence[Sample],
    replaced: Replacement | None,
    measured: Sequence[tuple[Setting, Measurements]],
) -> tuple[SweepResults, dict[str, Any]]:
    """Return the contents of sweep.json and of sweep.npz; the longest texts set thresholds."""
    values = {setting: found.analysis_values(SEED) for setting, found in measured}
    set_by = max(values, key=lambda setting: setting.length)
    thresholds = {
        name: threshold(scores, LAYER_SHARE, metrics()[name].inactive or "")
        for name, scores in scores_of(values[set_by]).items()
        if name in SCORES
    }
    results = SweepResults(
        format=FORMAT,
        megasink=megasink.__version__,
        model=ModelFacts(**model.facts, layers=len(model.heads), heads=model.heads),
        data=[str(source) for source in options.data],
        max_samples=options.max_samples,
        data_sha256=data_hash(contents),
        replaced_positions=None if replaced is None else list(replaced.positions),
        replaced_with=None if replaced is None else replaced.value,
        set_by=set_by.label,
        thresholds=thresholds,
        rows=[_row(setting, found, values[setting], thresholds) for setting, found in measured],
    )
    return results, {
        f"{name}/{setting.label}": of.by_sample[name].numpy()
        for setting, of in values.items()
        for name in SCORES
    }


def settings_of(options: SweepOptions, tokenizer: Any) -> list[Setting]:
    """Return each combination once, with "auto" resolved by the tokenizer."""
    special = tokenizer.bos_token_id
    kinds = []
    for bos in options.beginnings:
        if bos == "add" and special is None:
            raise UserError(
                f"--bos add: the tokenizer {tokenizer.name_or_path} has no BOS token; use auto"
            )
        if bos == "auto":
            begins = special is not None and leading_ids(tokenizer)[:1] == [special]
            bos = "add" if begins else "none"
        kinds.append(bos)
    varied = (options.lengths, dict.fromkeys(kinds), options.first_token_copies)
    return [Setting(*combination) for combination in itertools.product(*varied)]


def contents_of(options: SweepOptions, tokenizer: Any) -> list[Sample]:
    """Return the tokens of texts long enough for every length, cut to the longest, without BOS."""
    longest = max(options.lengths)
    reader = Reader(tokenizer, "none", parse_special_tokens=options.parse_special_tokens)
    contents = []
    for name, source in zip(dataset_names(options.data), options.data, strict=True):
        count = most = 0
        for document in Corpus([source], json_key=options.json_key):
            tokens = reader.read(document.text, document.source, longest)
            most = max(most, len(tokens))
            if len(tokens) == longest:
                contents.append(Sample(tuple(tokens), name, document.source))
                count += 1
            if count == options.max_samples:
                break
        if not count:
            raise UserError(
                f"{source} has no text of {longest} tokens (the longest has {most}): use "
                f"--lengths of at most {most}, or longer texts"
            )
    return contents


def samples_of(
    setting: Setting,
    contents: Sequence[Sample],
    first: tuple[int, ...],
    bos: int,
    replaced: Replacement | None = None,
) -> list[Sample]:
    """Return the samples of one sweep row, with replaced tokens also in BOS and copies."""
    begin, made = bos if setting.bos == "add" else None, []
    for sample in contents:
        tokens = repeated_first_token(sample.tokens[: setting.length], setting.copies, begin)
        made.append(replace(sample, tokens=tuple(tokens), scored=setting.length - 1))
    made = with_replaced_tokens(made, replaced)
    return [replace(sample, tokens=(*first, *sample.tokens)) for sample in made]


def _row(
    setting: Setting,
    measurements: Measurements,
    values: AnalysisValues,
    thresholds: dict[str, float],
) -> SweepRow:
    registered, by_layer, by_head = metrics(), {}, {}
    for name, tau in thresholds.items():
        scores = values.by_sample[name].numpy()
        mask = inactive(scores, tau, registered[name].inactive or "")
        by_layer[name], by_head[name] = share_by_layer(mask, scores), mask.mean(0)
    return SweepRow(
        **setting._asdict(),
        samples=len(measurements.samples),
        tokens=measurements.samples[0].tokens,
        non_finite=[entry.source for entry in measurements.non_finite],
        metrics={n: r for n, r in metric_results(values).items() if registered[n].shown},
        inactive={name: float(np.nanmean(shares)) for name, shares in by_layer.items()},
        inactive_by_layer=to_json(by_layer),
        inactive_by_head=to_json(by_head),
    )
