"""Several runs on one page."""

import json

import matplotlib.image
import numpy as np
import pytest

from megasink.analysis.pages.comparison_page import summary
from megasink.cli import main as megasink
from megasink.figures.loss_spikes import loss_spikes


def run(folder, scale=1.0, bits=True, steps=60):
    folder.mkdir(parents=True)
    lines = []
    for step in range(1, steps + 1):
        loss = scale * (2 + 6 / step)
        line = {"iteration": step, "lm_loss": loss, "seconds": 0.5, "tokens": 100 * step}
        lines.append(line | {"imbalance": 0.1 * scale})
        if step % 20 == 0:
            line = {"iteration": step, "valid_lm_loss": loss}
            lines.append(line | ({"valid_bits_per_byte": loss / 2} if bits else {}))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return lines


def test_curves_and_table_of_two_runs(tmp_path, capsys):
    run(tmp_path / "a" / "x"), run(tmp_path / "b" / "x$_{", scale=1.5)
    output = tmp_path / "out" / "compare.png"
    folders = [str(tmp_path / "a" / "x"), str(tmp_path / "b" / "x$_{")]
    assert megasink(["compare", *folders, "--output", str(output), "--x", "tokens"]) == 0
    text = capsys.readouterr().out
    assert "x" in text  # the names tell them apart
    assert "x$_{" in text
    assert "3.1500" in text  # 1.5 * (2 + 6 / 60): the last validation loss
    assert str(output) in text
    picture = matplotlib.image.imread(output)[..., :3]
    for colour in ((0x00, 0x72, 0xB2), (0xD5, 0x5E, 0x00)):  # both runs are in the picture
        assert (np.abs(picture - np.array(colour) / 255).max(axis=2) < 0.02).sum() > 200


def test_the_numbers_of_a_run(tmp_path):
    found = summary(run(tmp_path / "a"))
    assert found["steps"] == 60
    assert found["bits/byte"] == pytest.approx(1.05)
    assert found["tokens/s"] == pytest.approx(200)
    assert found["spikes"] == 0
    assert 2.1 < found["loss"] < 2.2
    assert found["imbalance"] == pytest.approx(0.1)
    assert summary(run(tmp_path / "b", bits=False))["bits/byte"] is None


def test_the_imbalance_of_a_run_is_a_moving_average_as_that_of_a_grid():
    lines = [{"iteration": n, "lm_loss": 2.0, "imbalance": float(n == 9)} for n in range(1, 10)]
    assert summary(lines)["imbalance"] == pytest.approx(0.1 / (1 - 0.9**9))


@pytest.mark.parametrize("loss", [9.0, float("nan")])
def test_steps_that_were_skipped_are_not_spikes_nor_part_of_the_loss(tmp_path, loss):
    """As in `loss_spikes` of metrics.jsonl: fp16's loss scale skips steps that overflow."""
    lines = run(tmp_path / "a")
    of_step = next(n for n, line in enumerate(lines) if line["iteration"] == 50)
    plain = summary(lines[:of_step] + lines[of_step + 1 :])
    lines[of_step] |= {"lm_loss": loss, "skipped": 0}
    assert summary(lines)["spikes"] == 1
    lines[of_step]["skipped"] = 1
    found = summary(lines)
    assert found["spikes"] == 0
    assert found["loss"] == plain["loss"]
    assert found["steps"] == 60
    every = [line | {"skipped": 1} for line in lines]
    assert summary(every)["loss"] is None


def test_spikes_are_counted_once_and_noise_is_not():
    generator = np.random.default_rng(0)
    loss = 3.0 + 0.02 * generator.standard_normal(300)
    assert loss_spikes(loss) == []
    loss[100:104] += 1.0
    loss[200] += 0.5
    loss[250] = np.nan
    assert loss_spikes(loss) == [100, 200, 250]


def test_a_falling_loss_does_not_spike():
    assert loss_spikes(2 + 6 / np.arange(1, 200)) == []


@pytest.mark.parametrize("tau", [20, 60, 200])
@pytest.mark.parametrize("at", [40, 90, 400])
def test_a_spike_counts_while_the_loss_falls(tau, at):
    noise = np.random.default_rng(tau + at).standard_normal(600)
    falling = 2 + 8 * np.exp(-np.arange(600) / tau) + 0.03 * noise
    assert loss_spikes(falling) == []
    falling[at : at + 3] += 1.0
    assert loss_spikes(falling) == [at]
