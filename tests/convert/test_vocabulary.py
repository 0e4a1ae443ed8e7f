"""A model whose vocabulary is no multiple of 128 has the loss of transformers everywhere.

433 rows, of which the tokenizer names 400: transformers counts them all, and none of the 79 that
pad them here.
"""

import json
import os
import shlex
import shutil
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megasink.checkpoints.load import LoadedModel
from megasink.checkpoints.run_tokenizer import tokenizer_of
from megasink.data.hf_tokenizer import id_count, load_tokenizer
from megasink.errors import UserError
from megasink.megatron.embedding_rows import counted_rows, with_tokens
from megasink.training.checks.vocabulary import pin_vocabulary
from tests.analysis.capture.tiny_models import save_with_tokenizer
from tests.distributed.layout import SINGLE
from tests.distributed.pool import free_port
from tests.runs import steps

TASKS = "tests.convert.vocabulary_tasks"
ROWS, TOKENS = 433, 400
STDLIB = Path(os.__file__).parent
TRAINING = shlex.split("""
    --finetune --seq-length 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 2
    --lr 1e-2 --eval-interval 1 --eval-iters 1 --split 60,20,20 --head-balance-coeff 0
    --no-save-optim --log-interval 1
""")


def megasink(pool, *commands):
    """Run command lines in a worker; all of them succeed."""
    argvs = [[str(word) for word in command] for command in commands]
    (answers,) = pool.run(f"{TASKS}:without_figures", SINGLE, commands=argvs)
    assert [(code, errors) for code, _, errors in answers if code] == []


@pytest.fixture(scope="module")
def folder(pool, tmp_path_factory):
    """llama: of transformers; run: the same imported; text: data of its tokenizer."""
    root = tmp_path_factory.mktemp("vocabulary")
    text = (STDLIB / "argparse.py").read_text()
    parts = [text[at : at + 1000] for at in range(0, 40_000, 1000)]
    hf = save_with_tokenizer(root, "llama", parts, TOKENS, vocab_size=ROWS)
    texts = root / "tokenizer-texts.jsonl"
    megasink(
        pool,
        ["data", texts, "--output", root / "text", "--tokenizer", hf],
        ["convert-from-hf", hf, "--output", root / "run"],
    )
    return root


@pytest.fixture(scope="module")
def seen(pool, folder):
    """By rank, every microbatch of two steps and of the evaluations."""
    flags = shlex.split((folder / "run" / "flags.txt").read_text())
    flags += [*TRAINING, "--data-path", str(folder / "text"), "--run-dir", str(folder / "tuned")]
    flags += ["--load", str(folder / "run" / "checkpoints")]
    return pool.run(f"{TASKS}:train_and_show", flags=flags, port=free_port())


def nats(model, batch):
    """[B, S] by transformers."""
    tokens, labels = (torch.from_numpy(batch[key]) for key in ("tokens", "labels"))
    with torch.no_grad():
        logits = model(tokens).logits
    return torch.nn.functional.cross_entropy(logits.mT, labels, reduction="none")


def test_training_starts_from_the_loss_of_transformers(seen, folder):
    model = AutoModelForCausalLM.from_pretrained(folder / "llama")
    assert len(model.lm_head.weight) == ROWS
    first = [next(batch for batch in rank if batch["training"]) for rank in seen]
    for batch in first:
        torch.testing.assert_close(
            torch.from_numpy(batch["nats"]), nats(model, batch), atol=1e-5, rtol=1e-5
        )
    mean = torch.stack([nats(model, batch) for batch in first]).mean()
    assert steps(folder / "tuned")[0]["lm_loss"] == pytest.approx(float(mean), rel=1e-5)


def test_evaluation_and_export_have_it_too(pool, seen, folder):
    megasink(pool, ["convert-to-hf", folder / "tuned", "--output", folder / "back"])
    model = AutoModelForCausalLM.from_pretrained(folder / "back")
    assert len(model.lm_head.weight) == ROWS
    for rank in seen:
        last = [batch for batch in rank if not batch["training"]][-1]
        torch.testing.assert_close(
            torch.from_numpy(last["nats"]), nats(model, last), atol=1e-5, rtol=1e-5
        )


def test_analyze_has_it_of_runs_and_of_folders(pool, seen, folder, tmp_path):
    results, numbers = {}, {}
    options = ["--data", folder / "tokenizer-texts.jsonl", "--seq-length", "32"]
    options += ["--max-samples", "8"]
    for name in ("run", "llama", "tuned", "back"):
        command = ["analyze", folder / name, *options, "--output", tmp_path / name]
        megasink(pool, command)
        results[name] = json.loads((tmp_path / name / "results.json").read_text())
        measured = results[name]["metrics"]
        numbers[name] = {metric: result["number"] for metric, result in measured.items()}
    for ours, theirs in (("run", "llama"), ("tuned", "back")):
        for key in ("nats_per_token", "bits_per_byte", "perplexity"):
            assert numbers[ours][key] == pytest.approx(numbers[theirs][key], rel=1e-5), (ours, key)
        assert results[ours]["model"]["parameters"] == results[theirs]["model"]["parameters"]
    assert numbers["run"]["nats_per_token"] != pytest.approx(numbers["tuned"]["nats_per_token"])


def test_evaluate_has_it_of_runs_and_of_folders(pool, folder, tmp_path):
    options = ["--tasks", "docstrings_perplexity", "--limit", "2"]
    found = []
    for name in ("run", "llama"):
        megasink(pool, ["evaluate", folder / name, *options, "--output", tmp_path / name])
        result = json.loads((tmp_path / name / "evaluation.json").read_text())
        metrics = result["tasks"]["docstrings_perplexity"]["metrics"]
        found.append({metric: score["value"] for metric, score in metrics.items()})
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_ids_above_a_hole_of_the_tokenizer_have_rows(folder, tmp_path):
    source = folder / "llama"
    shutil.copy(source / "tokenizer_config.json", tmp_path)
    state = json.loads((source / "tokenizer.json").read_text())
    state["model"]["vocab"] |= {max(state["model"]["vocab"], key=len): 700}
    (tmp_path / "tokenizer.json").write_text(json.dumps(state))
    tokenizer = load_tokenizer(tmp_path)
    assert len(tokenizer) < id_count(tokenizer) == 701
    args = Namespace(
        tokenizer_type="HuggingFaceTokenizer", tokenizer_model=str(tmp_path), vocab_size=None
    )
    args.sink_token, args.padded_vocab_size, args.load = True, None, None
    args.make_vocab_size_divisible_by, args.tensor_model_parallel_size = 128, 1
    pin_vocabulary(args)
    assert (args.vocab_size, args.sink_token_id, args.padded_vocab_size) == (701, 701, 768)
    assert counted_rows(vars(args)) == 702
    for kind in ("HuggingFaceTokenizer", "TikTokenizer"):
        args.tokenizer_type = kind
        assert LoadedModel(None, tokenizer, args, 1, {}).vocabulary == 701
    fewer = {"tokenizer_type": "HuggingFaceTokenizer", "vocab_size": 700, "padded_vocab_size": 768}
    with pytest.raises(UserError, match="has 701 tokens, but the model has only 700"):
        tokenizer_of(fewer, tmp_path, tmp_path / "config.json")


@pytest.mark.parametrize(
    ("arguments", "counted"),
    [
        ({"vocab_size": 400}, 400),
        ({"vocab_size": 400, "sink_token_id": 400}, 401),
        ({"vocab_size": 433, "sink_token_id": 400}, 433),  # imported, with rows to spare
        ({"vocab_size": 400, "tokenizer_type": "NullTokenizer"}, 400),
        ({"vocab_size": 400, "tokenizer_type": "TikTokenizer"}, 512),
        ({"vocab_size": None}, 512),  # of a run that is older: its tokenizer says it
        (with_tokens({"vocab_size": None, "tokenizer_type": "HuggingFaceTokenizer"}, 400), 400),
        ({"vocab_size": 600}, 512),
    ],
)
def test_rows_that_count(arguments, counted):
    run = {"padded_vocab_size": 512, "tokenizer_type": "HuggingFaceTokenizer"}
    assert counted_rows(run | arguments) == counted
