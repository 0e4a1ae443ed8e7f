"""Real text through the real command lines: launcher, ranks, run folder, and what reads it."""

import json
import math
import shutil

import pytest

from megasink.cli import main as megasink
from tests.distributed.layout import SINGLE
from tests.forkserver import server
from tests.runs import SOURCES, TINY, UNTIED, metrics, steps

FLAGS = [*TINY, *UNTIED]
FLAGS += """
    --seq-length 64 --max-position-embeddings 64 --global-batch-size 8 --train-iters 12
    --lr 1e-2 --min-lr 1e-2 --lr-decay-style constant --split 80,20,0 --eval-interval 6
    --eval-iters 2 --log-interval 2 --seed 7
""".split()


@pytest.fixture(scope="module")
def pipeline_run(text, tmp_path_factory):
    """A run of two pipeline stages through `megasink train`."""
    run_dir = tmp_path_factory.mktemp("run") / "pp2"
    layout = ["--pipeline-model-parallel-size", "2", "--softmax-offset-init", "2"]
    layout += ["--log-sink-rate", "--head-heatmap-interval", "5", "--stop-on-divergence", "3"]
    assert megasink(["train", "--run-dir", str(run_dir), *FLAGS, *text, *layout]) == 0
    return run_dir


def test_the_model_learns(pipeline_run):
    losses = [line["lm_loss"] for line in steps(pipeline_run)]
    assert len(losses) == 12
    # A step's few texts may be odd ones.
    valid = [line["valid_lm_loss"] for line in metrics(pipeline_run) if "valid_lm_loss" in line]
    assert valid[-1] < losses[0] - 0.5


def test_bits_per_byte_agree_with_the_validation_loss(pipeline_run):
    evaluations = [line for line in metrics(pipeline_run) if "valid_lm_loss" in line]
    assert [line["iteration"] for line in evaluations] == [6, 12]
    for line in evaluations:
        # A 512-token vocabulary of code stands for 1.3 to 2.9 bytes per token on this text.
        bytes_per_token = line["valid_lm_loss"] / 0.6931471805599453 / line["valid_bits_per_byte"]
        assert 1.3 < bytes_per_token < 2.9


def test_layers_of_every_stage_are_observed(pipeline_run):
    first, *_, last = [line for line in metrics(pipeline_run) if "importance" in line]
    assert [len(heads) for heads in first["importance"]] == [4, 4]
    # A new model's scores are near 0 and its sinks are 2, so G_i is about n / (n + e^2) with
    # n = i + 1 visible tokens, on both stages.
    expected = sum(n / (n + math.exp(2)) for n in range(1, 65)) / 64
    gates = [gate for heads in first["importance"] for gate in heads]
    assert gates == pytest.approx([expected] * 8, abs=0.05)
    assert last["importance"] != first["importance"]
    assert len(last["imbalance_per_layer"]) == 2
    assert last["balance_loss"] > 0
    mean = sum(last["imbalance_per_layer"]) / 2
    assert last["imbalance"] == pytest.approx(mean, rel=1e-4)


def test_tensorboard_has_the_losses_and_every_layer(pipeline_run):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(pipeline_run / "tensorboard"))
    events.Reload()
    tags = set(events.Tags()["scalars"])
    assert {"lm loss", "head balance loss", "head imbalance", "bits per byte validation"} <= tags
    for layer in (0, 1):
        assert f"head imbalance by layer/{layer}" in tags
        assert f"head importance mean by layer/{layer}" in tags
    recorded = [line["imbalance"] for line in metrics(pipeline_run) if "imbalance" in line]
    logged = [event.value for event in events.Scalars("head imbalance")]
    assert logged == pytest.approx(recorded, rel=1e-6)
    assert {"balance gradient ratio", "loss spikes", "sink rate slot validation"} <= tags
    assert [event.step for event in events.Images("head importance")] == [1, 5, 10, 12]
    # Megatron writes each scalar a second time, against samples.
    assert [tag for tag in tags if "samples" in tag] == []
    for name in ("tokens per second", "memory in GiB"):
        assert min(event.value for event in events.Scalars(name)) > 0


def test_the_log_line_has_both_losses(pipeline_run):
    text = "".join(p.read_text() for p in (pipeline_run / "logs").rglob("stdout.log"))
    line = next(line for line in text.splitlines() if " iteration       12/" in line)
    for name in ("lm loss:", "head balance loss:", "head imbalance:"):
        assert name in line
    assert "platform: CPU (no CUDA device found)" in text
    assert "attention: sink on flash-cpu" in text


def test_the_run_folder_says_what_was_run(pipeline_run):
    config = json.loads((pipeline_run / "config.json").read_text())
    assert config["arguments"]["attention_variant"] == "sink"
    assert config["seed"] == 7
    assert {"python", "torch", "megatron-core", "megasink"} <= set(config["versions"])
    start = json.loads((pipeline_run / "starts.jsonl").read_text())
    assert start["world_size"] == 2
    assert (pipeline_run / "curves.png").stat().st_size > 20_000
    assert (pipeline_run / "checkpoints" / "iter_0000012").is_dir()


def test_a_second_start_is_refused_and_loses_nothing(pipeline_run, text, capsys):
    before = (pipeline_run / "metrics.jsonl").read_bytes()
    flags = ["train", "--run-dir", str(pipeline_run), *FLAGS, *text]
    assert megasink([*flags, "--softmax-offset-init", "2"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert "already holds a run: add --resume" in error[0]
    assert (pipeline_run / "metrics.jsonl").read_bytes() == before


def test_nan_ends_in_one_line_and_keeps_the_checkpoint(text, tmp_path):
    run_dir = tmp_path / "nan"
    flags = ["train", "--run-dir", str(run_dir), *FLAGS, *text, "--lr", "1e30", "--min-lr", "1e30"]
    done = server().run(["megasink", *flags, "--clip-grad", "0"], tree=True)
    assert done.returncode == 2
    error = done.stderr.strip().splitlines()
    assert len(error) == 1
    assert "NaN or Inf in the loss or a gradient" in error[0]
    assert (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").is_file()


GENERATE = "tests.training.generate_tasks"


def test_generate_from_another_layout(pipeline_run, pool):
    """Two pipeline stages saved it, one process reads it: the newest, one of two, a folder."""
    folder = pipeline_run / "checkpoints"
    greedy = ["--max-new-tokens", "12", "--temperature", "0"]
    commands = [
        [str(pipeline_run), "--prompt", "def ", *greedy],
        [str(folder / "iter_0000012"), "--prompt", "def ", "--prompt", "import torch\n\n", *greedy],
        [str(folder), "--prompt", "def ", "--seed", "1", "--top-k", "40", "--top-p", "0.95"],
        [str(folder), "--prompt", "def ", "--seed", "1", "--top-k", "40", "--top-p", "0.95"],
        [str(folder), "--prompt", "def ", "--seed", "2", "--iteration", "12"],
    ]
    commands = [["generate", *command] for command in commands]
    (answers,) = pool.run(f"{GENERATE}:megasink", SINGLE, commands=commands)
    assert [code for code, _, _ in answers] == [0] * 5
    texts = [output for _, output, _ in answers]
    assert [text for text in texts if not text.startswith("def ")] == []
    assert max(map(len, texts)) > 12  # one that is drawn may end early
    assert texts[1].split("\n---\n")[0] == texts[0].removesuffix("\n")  # alone, and in a batch
    assert texts[2] == texts[3] != texts[4]
    for _, _, errors in answers:
        assert "at step 12, sink attention, on cpu" in errors
        assert "prefill: " in errors
        assert errors.count("tokens/s") == 2


def test_analyze_and_trace_a_run(pipeline_run, pool, tmp_path):
    """Saved by two pipeline stages, read whole; the second checkpoint is a copy of the first."""
    run = tmp_path / "pp2"
    shutil.copytree(pipeline_run, run)
    folder = run / "checkpoints"
    shutil.copytree(folder / "iter_0000012", folder / "iter_0000006")
    data = ["--data", str(SOURCES), "--seq-length", "64", "--max-samples", "8"]
    lengths = ["--lengths", "32", "64", "--max-samples", "8", "--device", "cpu"]
    commands = [
        [
            *("analyze", str(run), "--checkpoints", *data),
            *("--output", str(tmp_path / "trace"), "--device", "cpu"),
        ],
        ["analyze", str(run), *data, "--output", str(tmp_path / "out"), "--dtype", "float32"],
        ["analyze", str(tmp_path), *data, "--output", str(tmp_path / "out")],
        ["sweep", str(run), *data[:2], *lengths, "--output", str(tmp_path / "sweep")],
    ]
    commands += [commands[0], [*commands[0], "--name", "another"]]
    (answers,) = pool.run(
        "tests.convert.vocabulary_tasks:without_figures", SINGLE, commands=commands
    )
    assert [code for code, _, _ in answers] == [0, 2, 2, 0, 0, 2], answers
    assert "trace: 1 of 2 checkpoints" in answers[0][2]
    assert "analyzing" not in answers[4][2]  # both analyses are there
    assert "has results of other settings (--name" in answers[5][2]
    *_, wrote, then = answers[4][1].splitlines()
    assert wrote.endswith("report.html, trace.csv, figures/")
    assert "megasink report " in then
    assert "--dtype applies to Hugging Face models" in answers[1][2]
    assert f"is a folder of runs: choose {run}" in answers[2][2]
    header, *rows = (tmp_path / "trace" / "trace.csv").read_text().splitlines()
    rows = [dict(zip(header.split(","), row.split(","), strict=True)) for row in rows]
    assert [row["step"] for row in rows] == ["6", "12"]
    assert [row["tokens"] for row in rows] == [str(6 * 8 * 64), str(12 * 8 * 64)]
    assert rows[0]["imbalance"] == rows[1]["imbalance"]
    assert (tmp_path / "trace" / "figures" / "trace.png").is_file()
    last = tmp_path / "trace" / "iter_0000012"
    assert not (last / "report.html").exists()  # `megasink report` draws it
    found = json.loads((last / "results.json").read_text())
    assert found["model"]["kind"] == "sink attention, step 12"
    # The texts begin alike in both, and are all long enough.
    swept = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["rows"]
    assert [row["tokens"] for row in swept] == [32, 64]
    for key in ("nats_per_token", "first_token_attention", "imbalance"):
        number = found["metrics"][key]["number"]
        assert swept[1]["metrics"][key]["number"] == pytest.approx(number, rel=1e-5)
        assert swept[0]["metrics"][key]["number"] != pytest.approx(number, rel=1e-5)


def test_a_run_at_twice_its_length_by_yarn(pipeline_run, pool, tmp_path):
    data = ["--data", str(SOURCES), "--max-samples", "2", "--no-loss"]
    analyze = ["analyze", str(pipeline_run), *data, "--device", "cpu", "--seq-length", "128"]
    analyze += ["--output", str(tmp_path / "out")]
    commands = [analyze, [*analyze, "--yarn", "1"], [*analyze, "--yarn", "2"]]
    (answers,) = pool.run(
        "tests.convert.vocabulary_tasks:without_figures", SINGLE, commands=commands
    )
    assert [code for code, _, _ in answers] == [2, 2, 0], answers
    assert "is longer than the 64 positions" in answers[0][2]
    assert "--yarn 1: use a factor above 1" in answers[1][2]
    found = json.loads((tmp_path / "out" / "results.json").read_text())
    assert found["model"]["kind"] == "sink attention, step 12, YaRN x2"
    (angles,) = pool.run(f"{GENERATE}:yarn_angles", SINGLE, run=str(pipeline_run), factor=2.0)
    assert angles["difference"] < 1e-5
    assert angles["from_plain"] > 1  # radians: the two tables do differ
    assert angles["temperature"] == pytest.approx(0.1 * math.log(2) + 1)


def test_what_is_loaded_is_what_was_saved(pipeline_run, pool):
    checkpoint = str(pipeline_run / "checkpoints" / "iter_0000012")
    (found,) = pool.run(
        f"{GENERATE}:differences", SINGLE, run=str(pipeline_run), checkpoint=checkpoint
    )
    assert found["different"] == []
    assert found["kinds"]
    assert not found["training"]
    assert all(sink != 2 for sink in found["sinks"])  # trained from --softmax-offset-init 2
    task = "tests.training.fresh_tasks:loaded_without_a_process_group"
    answers = pool.run(task, run=str(pipeline_run))
    assert answers == [(12, True, False)] * 2


def test_loading_again_and_again_leaves_no_threads(pipeline_run, pool):
    """A process group has three under gloo, which poll until the process ends."""
    task = "tests.training.fresh_tasks:threads_after_loads"
    for found in pool.run(task, run=str(pipeline_run)):
        assert found["end"] <= found["command"] < found["beside"] < found["loaded"]


def test_generate_says_what_is_wrong(pipeline_run, text, pool, tmp_path):
    def changed(name, **arguments):
        """A copy of the run whose config.json says something else."""
        run = tmp_path / name
        shutil.copytree(pipeline_run, run)
        config = json.loads((run / "config.json").read_text())
        config["arguments"] |= arguments
        (run / "config.json").write_text(json.dumps(config))
        return run

    hostile = changed("hostile")
    metadata = hostile / "checkpoints" / "iter_0000012" / ".metadata"
    planted = tmp_path / "planted"
    metadata.write_bytes(f"cos\nsystem\n(S'touch {planted}'\ntR.".encode())
    cut = changed("cut")
    shard = next((cut / "checkpoints").glob("*/*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-1000])
    broken = changed("broken")
    (broken / "config.json").write_text("{}")
    gone = changed("gone", tokenizer_model="/no/folder")
    shutil.rmtree(gone / "tokenizer")  # as an older run, which has no copy
    cases = {
        str(changed("vanilla", attention_variant="vanilla")): "softmax_offset is not in the model",
        str(
            changed("wide", hidden_size=128, kv_channels=32)
        ): "does not match the model in config.json",
        str(gone): "the tokenizer /no/folder was not found",
        str(changed("null", tokenizer_type="NullTokenizer")): "pass a Hugging Face tokenizer",
        str(changed("small", padded_vocab_size=511)): "has 512 tokens, but the model has only 511",
        str(hostile): "untrusted: it refers to the code os.system",
        str(cut): "is damaged: __",
        str(broken): "is not the configuration of a megasink run",
    }
    run = str(pipeline_run)
    commands = [["generate", folder, "--prompt", "def "] for folder in cases]
    commands += [
        ["generate", run, "--prompt", "def " * 64],
        ["generate", run, "--prompt", "def ", "--max-new-tokens", "64"],
        ["generate", f"{tmp_path}/gone", "--prompt", "def ", "--tokenizer", text[-1]],
    ]
    phrases = [*cases.values(), "leaves no room in the 64 positions", "at most 6"]
    (answers,) = pool.run(f"{GENERATE}:megasink", SINGLE, commands=commands)
    assert not planted.exists()
    assert answers.pop()[0] == 0  # a tokenizer in place of the one that is gone
    for (code, output, errors), phrase in zip(answers, phrases, strict=True):
        assert (code, output) == (2, ""), errors
        assert errors.startswith("megasink: error: ")
        assert len(errors.splitlines()) == 1
        assert phrase in errors
