"""`megasink ablate`: what a model loses when heads are zeroed (P3.11 to P3.16, P4.7).

Shapes: N samples, L layers, H heads.
"""

import argparse
from collections.abc import Sequence

from rich.console import Console

from megasink.diagnostics.ablation import AblationResults
from megasink.diagnostics.thresholds import Scores
from megasink.errors import ConfigError, UserError
from megasink.intervene.measure import Texts, facts_of, measured, scored_alike
from megasink.intervene.points import PointFolder, key_of, texts_hash
from megasink.intervene.settings import (
    Setting,
    Thresholds,
    settings_of,
    statistics_scores,
    thresholds_of,
)
from megasink.intervene.summary import summarize
from megasink.probe.analysis import bytes_by_token
from megasink.probe.base import ProbedModel
from megasink.probe.identity import identity, weights_hash
from megasink.probe.inputs import Sample
from megasink.probe.measurements import merge_shards
from megasink.probe.options import model_samples
from megasink.probe.ranks import Ranks
from megasink.probe.recorder import Recorder
from megasink.probe.run import run
from megasink.probe.shards import PartialFolder, plan
from megasink.probe.summary import scores_of
from megasink.progress import progress
from megasink.report.ablation import write_ablation
from megasink.report.analysis import read_analysis

_SEED = 0
"""Of random scores, which no threshold is taken from."""


def ablate(args: argparse.Namespace, model: ProbedModel, ranks: Ranks) -> AblationResults | None:
    """Measure every point of a sweep and write the results; arguments as in `analyze`.

    Points that OUTPUT/points holds are not measured again.

    Returns:
        contents of ablation.json; None on every process except rank 0.

    Raises:
        ConfigError: interventions do not fit the model; one message lists every reason.
        UserError: as `analyze`; the calibration is of another model, or lacks a score.
    """
    _check_layer(args, model)
    weights = weights_hash(model.module)
    samples = model_samples(args, model)
    folder = PointFolder(args.output / "points")
    ranks.enter(f"{args.output}/points")
    if ranks.rank:
        ranks.await_first("opened")
        folder.check_shared()
    else:
        folder.open()
        ranks.reach("opened")
    thresholds = _thresholds(args, model, samples, weights, ranks)
    settings = settings_of(args, model.heads, thresholds)
    _check_fit(settings, model)
    if any(i.change() is None for setting in settings for i in setting.interventions):
        samples = scored_alike(samples, len(model.first), model.tokenizer.bos_token_id)
    on = Texts(samples, args.batch_size, len(model.first), bytes_by_token(model.tokenizer, ranks))
    facts = [facts_of(model, weights, on, setting) for setting in settings]
    keys = [key_of(each) for each in facts]
    ranks.enter(f"{args.output}/measuring")
    distinct = list({key: i for i, key in enumerate(keys)}.values())
    before = sum(folder.has(keys[i]) for i in distinct)
    console = Console(stderr=True, quiet=bool(ranks.rank))
    if before:
        console.print(f"{before} of {len(distinct)} points are in {args.output}/points")
    with progress("ablating", len(distinct), "points", before=before, console=console) as tell:
        for number in ranks.claims(len(distinct)):
            i = distinct[number]
            if folder.has(keys[i]):
                continue
            folder.write(keys[i], measured(model, on, settings[i], facts[i]))
            tell(before + ranks.advance(1))
        ranks.reach("measured")
        if ranks.rank:
            return None
        ranks.await_all("measured", lambda done: tell(before + done))
    results, arrays = summarize(
        args, model, settings, keys, [folder.read(key) for key in keys], thresholds
    )
    write_ablation(results, arrays, args.output)
    return results


def _check_layer(args: argparse.Namespace, model: ProbedModel) -> None:
    if args.layer is None:
        return
    if args.layer >= len(model.heads):
        raise UserError(f"--layer {args.layer}: the layers are 0 to {len(model.heads) - 1}")
    if not model.heads[args.layer]:
        raise UserError(f"--layer {args.layer}: it has no softmax attention")


def _check_fit(settings: Sequence[Setting], model: ProbedModel) -> None:
    """Check every point before the first one runs."""
    changes = [c for s in settings for i in s.interventions if (c := i.change()) is not None]
    problems = dict.fromkeys(problem for c in changes for problem in c.problems(model.heads))
    if problems:
        raise ConfigError(problems)


def _thresholds(
    args: argparse.Namespace,
    model: ProbedModel,
    samples: Sequence[Sample],
    weights: str,
    ranks: Ranks,
) -> Thresholds:
    """Return the thresholds by the scores of a calibration, or of the texts themselves."""
    if not args.score:
        return {}
    if args.calibration is None:
        scores, where = _measured_scores(args, model, samples, ranks), str(args.model)
    else:
        analysis, where = read_analysis(args.calibration), str(args.calibration)
        if analysis.results.run.weights_sha256 != weights:
            raise UserError(
                f"--calibration {args.calibration} is of other weights than {args.model} "
                f"({analysis.name}, {analysis.results.model.dtype}): analyze this model, or leave "
                "it out"
            )
        scores = analysis.by_sample
    return thresholds_of(scores, args.score, args.zeroed, where)


def _measured_scores(
    args: argparse.Namespace, model: ProbedModel, samples: Sequence[Sample], ranks: Ranks
) -> dict[str, Scores]:
    """Return the scores of the unchanged model, score -> [N, L, H].

    The shards stay in OUTPUT/points, so that the same sweep need not measure them again.
    """
    recorder = Recorder(model.heads, statistics_scores(args.score), positions=1, columns=1)
    facts = identity(args, model.module, samples, model.facts, recorder.metrics)
    facts["data"] = texts_hash(samples)
    partial = PartialFolder(args.output / "points" / f"scores-{key_of(facts)}", facts)
    with model.open_probe(recorder) as probe:
        run(
            probe,
            recorder,
            samples,
            batch_size=args.batch_size,
            device=model.device,
            loss=False,
            partial=partial,
            ranks=ranks,
        )
    if ranks.rank:
        ranks.await_first("scored")
    else:
        ranks.reach("scored")
    shards = partial.read(len(plan(samples, args.batch_size)))
    return scores_of(merge_shards(shards, model.heads).analysis_values(_SEED))
