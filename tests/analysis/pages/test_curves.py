"""The picture of a run shows what metrics.jsonl holds."""

import json

import matplotlib.image
import numpy as np
import pytest

from megasink.errors import UserError
from megasink.figures.run_figure import draw_run, figure_of, series, smoothed
from megasink.figures.run_metrics import read_metrics


def lines(count=20, heads=True):
    rows = []
    for step in range(1, count + 1):
        row = {"iteration": step, "lm_loss": 5.0 / step}
        if heads:
            row |= {"imbalance": 0.1, "imbalance_per_layer": [0.1, 0.1]}
            row["importance"] = [[0.2, 0.9], [0.5, 1.0]]
        rows.append(row)
    return [*rows, {"iteration": count, "valid_lm_loss": 1.0, "valid_bits_per_byte": 0.7}]


def write(folder, rows):
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_smoothing_is_tensorboards():
    # TensorBoard: last = last * w + (1 - w) * x, divided by 1 - w^n.
    assert smoothed(np.array([1.0, 3.0]), 0.9) == pytest.approx([1.0, (0.09 + 0.3) / 0.19])
    assert smoothed(np.full(5, 2.0)) == pytest.approx(np.full(5, 2.0))


def test_smoothing_passes_over_what_is_no_number():
    found = smoothed(np.array([1.0, np.nan, 3.0]), 0.9)
    assert found[[0, 2]] == pytest.approx([1.0, (0.09 + 0.3) / 0.19])
    assert np.isnan(found[1])


def test_the_last_value_of_an_iteration_counts():
    rows = [{"iteration": 1, "x": 1.0}, {"iteration": 1, "x": 2.0}, {"iteration": 2, "x": None}]
    iterations, values = series(rows, "x")
    assert iterations.tolist() == [1.0]
    assert values.tolist() == [2.0]


@pytest.mark.parametrize(("heads", "bits"), [(True, True), (False, False)])
def test_every_panel_is_drawn(tmp_path, heads, bits):
    rows = lines(heads=heads)
    if not bits:
        del rows[-1]["valid_bits_per_byte"]
    picture = matplotlib.image.imread(draw_run(write(tmp_path, rows)))
    height, width, _ = picture.shape
    count = 4 if bits else 3
    assert width == pytest.approx(count * 14 / 3 / 4.2 * height, rel=0.01)
    panels = np.array_split(picture[height // 5 :, :, :3], count, axis=1)
    # No panel is blank: each has dark ink (axes, text) in it.
    assert all((panel.min(axis=2) < 0.3).mean() > 0.001 for panel in panels)


def test_a_validation_loss_of_nan_leaves_the_panel_out(tmp_path):
    rows = lines()
    rows[-1] |= {"valid_lm_loss": None, "valid_bits_per_byte": None}
    assert len(figure_of(tmp_path, rows).axes) == len(figure_of(tmp_path, lines()).axes) - 1


def test_the_heatmap_distinguishes_open_and_closed_heads(tmp_path):
    flat, spread = tmp_path / "flat", tmp_path / "spread"
    for folder, gates in ((flat, [[1.0, 1.0]]), (spread, [[0.0, 1.0]])):
        folder.mkdir()
        row = {"iteration": 1, "lm_loss": 1.0, "imbalance": 0.0}
        row |= {"imbalance_per_layer": [0.0], "importance": gates}
        write(folder, [row])
    closed = np.array([0x44, 0x01, 0x54]) / 255  # viridis' lowest colour
    count = {}
    for folder in (flat, spread):
        picture = matplotlib.image.imread(draw_run(folder))
        picture = picture[:, : int(0.82 * picture.shape[1]), :3]  # without the colour bar
        count[folder.name] = (np.abs(picture - closed).max(2) < 0.02).sum()
    assert count["spread"] > 20_000
    assert count["flat"] < 1_000


def test_rows_of_the_heatmap_are_named_by_their_blocks(tmp_path):
    row = {"iteration": 1, "lm_loss": 1.0, "imbalance": 0.0, "imbalance_per_layer": [0.1, 0.2]}
    row |= {"importance": [[0.5, 1.0]] * 2, "layers": [1, 3]}
    figure = figure_of(tmp_path, [row])
    axis = next(axis for axis in figure.axes if axis.get_ylabel() == "layer")
    assert [tick.get_text() for tick in axis.get_yticklabels()] == ["1", "3"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is not a run"),
        ("", "no training step"),
        ('{"iteration": 1}\n{"b', "line 2 is not JSON"),
        (
            '{"iteration": 1, "layers": [1], "imbalance_per_layer": [0.1, 0.2]}',
            "imbalance_per_layer has 2 rows, but `layers` has 1",
        ),
    ],
)
def test_what_is_no_run_is_refused(tmp_path, content, message):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=message):
        read_metrics(tmp_path)
