"""`megasink ablate`: measure the loss when heads are zeroed (P3.11 to P3.16, P4.7).

Shapes: N samples, L layers, H heads.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from megasink.analysis.ablate.ablation_summary import summarize
from megasink.analysis.ablate.measured_points import Ablation, OnTasks, OnTexts, read_point
from megasink.analysis.ablate.settings import Setting, read_calibration, settings_of, thresholds_of
from megasink.analysis.capture.first_block_tensors import PRODUCT
from megasink.analysis.capture.first_token_geometry import read_rows
from megasink.analysis.capture.input_samples import inputs_of
from megasink.analysis.capture.probe import ProbedModel, takes_seconds
from megasink.analysis.capture.probed_models import identity
from megasink.analysis.evaluate.tasks_loading import LoadedTasks
from megasink.analysis.interventions.intervention_types import changes_of
from megasink.analysis.metrics.inactive_heads import Scores
from megasink.analysis.metrics.pca_tsne import Floats, neighbor_embedding
from megasink.analysis.options import AblationOptions
from megasink.analysis.pages.ablation_page import write_ablation
from megasink.analysis.ranks import Ranks
from megasink.analysis.result_schemas import UNCHANGED, AblationResults
from megasink.analysis.result_store import Store, holding, key_of
from megasink.analysis.run_analysis import bytes_by_token
from megasink.console.progress import tracked
from megasink.errors import ConfigError, UserError
from megasink.files.checked_fields import to_json
from megasink.files.json_file import read_value


def ablate(
    model: ProbedModel, options: AblationOptions, ranks: Ranks, tasks: LoadedTasks | None = None
) -> AblationResults | None:
    """Measure every point of a sweep that OUTPUT/points lacks, and write the results on rank 0."""
    output, layer = options.output, options.layer
    assert output is not None
    if layer is not None and layer >= len(model.heads):
        raise UserError(f"--layer {layer}: the layers are 0 to {len(model.heads) - 1}")
    if layer is not None and not model.heads[layer]:
        raise UserError(f"--layer {layer} has no softmax attention: choose another layer")
    shared = (model, identity(model, None), Store(output / "points", ranks=ranks), options)
    ablation: Ablation
    if tasks is not None:
        ablation = OnTasks(*shared, tasks)
    else:
        ablation = OnTexts(*shared, inputs_of(options, model).samples, bytes_by_token(model, ranks))
    about = ablation.facts()
    del about["interventions"]
    given = options.given()
    about |= {flag: given[flag] for flag in (*options.grows, "--calibration", "--seed")}
    about["--name"] = model.facts["name"]
    if options.interventions is not None:
        about["--interventions"] = read_value(options.interventions)
    with holding(options, "ablate", about, ranks) as record:
        return _ablate(ablation, output, record)


def _ablate(ablation: Ablation, output: Path, record: Callable[[], None]) -> AblationResults | None:
    model, store, options = ablation.model, ablation.store, ablation.options
    scores, where = _scores(ablation)
    thresholds = thresholds_of(scores, options.score, options.zeroed, where)
    settings = settings_of(options, model.heads, thresholds, scores)
    changes = [change for setting in settings for change in changes_of(setting.interventions)]
    problems = dict.fromkeys(problem for c in changes for problem in c.problems(model.heads))
    if problems:  # of any point, before the first one runs
        raise ConfigError(problems)
    changes_tokens = any(not i.changes_heads for s in settings for i in s.interventions)
    if isinstance(ablation, OnTexts) and changes_tokens:
        ablation = ablation.scored_alike()
    facts = [ablation.facts(setting.entries) for setting in settings]
    keys = [key_of(each) for each in facts]
    distinct = list({key: i for i, key in enumerate(keys)}.values())

    def make(number: int, done: Callable[[int], None]) -> dict[str, Any]:
        i = distinct[number]
        point: dict[str, Any] = to_json(ablation.measured(settings[i], facts[i]))
        done(1)
        return point

    goes_on = store.fill(
        {f"{keys[i]}.json": 1 for i in distinct},
        make,
        verb="ablating",
        unit="points",
        slow=takes_seconds(model.module),
    )
    if not goes_on:
        return None
    points = [read_point(store, key) for key in keys]
    results, arrays = summarize(options, model, settings, keys, points, thresholds)
    if all(value.value is None for value in results.unchanged.values.values()):
        raise UserError(
            f"without changes, {model.facts['name']} gives infinite or NaN {results.quantity}: its "
            "weights hold such values, or it needs a wider dtype (--dtype float32)"
        )
    tsne = {}
    if options.layer == 0 and isinstance(ablation, OnTexts):
        alone = [s for s in settings if s.row in (UNCHANGED, "layer 0")]
        tsne = activations(ablation, alone, options.seed)
    record()
    write_ablation(results, arrays, tsne, output)
    return results


def _scores(ablation: Ablation) -> tuple[Mapping[str, Scores], str]:
    """Return the scores of a calibration, or of the texts or tasks, and their source."""
    model, folder = ablation.model, ablation.options.calibration
    if not ablation.options.score:
        return {}, ""
    if folder is None:
        return ablation.scores(ablation.options.score), model.facts["name"]
    try:
        return read_calibration(folder, ablation.identity["weights"], model.heads), str(folder)
    except UserError as error:
        raise UserError(f"--calibration {error}") from error


POSITION = "position_N"


def activations(ablation: OnTexts, settings: Sequence[Setting], seed: int) -> dict[str, Floats]:
    """Return tsne.npz: label -> t-SNE [N, 2], and `POSITION` [N]."""
    coordinates: dict[str, Floats] = {}
    console = Console(stderr=True)
    for setting in tracked(settings, "t-SNE", len(settings), "settings", console=console):
        key = f"tsne-{key_of(ablation.facts(setting.entries) | {'seed': seed})}"
        arrays = ablation.kept(key, partial(_embedded, ablation, setting, seed))
        coordinates[setting.label], coordinates[POSITION] = arrays["points"], arrays["position"]
    return coordinates


def _embedded(ablation: OnTexts, setting: Setting, seed: int) -> dict[str, Floats]:
    model = ablation.model

    def open_probe(listener: Any, changes: Any = ()) -> Any:
        made = changes_of(setting.interventions)
        return model.open_probe(listener, [*changes, *made])

    rows = read_rows(open_probe, ablation.samples, device=model.device)
    if PRODUCT not in rows.by_site:
        raise UserError(f"--layer 0: cannot draw its MLP activations: {rows.missing[PRODUCT]}")
    try:
        embedded = neighbor_embedding(rows.by_site[PRODUCT].astype(np.float64), seed)
    except ValueError as error:
        raise UserError(f"--layer 0: {error}: use more or longer texts") from error
    return {"points": embedded.points, "position": rows.position_N.astype(np.float64)}
