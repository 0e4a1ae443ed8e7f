"""`megasink finetune`: a model of transformers, adapted on conversations and exported again."""

import csv
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megasink.analysis.analysis_folder import read_analysis
from megasink.balance.shared_heads import choose_shared_heads
from megasink.cli import main
from megasink.finetune import sft_training as finetune
from megasink.finetune.chats import IGNORED, ChatTokenizer
from megasink.finetune.options import FinetuneOptions
from tests.balance import definition
from tests.chats import MARKED
from tests.distributed.pool import free_port
from tests.finetune.commands import COEFF, command, ended


@pytest.fixture(scope="module")
def made(root):
    """The folder of a finished command."""
    assert main(command(root)) == 0
    return root / "out"


def begun(root, made, name, **changes):
    """A folder of the same settings, but for some, whose analyses alone are done."""
    (root / name).mkdir()
    for done in ("before", "after"):
        shutil.copytree(made / done, root / name / done)
    settings = json.loads((made / "settings.json").read_text())
    settings["settings"] |= changes
    (root / name / "settings.json").write_text(json.dumps(settings))
    return root / name


def state_of(folder):
    return json.loads((folder / "run" / "trainer_state.json").read_text())


def steps_of(folder):
    return [log for log in state_of(folder)["log_history"] if "loss" in log]


def test_the_model_is_trained_and_exported(root, made):
    state, steps = state_of(made), steps_of(made)
    assert len(steps) == state["max_steps"] > 3
    assert state["epoch"] == 1
    assert state["log_history"][-1]["eval_loss"] > 0
    assert np.mean([log["loss"] for log in steps[-2:]]) < steps[0]["loss"] - 0.2
    models = [AutoModelForCausalLM.from_pretrained(f) for f in (root / "model", made / "model")]
    assert {model.dtype for model in models} == {torch.bfloat16}
    ids = torch.arange(2, 40)[None]
    old, new = (model.eval()(ids).logits for model in models)
    assert (old - new).abs().max() > 0.1
    for name in ("q_proj", "o_proj"):
        weights = [getattr(m.model.layers[0].self_attn, name).weight for m in models]
        assert not torch.equal(*weights), name
    assert torch.equal(*(model.lm_head.weight for model in models))  # no target of LoRA
    assert AutoTokenizer.from_pretrained(made / "model").chat_template == MARKED
    assert (made / "importance.png").read_bytes().startswith(b"\x89PNG")
    assert not (made / "partial").exists()


def test_eq_8_shares_as_many_heads_as_the_rule_says(made):
    """The last step's loss is that of the definition over the importance that is written."""
    m = choose_shared_heads(read_analysis(made / "before").values("importance")).m
    assert m > 0
    with (made / "run" / "head_importance.csv").open() as file:
        rows = list(csv.DictReader(file))
    importance_LH = torch.tensor([float(row["importance"]) for row in rows]).reshape(2, 4).double()
    shared_LH = np.array([row["shared"] == "1" for row in rows]).reshape(2, 4)
    assert shared_LH.sum(1).tolist() == [m, m]
    routed = [list(np.flatnonzero(~shared_H)) for shared_H in shared_LH]
    expected = float(definition.balance_loss(importance_LH, COEFF, routed))
    assert steps_of(made)[-1]["balance_loss"] == pytest.approx(expected, rel=1e-5)


def test_the_card_says_how_the_model_was_made(made):
    card = ModelCard.load(made / "model" / "README.md")
    assert (card.data.license, card.data.library_name) == ("apache-2.0", "transformers")
    rows = dict(re.findall(r"^\| (.+) \| (.+) \|$", card.content, re.M))
    analyses = [read_analysis(made / name) for name in ("before", "after")]
    imbalance = [f"{np.nanmean(a.values('imbalance')):.4f}" for a in analyses]
    assert rows["head imbalance, before and after"] == ", ".join(imbalance)
    loss = state_of(made)["log_history"][-1]["eval_loss"]
    assert rows["held-out loss after training"] == f"{loss:.4f} nats per token"
    m = choose_shared_heads(analyses[0].values("importance")).m
    assert rows["heads balanced"].startswith(f"Eq. 8, all but the {m} most important")
    assert rows["head-balance coefficient"] == "1"
    assert rows["base model"] == "model"


def test_importance_is_measured_on_the_same_texts(made):
    analyses = [read_analysis(made / name) for name in ("before", "after")]
    tokens = [np.load(made / name / "samples.npz")["tokens"] for name in ("before", "after")]
    assert np.array_equal(*tokens)
    assert not np.allclose(*(a.values("importance") for a in analyses), atol=1e-4)


def test_a_repeated_command_trains_nothing(root, made, capsys):
    before = {p: p.stat().st_mtime_ns for p in (made / "run").rglob("*") if p.is_file()}
    assert main(command(root)) == 0
    assert {p: p.stat().st_mtime_ns for p in (made / "run").rglob("*") if p.is_file()} == before
    assert "training" not in capsys.readouterr().err


def test_the_adapter_is_that_of_the_merged_model(root, made):
    """And with all weights trained there is none."""
    from peft import PeftModel

    folder = begun(root, made, "adapted", adapter=True)
    assert main(command(root, "--adapter", out="adapted")) == 0
    assert not (folder / "model").exists()
    assert ModelCard.load(folder / "adapter" / "README.md").data.library_name == "peft"
    base = AutoModelForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
    model = finetune.merged(base, folder / "adapter")
    assert not isinstance(model, PeftModel)
    merged = AutoModelForCausalLM.from_pretrained(made / "model").state_dict()
    for name, value in model.bfloat16().state_dict().items():
        assert torch.equal(value, merged[name]), name


@pytest.fixture(scope="module")
def options(root):
    """Of all weights and Eq. 7, for what needs no command."""
    return FinetuneOptions(
        model=root / "model",
        data=(root / "chats.jsonl",),
        full=True,
        head_balance_coeff=COEFF,
        shared_heads=0,
        seq_length=128,
        micro_batch_size=2,
        global_batch_size=4,
    )


def trainer_of(options, folder, shared=0):
    """A trainer of the options, and the conversations that are held out."""
    chats = ChatTokenizer(options.model)
    trained, held_out, _ = finetune.tokenized(options, chats, folder / "partial")
    config = finetune.arguments(options, folder / "run")
    return finetune.make_trainer(options, config, chats.tokenizer, trained, shared), held_out


def test_eq_7_balances_all_heads_of_all_weights(options, tmp_path):
    trainer, held_out = trainer_of(options, tmp_path)
    trainer.args.max_steps = 2
    start = trainer.model.model.layers[0].self_attn.q_proj.weight.detach().clone()
    finetune.train(trainer, held_out)
    (balance,) = (c for c in trainer.callback_handler.callbacks if hasattr(c, "importance_LH"))
    every = [list(range(4))] * 2
    expected = float(definition.balance_loss(balance.importance_LH, COEFF, every))
    logs = [log for log in trainer.state.log_history if "loss" in log]
    assert logs[-1]["balance_loss"] == pytest.approx(expected, rel=1e-5)
    assert not torch.equal(trainer.model.model.layers[0].self_attn.q_proj.weight, start)


def test_packed_conversations_do_not_see_each_other(options, tmp_path):
    """A row's loss is that of its conversations, each by itself."""
    trainer, _ = trainer_of(options, tmp_path)
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[0] == 1  # without padding
    (starts,) = (batch["position_ids"][0] == 0).nonzero(as_tuple=True)
    assert len(starts) > 2  # more than one to a row
    model = trainer.model.eval()
    told = (batch["labels"] != IGNORED).sum()
    whole = model(**batch).loss * told
    parts = zip(*(t[0].tensor_split(starts[1:].tolist()) for t in batch_of(batch)), strict=True)
    alone = 0.0
    for ids, labels in parts:
        count = (labels[1:] != IGNORED).sum()
        alone += model(input_ids=ids[None], labels=labels[None]).loss * count
    assert float(whole) == pytest.approx(float(alone), rel=1e-5)


def batch_of(batch):
    return batch["input_ids"], batch["labels"]


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (["--shared-heads", "3"], ["--shared-heads 3: the layers have 4 heads"]),
        (["--shared-heads", "two"], ["--shared-heads", "'two' is neither a whole number nor auto"]),
        (["--lora-rank", "0", "--epochs", "0"], ["--lora-rank 0: use 1 or more", "--epochs 0"]),
        (["--full", "--adapter"], ["--adapter exports LoRA adapters, which --full"]),
        (["--data", "none.jsonl"], ["--data none.jsonl: no such file"]),
        (["--data", "."], ["--data .: a folder: give its files"]),
        (["--lora-rang", "3"], ["unknown: --lora-rang 3: did you mean --lora-rank?"]),
        (["--head-balance-coeff", "-1"], ["--head-balance-coeff -1: use 0 or more"]),
        (["--seq-length", "0"], ["--seq-length 0: use 1 or more"]),
        (["--seq-length", "129"], ["--seq-length 129: give at most 128, the model's positions"]),
        (["--micro-batch-size", "3"], ["--global-batch-size 4 is not divisible by --micro-batch-"]),
        (["--lora-alpha", "nan"], ["--lora-alpha nan: use a number above 0"]),
    ],
)
def test_bad_input_is_told_before_anything_is_made(root, capsys, flags, problems):
    assert main(command(root, *flags, out="refused")) == 2
    said = capsys.readouterr().err
    for problem in problems:
        assert problem in said
    assert not (root / "refused").exists()


def test_the_default_length_is_at_most_that_of_the_model(options):
    assert replace(options, seq_length=None).length == 128
    assert replace(options, seq_length=64).length == 64


def test_the_help_shows_the_coefficient(capsys):
    with pytest.raises(SystemExit) as ended_with:
        main(["finetune", "--help"])
    assert ended_with.value.code == 0
    assert "--head-balance-coeff" in capsys.readouterr().out


def test_a_folder_of_something_else_is_left_alone(root, made, capsys):
    assert main([*command(root), "--epochs", "2"]) == 2
    assert "results of other settings (epochs 1.0 -> 2.0)" in capsys.readouterr().err
    (root / "taken").mkdir()
    (root / "taken" / "file").touch()
    assert main(command(root, out="taken")) == 2
    assert "taken contains file, which is not" in capsys.readouterr().err
    assert [path.name for path in (root / "taken").iterdir()] == ["file"]


def on_two(root, *words, program="hidden.py", **variables):
    """A command on two processes, by default without Megatron, and what it said."""
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    return ended([*torchrun, Path(__file__).with_name(program), *words], root, **variables)


def test_two_processes_equal_one(root, made):
    """Also where Megatron cannot be imported; and they end."""
    folder = begun(root, made, "two", micro_batch_size=1, processes=2)
    code, said = on_two(root, *command(root, "--micro-batch-size", "1", out="two"))
    assert code == 0, said
    losses_are_equal(made, folder)
    assert (folder / "model" / "model.safetensors").is_file()


def losses_are_equal(one, two, factor=1):
    """Of one process and of two, within `factor` of the rounding of float32."""
    for name, error in (("loss", 1e-4), ("balance_loss", 5e-3), ("head_imbalance", 1e-3)):
        # The last step has too few samples for all processes, some of which are repeated.
        values = [[log[name] for log in steps_of(folder)[:-1]] for folder in (one, two)]
        assert values[1] == pytest.approx(values[0], rel=factor * error), name
    evals = [state_of(f)["log_history"][-1]["eval_loss"] for f in (one, two)]
    assert evals[1] == pytest.approx(evals[0], rel=factor * 1e-3)


FSDP = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP",
}


@pytest.mark.later
@pytest.mark.parametrize("flags", [[], ["--full", "--bf16"]], ids=["lora", "full"])
def test_fsdp2_equals_one_process(root, made, flags):
    """The weights that are exported are whole, and those of one process; also after a resume."""
    one, changes = made, {flag[2:]: True for flag in flags}
    if flags:
        one = begun(root, made, "one-full", **changes)
        assert main(command(root, *flags, out=one.name)) == 0
    folder = begun(root, made, f"fsdp-{len(flags)}", micro_batch_size=1, processes=2, **changes)
    words = command(root, "--micro-batch-size", "1", *flags, out=folder.name)
    for _ in range(2):
        code, said = on_two(root, *words, program="sharded.py", **FSDP)
        assert code == 0, said
        losses_are_equal(one, folder, factor=100 if flags else 1)
        weights_are_alike(root, one, folder)
        older, newest = sorted(folder.glob("run/checkpoint-*"), key=os.path.getmtime)
        assert [*older.glob("pytorch_model_fsdp_*")]  # written by FSDP
        shutil.rmtree(newest)
        shutil.rmtree(folder / "model")


def weights_are_alike(root, one, folder):
    """Of two exports, by how far training has moved them."""
    old, alone, sharded = (
        load_file(f / "model.safetensors")
        for f in (root / "model", one / "model", folder / "model")
    )
    assert old.keys() == alone.keys() == sharded.keys()
    moved = [(alone[n] - old[n]).float().norm() for n in old]
    apart = [(alone[n] - sharded[n]).float().norm() for n in old]
    assert sum(moved) > 0
    assert sum(apart) < 0.2 * sum(moved)


@pytest.mark.parametrize(("version", "told"), [("1", "for FSDP 1: set"), ("2", "FSDP for NO")])
def test_fsdp_that_would_be_ignored_is_refused(root, capsys, monkeypatch, version, told):
    for name, value in (FSDP | {"FSDP_VERSION": version}).items():
        monkeypatch.setenv(name, value)
    assert main(command(root, out="refused")) == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--full", "--adapter"], "--adapter exports LoRA adapters, which --full"),
        (
            [],
            "OUT has results of other settings (micro_batch_size 2 -> 1; processes 1 -> 2)",
        ),
    ],
    ids=["before they meet", "of the first one"],
)
def test_two_processes_tell_an_error_once(root, made, flags, told):
    code, said = on_two(root, *command(root, "--micro-batch-size", "1", *flags, out="out"))
    assert code == 1  # torchrun's
    assert said.count("megasink: error: ") == 1
    assert told.replace("OUT", str(made)) in said
    assert "[rank1]" not in said
