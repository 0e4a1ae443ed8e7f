"""What the trainer writes while it runs: the same to W&B as to metrics.jsonl; and when it stops."""

import math
import re

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from megasink.balance.gate_sums import BALANCE_GRADIENT, OTHER_GRADIENT, HeadStatistics
from megasink.training.metric_records import RATIO, head_record
from megasink.training.run_dir import folder_problem
from tests.distributed.layout import SINGLE
from tests.distributed.pool import free_port
from tests.runs import MOCK, TINY, UNTIED
from tests.runs import metrics as lines

FLAGS = [*TINY, *UNTIED, *MOCK]
FLAGS += """
    --seq-length 64 --max-position-embeddings 64 --train-iters 5 --lr 1e-2 --eval-interval 4
    --log-interval 2 --head-balance-coeff 0.1 --softmax-offset-init 1
    --pipeline-model-parallel-size 2
""".split()
TASKS = "tests.training.observing_tasks"


@pytest.fixture(scope="module")
def watched(pool, tmp_path_factory):
    """A run of two pipeline stages: what went to W&B on each rank, and its metrics."""
    folder = tmp_path_factory.mktemp("watched") / "run"
    flags = [*FLAGS, "--run-dir", str(folder), "--log-sink-rate", "--head-heatmap-interval", "3"]
    flags += ["--wandb-project", "sinks", "--wandb-exp-name", "a"]
    reports = pool.run(f"{TASKS}:train_with_wandb", flags=flags, ranks=2, port=free_port())
    assert (folder / "wandb").is_dir()
    assert [path.name for path in (folder / "checkpoints").glob("wandb")] == []
    return reports, lines(folder)


def test_writers_of_the_last_rank_may_be_first(tmp_path):
    for name in ("tensorboard", "wandb"):
        (tmp_path / name).mkdir()
    assert folder_problem(tmp_path, resume=False) is None
    (tmp_path / "metrics.jsonl").touch()
    assert "holds other files and is not a run" in folder_problem(tmp_path, resume=False)


def test_the_last_rank_alone_writes(watched):
    (first, last), _ = watched
    assert (first["started"], last["started"]) == (0, 1)
    assert first["logged"] == {}
    assert last["steps"] == sorted(last["steps"])  # W&B drops what is older


@pytest.mark.parametrize(
    ("key", "name"), [("importance", "head importance"), ("softmax_offset", "softmax offset")]
)
def test_wandb_gets_every_layers_mean_and_extremes(watched, key, name):
    (_, report), metrics = watched
    records = [line for line in metrics if key in line]
    assert [line["iteration"] for line in records] == [2, 4, 5]
    for layer in (0, 1):
        for what, of in (("min", min), ("max", max), ("mean", lambda row: sum(row) / len(row))):
            wanted = [(line["iteration"], of(line[key][layer])) for line in records]
            assert report["logged"][f"{name} {what} by layer/{layer}"] == wanted
    values = [value for line in records for row in line[key] for value in row]
    assert len(set(values)) > 12  # of 24: heads have their own


def test_wandb_gets_the_ratio_the_imbalance_and_the_spikes(watched):
    (_, report), metrics = watched
    records = [line for line in metrics if "balance_gradient_ratio" in line]
    assert [line["iteration"] for line in records] == [2, 4, 5]
    for line in records:
        assert 0 < line["balance_gradient_ratio"] < math.inf
        smallest, largest = sorted(line["balance_gradient_ratio_per_layer"])
        assert smallest < line["balance_gradient_ratio"] < largest
    for key, name in (
        ("balance_gradient_ratio", "balance gradient ratio"),
        ("loss_spikes", "loss spikes"),
    ):
        wanted = [(line["iteration"], line[key]) for line in records]
        assert report["logged"][name] == wanted
    by_layer = [(line["iteration"], line["imbalance_per_layer"][1]) for line in records]
    assert report["logged"]["head imbalance by layer/1"] == by_layer
    every_step = [step for step, _ in report["logged"]["head imbalance"]]
    assert every_step == [1, 2, 3, 4, 5]  # Megatron's own


def test_wandb_gets_a_picture_of_the_first_step_every_third_and_the_last(watched):
    (_, report), _ = watched
    pictures = report["logged"]["head importance"]
    assert [step for step, _ in pictures] == [1, 3, 5]
    for _, (_, (height, width, channels), dtype) in pictures:
        assert height > 200
        assert width > 400
        assert (channels, dtype) == (3, "uint8")


def test_sink_rates_of_every_evaluation(watched):
    (_, report), metrics = watched
    evaluations = [line for line in metrics if "valid_lm_loss" in line]
    assert [line["iteration"] for line in evaluations] == [4, 5]
    for line in evaluations:
        # Sinks of 1 in sequences of 64: mean weight is sum over n of e / (n + e) / 64 = 0.14.
        assert line["valid_sink_rate_first_key"] == 0.0
        assert line["valid_sink_rate_slot"] == 0.0
        assert line["valid_sink_rate_slot_per_layer"] == [0.0, 0.0]
    wanted = [(line["iteration"], line["valid_sink_rate_slot"]) for line in evaluations]
    assert report["logged"]["sink rate slot validation"] == wanted


@pytest.mark.parametrize(
    ("late", "lines_after"), [(False, [1, 1, 2, 4, 4, 5]), (True, [1, 1, 1, 4, 4, 4])]
)
def test_a_step_is_written_one_step_later_and_before_a_checkpoint(
    pool, tmp_path, late, lines_after
):
    """Or later still, as long as its values are not on the host; one that is logged, or drawn as
    the first is, at once."""
    run = tmp_path / "run"
    flags = [*FLAGS[:-2], "--run-dir", str(run), "--train-iters", "7", "--log-interval", "4"]
    flags += ["--save-interval", "6", "--eval-interval", "100", "--eval-iters", "0"]
    [found, *_] = pool.run(
        f"{TASKS}:lines_written", flags=flags, ranks=1, port=free_port(), late=late
    )
    wanted = [(f"step {step}", count) for step, count in enumerate(lines_after, start=1)]
    assert found == [*wanted, ("save 6", 6), ("step 7", 7), ("save 7", 7)]
    steps = [line for line in lines(run) if "lm_loss" in line]
    assert [line["iteration"] for line in steps] == [1, 2, 3, 4, 5, 6, 7]
    assert len({line["lm_loss"] for line in steps}) == 7


def test_the_speed_counts_the_batch_of_each_step(pool, tmp_path):
    """Under a schedule of batch sizes: 2 sequences, and 8 after 128 tokens."""
    at = FLAGS.index("--global-batch-size")
    flags = [*FLAGS[:at], *FLAGS[at + 2 : -2], "--seq-length", "32", "--log-interval", "1"]
    flags += ["--step-batch-size-schedule", "0:2 128:8", "--eval-iters", "0", "--train-iters", "4"]
    flags += ["--run-dir", str(tmp_path), "--wandb-project", "sinks", "--wandb-exp-name", "a"]
    [report, *_] = pool.run(f"{TASKS}:train_with_wandb", flags=flags, ranks=1, port=free_port())
    steps = lines(tmp_path)
    tokens = [one["tokens"] - before for one, before in zip(steps, [0, 64, 128, 384], strict=True)]
    assert tokens == [64, 64, 256, 256]
    each, wanted = None, []
    for one, size in zip(steps, tokens, strict=True):
        here = one["seconds"] / size
        each = here if each is None else 0.7 * each + 0.3 * here
        wanted.append((one["iteration"], pytest.approx(1 / each)))
    assert report["logged"]["tokens per second"] == wanted


def test_the_speed_is_a_moving_average_and_the_rest_takes_as_long(pool):
    """4 * 64 tokens in 2 s, then in 0.7 * 2 + 0.3 * 4 s; 9 and 8 of 10 steps are left."""
    sizes = {"train_iters": 10, "global_batch_size": 4, "seq_length": 64}
    (found,) = pool.run(f"{TASKS}:log_lines", SINGLE, seconds=[2.0, 4.0], **sizes)
    assert found == [
        "megasink: step 1/10 | lm loss 2.0000 | 128 tokens/s | eta 0:00:18",
        "megasink: step 2/10 | lm loss 2.0000 | 98 tokens/s | eta 0:00:20",
    ]


def test_a_run_that_diverges_stops_on_every_rank(pool, tmp_path):
    def train(folder, *flags):
        flags = [*FLAGS, "--run-dir", str(folder), "--stop-on-divergence", "0.5", *flags]
        return pool.run(f"{TASKS}:stopped", flags=flags, ranks=2, port=free_port())

    run = tmp_path / "run"
    flags = ["--save-interval", "15", "--eval-interval", "100", "--lr-decay-style", "constant"]
    assert train(run, *flags, "--train-iters", "45") == [("", "")] * 2
    # Resumed with far too high a learning rate: that it was good before is in metrics.jsonl alone.
    again = ["--resume", "--override-opt-param-scheduler", "--lr", "9"]
    answers = train(run, *flags, *again, "--train-iters", "90")
    assert answers[0] == answers[1]  # the first stage does not know the loss
    kind, text = answers[0]
    assert kind == "UserError"
    assert "the training loss diverges (--stop-on-divergence 0.5)" in text
    last = lines(run)[-1]["iteration"]
    assert text.startswith(f"step {last}: ")
    assert last >= 50
    assert last % 2 == 0  # looked at with the log
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    assert [event.step for event in events.Images("head importance")] == [1, 45, last]
    saved = sorted(int(path.name[5:]) for path in (run / "checkpoints").glob("iter_*"))
    assert saved == list(range(15, last, 15))  # none of the step at which it stopped
    numbers = re.search(r"it is ([\d.]+) nats, ([\d.]+) above its lowest value ([\d.]+)", text)
    smoothed, above, least = map(float, numbers.groups())
    assert above == pytest.approx(smoothed - least, abs=2e-3)
    assert above > 0.5
    lowest = int(re.search(r"at step (\d+)\.", text)[1])
    before = max(step for step in saved if step <= lowest)
    assert f"--load {run}/checkpoints --ckpt-step {before} " in text
    # And what it says to do can be done.
    advice = re.search(r"with (--load \S+ --ckpt-step \d+ --\S+) and a lower --lr$", text)
    steps = ["--train-iters", str(before + 2), *advice[1].split()]
    assert train(tmp_path / "again", *steps, "--lr", "1e-3") == [("", "")] * 2
    assert lines(tmp_path / "again")[0]["iteration"] == before + 1


def test_a_step_whose_gradients_are_all_nan_has_no_ratio():
    """As where fp16's loss scale is too high: the step is skipped, and logged."""
    heads = torch.full((2, 3), 0.5)
    seen = {BALANCE_GRADIENT: torch.ones(2, 3), OTHER_GRADIENT: torch.full((2, 3), math.nan)}
    statistics = HeadStatistics(heads, heads[:, 0], heads[0, 0], heads[0, 0], seen)
    record = head_record(statistics, details=True)
    assert record["importance"] == heads.tolist()
    assert RATIO not in record
