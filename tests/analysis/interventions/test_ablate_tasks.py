"""`megasink ablate --tasks`: accuracy in a task of lm-evaluation-harness, by megasink's own.

Shapes: N requests, L layers, H heads.
"""

import json
import math

import numpy as np
import pytest

from megasink.analysis.ablate import measured_points as measuring
from megasink.analysis.ablate.ablation_summary import _paired_error
from megasink.analysis.ablate.measured_points import TaskScore
from megasink.analysis.ablate.quality_curves import kept_level, normalized_auc, removable
from megasink.analysis.evaluate import harness
from megasink.analysis.metrics.inactive_heads import published_quantile
from megasink.analysis.pages import ablation_page
from megasink.analysis.result_schemas import AblationResults
from megasink.cli import main
from megasink.files.checked_fields import from_json
from tests.analysis.capture.tiny_models import save_with_tokenizer

TASK, LIMIT = "docstrings_choice", 8


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model with room for the questions."""
    root = tmp_path_factory.mktemp("tasks")
    texts = ["Return the name of a file, or None if it is not a file. " * 9]
    return save_with_tokenizer(root, "llama", texts, 330, max_position_embeddings=512)


def command(model, output):
    flags = "--score ahon --zeroed 0 30 --seeds 1 --heads 0.1 --batch-size 4 --device cpu"
    return f"ablate {model} --tasks {TASK} --limit {LIMIT} {flags} --output {output}".split()


@pytest.fixture(scope="module")
def swept(model):
    """The folder, and what every evaluation was asked for and found."""
    asked = []

    def kept(*args, **kwargs):
        found = harness.evaluate(*args, **kwargs)
        asked.append((args[1], found))
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "evaluate", kept)
        assert main(command(model, model.parent / "out")) == 0
    return model.parent / "out", asked


def results_of(output):
    return from_json(AblationResults, json.loads((output / "ablation.json").read_text()), "it")


def test_points_are_accuracies_under_the_interventions(swept):
    output, asked = swept
    found = results_of(output)
    assert found.tasks == {TASK: "1.0"}
    assert found.higher_is_better
    _, *points = asked  # the first one measured the scores
    assert len(points) == len(found.points) == 5
    before = np.array([document["acc"] for document in points[0][1].samples[TASK]])
    for point, (interventions, of) in zip(found.points, points, strict=True):
        assert point.interventions == json.loads(json.dumps(of.interventions))
        assert len(interventions) == len(point.interventions) == (point.row != "unchanged")
        right = [document["acc"] for document in of.samples[TASK]]
        assert len(right) == point.values[TASK].samples == LIMIT
        assert point.values[TASK].value == pytest.approx(100 * np.mean(right))
        # By hand: of the differences, question by question.
        apart = np.array(right) - before
        error = math.sqrt(((apart - apart.mean()) ** 2).sum() / (LIMIT - 1) / LIMIT)
        assert point.values[TASK].standard_error == pytest.approx(100 * error, abs=1e-9)
        kept = json.loads((output / f"points/{point.key}.json").read_text())
        assert kept["tasks"][TASK]["of_each"] == right


def score(value, of_each):
    return TaskScore(metric="acc", version="1", value=value, standard_error=9.0,
                     samples=len(of_each), of_each=of_each)  # fmt: skip


def test_the_error_of_a_change_is_paired():
    """Of eight questions one is lost and one won: the change is 0, and its error not that of
    either accuracy."""
    before = score(50.0, [1, 1, 1, 1, 0, 0, 0, 0])
    after = score(50.0, [1, 1, 1, 0, 1, 0, 0, 0])
    assert _paired_error(after, before) == pytest.approx(100 * math.sqrt(2 / 7 / 8))  # 18.9
    assert _paired_error(before, before) == 0
    for other in (
        score(50.0, []),  # a group of tasks
        score(61.0, before.of_each),  # no mean over questions, such as a macro F1
        score(None, before.of_each),
    ):
        assert _paired_error(other, before) is None
        assert _paired_error(before, other) is None
    assert _paired_error(score(0.0, [0]), score(100.0, [1])) is None


def test_the_page_says_where_there_is_no_error(swept):
    found = results_of(swept[0])
    assert "No standard error" not in str(ablation_page.given(found))
    for point in found.points:
        point.values[TASK].standard_error = None
    assert f"No standard error for {TASK}: " in str(ablation_page.given(found))


def test_thresholds_are_of_the_requests_of_the_task(swept):
    output, _ = swept
    (path,) = (output / "points").glob("scores-*.npz")
    with np.load(path) as arrays:
        scores_NLH = arrays["ahon"]
    assert scores_NLH.shape == (4 * LIMIT, 2, 4)  # four answers to each question
    found = results_of(output)
    for percent, tau in found.thresholds["ahon"].items():
        assert tau == pytest.approx(published_quantile(scores_NLH, float(percent) / 100))
    at_30 = found.of("ahon")[1]
    assert at_30.zeroed == pytest.approx(30, abs=10)


def test_curves_lose_percentage_points(swept):
    found = results_of(swept[0])
    level = kept_level(found.unchanged.values[TASK].value)
    lines = {"random": [found.unchanged, *found.of("random")], "ahon": found.of("ahon")}
    for curve in found.curves:
        x = [point.zeroed or 0.0 for point in lines[curve.score]]
        y = [point.values[TASK].value for point in lines[curve.score]]
        assert curve.auc == pytest.approx(normalized_auc(x, y))
        assert curve.removable == pytest.approx(removable(x, y, level).percent)
    best = max(found.curves, key=lambda curve: curve.auc)
    assert best.rank == 1


def test_a_repeated_sweep_asks_nothing(model, swept, monkeypatch):
    output, _ = swept
    before = (output / "ablation.json").read_text()
    monkeypatch.setattr(measuring, "evaluate", lambda *args, **kwargs: pytest.fail("asked again"))
    monkeypatch.setattr(ablation_page, "pictures", lambda *_: [])
    assert main(command(model, output)) == 0
    assert (output / "ablation.json").read_text() == before


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ("--tasks docstrings_perplexity --limit 2", "reports no accuracy, only "),
        ("--tasks mmlu", "not on this machine: add --allow-download"),
        (f"--tasks {TASK} --data README.md", "--tasks and --data: choose one"),
        (f"--tasks {TASK} --limit 0", "--limit 0: use 1 or more"),
        ("--data README.md --limit 3", "--limit applies only to --tasks"),
    ],
)
def test_bad_input_is_named(model, tmp_path, capsys, flags, problem):
    command = f"ablate {model} {flags} --output {tmp_path}/out --heads 0.1 --device cpu"
    assert main(command.split()) == 2
    assert problem in capsys.readouterr().err
    assert not list(tmp_path.rglob("*.json"))
