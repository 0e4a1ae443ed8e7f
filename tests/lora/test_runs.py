"""LoRA runs from start to export: their files, resuming, bases, peft in both directions."""

import json
import shlex
import shutil

import numpy as np
import pytest

from megasink.cli import main
from tests import runs
from tests.distributed.layout import SINGLE
from tests.distributed.pool import TaskFailed

TASKS = "tests.lora.tasks"
MODEL = [*runs.TINY, *runs.UNTIED, *runs.MOCK, "--attention-variant", "vanilla"]
MODEL += """
    --group-query-attention --num-query-groups 2 --init-method-std 0.2 --weight-decay 0.1
""".split()
LORA = """
    --lora-rank 4 --lora-alpha 6 --lr 1e-2 --head-balance-coeff 0.1 --head-balance-shared-heads 1
    --train-iters 4 --save-interval 2 --use-distributed-optimizer
""".split()
TP = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
PP = ["--pipeline-model-parallel-size", "2"]
COMPARED = ("lm_loss", "grad_norm", "balance_loss", "imbalance", "importance")


@pytest.fixture(scope="module")
def base(pool, tmp_path_factory):
    """A run of a whole model."""
    run = tmp_path_factory.mktemp("base") / "run"
    pool.train([*MODEL, "--train-iters", "2", "--save-interval", "2", "--run-dir", str(run)])
    return run


@pytest.fixture(scope="module")
def start(base):
    """Flags of a LoRA run of it."""
    return [*MODEL, *LORA, "--pretrained-checkpoint", str(base / "checkpoints")]


@pytest.fixture(scope="module")
def finished(pool, start, tmp_path_factory):
    """A LoRA run of four steps under TP=2."""
    run = tmp_path_factory.mktemp("lora") / "run"
    pool.train([*start, *TP, "--run-dir", str(run)], 2)
    return run


@pytest.fixture
def interrupted(finished, tmp_path):
    """The same run, as if it had been killed after step 3."""
    run = tmp_path / "run"
    shutil.copytree(finished, run)
    shutil.rmtree(run / "checkpoints/iter_0000004")
    (run / "checkpoints/latest_checkpointed_iteration.txt").write_text("2")
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:3]))
    return run


def weights_bytes(run):
    return sum(path.stat().st_size for path in (run / "checkpoints").rglob("*.distcp"))


def test_a_checkpoint_holds_the_adapter_alone(pool, base, finished):
    ((keys),) = pool.run(f"{TASKS}:stored_keys", SINGLE, run=str(finished))
    weights = [key for key in keys if ".head_counter." not in key]
    assert len(weights) == 14
    assert all(".lora." in key for key in weights)
    assert weights_bytes(finished) / 2 < 0.5 * weights_bytes(base)
    recorded = json.loads((finished / "config.json").read_text())["lora_base"]
    assert recorded["checkpoint"] == str(base.resolve() / "checkpoints/iter_0000002")
    assert len(recorded["fingerprint"]) == 64


def test_the_same_layout_resumes_to_the_bit_and_another_within_rounding(
    pool, start, finished, interrupted, tmp_path
):
    other = shutil.copytree(interrupted, tmp_path / "other")
    pool.train([*start, *TP, "--run-dir", str(interrupted), "--resume"], 2)
    pool.train([*start, *PP, "--run-dir", str(other), "--resume"], 2)
    before, after, elsewhere = (runs.steps(run) for run in (finished, interrupted, other))
    assert [line["iteration"] for line in after] == [1, 2, 3, 4]
    for line, again in zip(before, after, strict=True):
        assert {key: again[key] for key in COMPARED} == {key: line[key] for key in COMPARED}
    for line, again in zip(before[2:], elsewhere[2:], strict=True):
        assert again["lm_loss"] == pytest.approx(line["lm_loss"], rel=1e-5)
        assert again["grad_norm"] == pytest.approx(line["grad_norm"], rel=1e-4)
    assert len({line["lm_loss"] for line in before}) == 4


def test_merged_and_unmerged_logits_are_equal(pool, finished):
    (found,) = pool.run(f"{TASKS}:logits_of", SINGLE, run=str(finished))
    scale = np.abs(found["merged"]).max()
    np.testing.assert_allclose(found["unmerged"], found["merged"], atol=1e-5 * scale, rtol=0)
    assert np.abs(found["unmerged"] - found["base"]).max() > 1e-3 * scale


def test_what_does_not_fit_is_refused_in_one_line(pool, start, base, finished, tmp_path):
    def refusal(*flags):
        with pytest.raises(TaskFailed) as refused:
            pool.train([*start, *flags, "--run-dir", str(tmp_path / "new")])
        return str(refused.value)

    other = tmp_path / "other"
    flags = ["--train-iters", "1", "--seed", "7", "--save-interval", "1", "--run-dir", str(other)]
    pool.train([*MODEL, *flags])
    of_other = ["--pretrained-checkpoint", str(other)]
    adapter = ["--load", str(finished / "checkpoints"), "--finetune"]
    assert "is an adapter of another base" in refusal(*of_other, *adapter)
    assert "is another adapter: lora_rank 4 -> 2" in refusal(*adapter, "--lora-rank", "2")
    whole = ["--load", str(base / "checkpoints"), "--finetune"]
    assert "is a whole model: give the base of a LoRA run with" in refusal(*whole)
    assert "is a LoRA run, whose checkpoints hold an adapter alone" in refusal(
        "--pretrained-checkpoint", str(finished)
    )
    assert "different model: hidden_size 64 -> 32" in refusal("--hidden-size", "32")
    assert not (tmp_path / "new").exists()
    with pytest.raises(TaskFailed, match="holds an adapter alone: add --lora-rank"):
        pool.train([*MODEL, "--train-iters", "1", *adapter, "--run-dir", str(tmp_path / "new")])
    resumed = shutil.copytree(finished, tmp_path / "resumed")
    with pytest.raises(TaskFailed, match="has an adapter of another base"):
        pool.train([*start, *of_other, "--run-dir", str(resumed), "--resume"])


def test_a_base_that_has_changed_is_refused(pool, finished, base, tmp_path):
    run = shutil.copytree(finished, tmp_path / "run")
    config = json.loads((run / "config.json").read_text())
    config["lora_base"]["fingerprint"] = "0" * 64
    (run / "config.json").write_text(json.dumps(config))
    convert = ["convert-to-hf", str(run), str(tmp_path / "hf")]
    ((code, _, said),) = pool.run(
        "tests.training.generate_tasks:megasink", SINGLE, commands=[convert]
    )[0]
    assert code == 2
    assert "are not those that the adapter was trained on: put the base back" in said
    config["lora_base"]["checkpoint"] = str(tmp_path / "gone")
    (run / "config.json").write_text(json.dumps(config))
    ((code, _, said),) = pool.run(
        "tests.training.generate_tasks:megasink", SINGLE, commands=[convert]
    )[0]
    assert (code, "is gone: put it back" in said) == (2, True)


@pytest.fixture(scope="module")
def exported(pool, base, finished, tmp_path_factory):
    """The base and the merged model for transformers, the adapter for peft, and it imported."""
    folder = tmp_path_factory.mktemp("exported")
    commands = [
        ["convert-to-hf", base, folder / "base", "--no-verify"],
        ["convert-to-hf", finished, folder / "merged"],
        ["convert-to-hf", finished, folder / "adapter", "--adapter"],
        ["convert-from-hf", folder / "adapter", folder / "back", "--base", base],
    ]
    commands = [[str(word) for word in command] for command in commands]
    (answers,) = pool.run("tests.training.generate_tasks:megasink", SINGLE, commands=commands)
    for code, _, errors in answers:
        assert (code, errors) == (0, "")
    assert "float32: logits differ by" in answers[1][1]
    assert "verified: 14 merged weights" in answers[2][1]
    return folder


def test_peft_computes_the_same_from_the_exported_adapter(pool, finished, exported):
    folders = {
        "base_hf": str(exported / "base"),
        "merged_hf": str(exported / "merged"),
        "adapter": str(exported / "adapter"),
    }
    (found,) = pool.run(f"{TASKS}:against_peft", SINGLE, run=str(finished), **folders)
    logits = found["logits"]
    for name in ("merged", "megatron"):
        np.testing.assert_allclose(logits[name], logits["peft"], atol=1e-5 * 8, rtol=0)
    assert found["loss"]["megatron"] == pytest.approx(found["loss"]["peft"], rel=1e-6)
    assert len(found["gradients"]) == 28
    for name, (ours, theirs) in found["gradients"].items():
        size = np.linalg.norm(theirs)
        assert size > 0, name
        assert np.linalg.norm(ours - theirs) <= 1e-4 * size, name


def test_an_adapter_comes_back_to_the_bit_and_trains_on(pool, finished, exported, tmp_path):
    before, after = (
        pool.run(f"{TASKS}:adapter_tensors", SINGLE, run=str(run))[0]
        for run in (finished, exported / "back")
    )
    assert before.keys() == after.keys()
    for key, tensor in before.items():
        np.testing.assert_array_equal(tensor, after[key])
    flags = shlex.split((exported / "back/flags.txt").read_text())
    training = [*runs.MOCK, *"--micro-batch-size 2 --global-batch-size 4 --lr 1e-3".split()]
    training += ["--seq-length", "32", "--train-iters", "1", "--log-interval", "1"]
    load = ["--load", str(exported / "back/checkpoints"), "--finetune"]
    losses = []
    for name, more in (("on", load), ("new", [])):
        pool.train([*flags, *training, *more, "--run-dir", str(tmp_path / name)])
        (line,) = runs.steps(tmp_path / name)
        losses.append(line["lm_loss"])
    assert losses[0] != losses[1]  # of the adapted model, and of the base


@pytest.mark.parametrize(
    ("change", "phrase"),
    [
        ({"use_dora": True}, "use_dora True (not False)"),
        ({"bias": "all"}, "bias 'all' (not 'none')"),
        ({"r": 8}, "but its rank is 8"),
        ({"lora_alpha": None}, "lora_alpha None"),
    ],
)
def test_what_peft_can_and_megasink_cannot_is_refused(
    pool, base, exported, tmp_path, change, phrase
):
    folder = shutil.copytree(exported / "adapter", tmp_path / "adapter")
    config = json.loads((folder / "adapter_config.json").read_text()) | change
    (folder / "adapter_config.json").write_text(json.dumps(config))
    command = ["convert-from-hf", folder, tmp_path / "run", "--base", base]
    (answers,) = pool.run(
        "tests.training.generate_tasks:megasink",
        SINGLE,
        commands=[[str(word) for word in command]],
    )
    ((code, _, said),) = answers
    assert code == 2
    assert phrase in said
    assert not (tmp_path / "run").exists()


def test_an_adapter_without_its_base_is_refused(exported, tmp_path, capsys):
    assert main(["convert-from-hf", str(exported / "adapter"), str(tmp_path / "run")]) == 2
    assert "an adapter of peft: give the run of the model" in capsys.readouterr().err
