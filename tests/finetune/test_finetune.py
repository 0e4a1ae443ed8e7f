"""`megasink finetune`: a model of transformers, adapted on conversations and exported again."""

import json
import re

import numpy as np
import pytest
import torch

from megasink.analysis.folder import read_analysis
from megasink.balance.shared_heads import choose_shared_heads
from megasink.cli import main
from megasink.data.corpus import Document
from megasink.data.tokenizer import train_tokenizer
from megasink.finetune import recipe
from tests.chats import UNMARKED, chat_tokenizer, conversations, write_chats
from tests.forkserver import server
from tests.runs import steps

SHAPE = (
    "--seq-length 48 --global-batch-size 4 --micro-batch-size 2 --lr 1e-3 --head-balance-coeff 1"
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """model: a Qwen3 whose heads differ; chats.jsonl; out: what the command makes of them."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    root = tmp_path_factory.mktemp("finetune")
    text = [Document(f"{chat}", "chats") for chat in conversations(60, seed=1)]
    train_tokenizer(text, 320, root / "tokenizer")
    chat_tokenizer(root / "tokenizer", root / "model", UNMARKED)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=322,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    model = Qwen3ForCausalLM(config)
    model.save_pretrained(root / "model")
    write_chats(root / "chats.jsonl", conversations(50))
    return root


def command(root, *flags, out="out"):
    words = f"finetune {root}/model --data {root}/chats.jsonl --output {root}/{out} {SHAPE}"
    return [*words.split(), *flags]


@pytest.fixture(scope="module")
def made(root):
    """What the command printed, and then the same command again."""
    said = []
    for _ in range(2):
        done = server().run(["megasink", *command(root)], tree=True)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
        said.append(done.stdout)
    return root / "out", said


def test_the_model_is_trained_with_the_chosen_heads_and_exported(root, made):
    from transformers import AutoModelForCausalLM

    out, (first, _) = made
    told = json.loads((out / "run" / "config.json").read_text())["arguments"]
    before = read_analysis(out / "before").values("importance")
    assert told["head_balance_shared_heads"] == choose_shared_heads(before).m
    assert choose_shared_heads(before).describe().splitlines()[0] in first
    assert (told["lora_rank"], told["head_balance_coeff"], told["lr"]) == (16, 1.0, 1e-3)
    assert len(steps(out / "run")) == told["train_iters"]
    models = [AutoModelForCausalLM.from_pretrained(f) for f in (root / "model", out / "model")]
    ids = torch.arange(2, 40)[None]
    old, new = (model.eval()(ids).logits for model in models)
    assert (old - new).abs().max() > 1e-2  # it has learned something
    assert not torch.equal(*(model.model.layers[0].self_attn.q_proj.weight for model in models))
    assert torch.equal(*(model.lm_head.weight for model in models))  # no target of LoRA
    assert (out / "importance.png").read_bytes().startswith(b"\x89PNG")
    assert "head imbalance" in first


def test_a_repeated_command_runs_nothing_again(made):
    _, (first, again) = made
    assert "done before" not in first
    assert again.count("done before") == 6
    assert len(re.findall(r"^\d\. .*: megasink ", first, re.M)) == 6
    assert not re.findall(r"^\d\. .*: megasink ", again, re.M)


def test_importance_is_measured_on_held_out_conversations(made):
    out, _ = made
    for name in ("before", "after"):
        results = read_analysis(out / name).results
        assert results.run.seq_length == 48
    analyses = [read_analysis(out / name) for name in ("before", "after")]
    tokens = [np.load(out / name / "samples.npz")["tokens"] for name in ("before", "after")]
    assert np.array_equal(*tokens)
    assert not np.allclose(*(a.values("importance") for a in analyses), atol=1e-6)


@pytest.mark.parametrize(
    ("flags", "problems"),
    [
        (["--shared-heads", "3"], ["--shared-heads 3: the layers have 4 heads"]),
        (["--shared-heads", "two"], ["--shared-heads two: a whole number from 0 on, or auto"]),
        (["--lora-rank", "0", "--epochs", "0"], ["--lora-rank 0: use 1 or more", "--epochs 0"]),
        (["--full", "--adapter"], ["--adapter exports what LoRA trained"]),
        (["--data", "none.jsonl"], ["--data none.jsonl: no such file"]),
        (["--lora-rang", "3"], ["unknown: --lora-rang 3: did you mean --lora-rank?"]),
        (["--head-balance-coeff", "-1"], ["--head-balance-coeff -1: a number from 0 on"]),
        (["--seq-length", "0"], ["--seq-length 0: use 1 or more"]),
    ],
)
def test_bad_input_is_told_before_anything_is_made(root, capsys, flags, problems):
    assert main(command(root, *flags, out="refused")) == 2
    said = capsys.readouterr().err
    for problem in problems:
        assert problem in said
    assert not (root / "refused").exists()


def test_a_folder_of_something_else_is_left_alone(root, made, capsys):
    assert main([*command(root), "--epochs", "2"]) == 2
    assert "other settings (epochs 1.0 -> 2.0)" in capsys.readouterr().err
    (root / "taken").mkdir()
    (root / "taken" / "file").touch()
    assert main(command(root, out="taken")) == 2
    assert "is not empty" in capsys.readouterr().err


def test_flags_of_a_file_count_as_those_of_the_command_line(root, tmp_path, monkeypatch):
    taken = []

    def no_steps(args, further, console):
        taken.append((args, further))
        return []

    monkeypatch.setattr(recipe, "recipe", no_steps)
    monkeypatch.setattr(recipe, "summary", lambda args: [])
    (tmp_path / "flags.toml").write_text("lr = 3e-3\nbf16 = true\nseq-length = 96\n")
    words = f"--data {root}/chats.jsonl --output {tmp_path}/out --seq-length 80".split()
    config = ["--config", str(tmp_path / "flags.toml")]
    assert main(["finetune", f"{root}/model", *words, *config]) == 0
    ((args, further),) = taken
    assert (args.lr, args.seq_length) == (3e-3, 80)
    assert "--bf16" in further
