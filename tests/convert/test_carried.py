"""What a Hugging Face folder says beside its model comes back after training, or is named."""

import json
import shlex
import shutil
from argparse import Namespace
from pathlib import Path

import pytest

from megasink.checkpoints import hf_entries as of_run
from megasink.convert.hf_config import architecture_from, config_of
from megasink.convert.kept_config_entries import kept, left_behind, written_again
from megasink.convert.safetensors_files import write_json
from megasink.convert.targets import TARGETS
from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import load_tokenizer, tokenizer_hash, train_tokenizer
from tests.convert.published import RELEASED
from tests.convert.test_commands import STDLIB, TASKS, megasink
from tests.convert.tiny import model
from tests.distributed.layout import SINGLE

ENDS = [1, 322]
SAID = {"eos_token_id": ENDS, "bos_token_id": 4, "pad_token_id": None, "attention_dropout": 0.1}
SAID |= {"pretraining_tp": 1, "use_cache": False, "_a_key_of_ones_own": {"x": [1, None]}}
SAMPLING = {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "bos_token_id": 4}
SAMPLING |= {"eos_token_id": ENDS, "transformers_version": "4.45.0"}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def read(path):
    return json.loads(Path(path).read_text())


@pytest.fixture(scope="module")
def chat(pool, tmp_path_factory):
    """A folder of a Llama for chats: two tokens end an answer, and it has two templates."""
    folder = tmp_path_factory.mktemp("chat")
    tokenizer, run, hf = (folder / name for name in ("tokenizer", "run", "hf"))
    train_tokenizer([Document((STDLIB / "argparse.py").read_text(), "test")], 400, tokenizer)
    (tokenizer / "additional_chat_templates").mkdir()
    (tokenizer / "chat_template.jinja").write_text(TEMPLATE)
    (tokenizer / "additional_chat_templates" / "tools.jinja").write_text("tools " + TEMPLATE)
    where = {"folder": str(run), "name": "plain-text", "tokenizer": str(tokenizer)}
    pool.run(f"{TASKS}:save_run", SINGLE, **where)
    pool.run(f"{TASKS}:export_only", SINGLE, run=str(run), output=str(hf))
    config = read(hf / "config.json")
    write_json(hf / "config.json", config | SAID | {"auto_map": {"AutoConfig": "evil.Config"}})
    write_json(hf / "generation_config.json", SAMPLING)
    (hf / "LICENSE").write_text("ours")
    return hf


def test_after_training_a_folder_says_what_it_said(pool, chat, tmp_path):
    base, run, longer, again = (tmp_path / name for name in ("base", "run", "longer", "again"))
    ((code, said, errors),) = megasink(
        pool, ["convert-from-hf", chat, "--output", base, "--no-verify"]
    )
    assert (code, errors) == (0, "")
    assert "kept for the next export: " in said
    assert "will not be exported: LICENSE" in said
    flags = shlex.split((base / "flags.txt").read_text())
    flags += shlex.split(
        "--mock-data --seq-length 32 --micro-batch-size 2 --train-iters 1 --lr 1e-3 --num-workers 0"
        " --eval-iters 1 --eval-interval 100"
    )
    start = ["--load", str(base / "checkpoints"), "--finetune"]
    pool.train([*flags, *start, "--run-dir", str(run)])
    shutil.rmtree(base / "checkpoints")
    pool.train([*flags, *start, "--run-dir", str(run), "--resume"])
    start[1] = str(run / "checkpoints")
    pool.train([*flags, *start, "--run-dir", str(longer)])
    ((code, said, errors),) = megasink(
        pool, ["convert-to-hf", longer, "--output", again, "--device", "cpu"]
    )
    assert (code, errors) == (0, "")
    assert "not written again" not in said
    before, after = read(chat / "config.json"), read(again / "config.json")
    del before["auto_map"]
    assert after == before
    assert read(again / "generation_config.json") == SAMPLING
    files = ("tokenizer_config.json", "additional_chat_templates/tools.jinja")
    for name in (*files, "tokenizer.json", "chat_template.jinja"):
        assert (again / name).read_text() == (chat / name).read_text()


def test_another_architecture_or_tokenizer_keeps_what_it_has_a_place_for(chat):
    llama = TARGETS["llama"]
    architecture, target = architecture_from(read(chat / "config.json"))
    assert target is llama
    carried = kept(chat, architecture, llama, "of these tokens")
    special = {"bos_token_id": None, "eos_token_id": 1, "pad_token_id": 2}
    gated = config_of(model(attention="headwise"), TARGETS["megasink"], special)
    config, generation, lost = written_again(carried, gated, "of these tokens")
    assert lost == ["_a_key_of_ones_own", "pretraining_tp"]
    assert {key: config[key] for key in ("eos_token_id", "attention_dropout", "use_cache")} == {
        "eos_token_id": ENDS,
        "attention_dropout": 0.1,
        "use_cache": False,
    }
    assert generation == SAMPLING
    ours = config_of(model(), llama, special)
    config, generation, lost = written_again(carried, ours, "of others")
    assert lost == ["bos_token_id", "eos_token_id", "pad_token_id"]
    assert {key: config[key] for key in special} == special
    wanted = {key: value for key, value in SAMPLING.items() if key not in special} | special
    assert generation == wanted
    # Without a folder that it came from.
    assert written_again({}, ours, None) == (ours, {"_from_model_config": True, **special}, [])


def test_a_run_cannot_say_what_a_model_is_or_which_code_runs():
    ours = config_of(model(), TARGETS["llama"], {})
    for entries in ([1], {"auto_map": {}, "hidden_size": 1, "attn_implementation": "x/y"}):
        carried = {"model_type": "llama", "tokenizer": None, "config": entries}
        assert written_again(carried, ours, None)[0] == ours


@pytest.mark.parametrize("name", RELEASED)
def test_a_released_config_loses_nothing(name, tmp_path):
    """Each key is decided by the model, kept, or about the file alone."""
    config = RELEASED[name][0]
    write_json(tmp_path / "config.json", config)
    architecture, target = architecture_from(config)
    carried = kept(tmp_path, architecture, target, None)
    ours = config_of(architecture, target, {})
    again, _, lost = written_again(carried, ours, None)
    assert lost == []
    renamed = {"torch_dtype", "rope_scaling"}
    if target.name == "gpt_oss":
        renamed.add("rope_parameters")  # YaRN of factor 1, which older engines read as no scaling
    different = {
        key: again[key]
        for key, value in config.items()
        if key not in renamed and value is not None and again[key] != value
    }
    assert different == {}
    assert architecture_from(again)[0] == architecture
    assert list(left_behind(tmp_path)) == []


@pytest.mark.parametrize("name", ["Mixtral-8x7B-v0.1", "Qwen3-30B-A3B"])
def test_the_coefficient_of_the_routers_loss_comes_back(name, tmp_path):
    config = RELEASED[name][0] | {"router_aux_loss_coef": 0.017}
    write_json(tmp_path / "config.json", config)
    architecture, target = architecture_from(config)
    carried = kept(tmp_path, architecture, target, None)
    for other in (target, TARGETS["megasink"]):
        again, _, lost = written_again(carried, config_of(architecture, other, {}), None)
        assert again["router_aux_loss_coef"] == 0.017
        assert "router_aux_loss_coef" not in lost


def test_a_run_of_a_chat_model_ends_its_answers_where_the_folder_did(chat, tmp_path):
    tokenizer = load_tokenizer(chat)
    for tokens, ends in ((tokenizer_hash(tokenizer), {1, 322}), ("of others", {1})):
        architecture, target = architecture_from(read(chat / "config.json"))
        write_json(tmp_path / "config.json", {of_run.KEY: kept(chat, architecture, target, tokens)})
        generation = of_run.generation_of(tmp_path / "config.json", tokenizer)
        assert set(generation["eos_token_id"]) == ends
    assert of_run.generation_of(tmp_path / "missing.json", tokenizer) == {"eos_token_id": [1]}


def test_a_run_takes_over_what_its_start_keeps(tmp_path):
    entry = {of_run.KEY: {"model_type": "llama"}}
    for name, content in (("base", entry), ("other", {})):
        (tmp_path / name).mkdir()
        write_json(tmp_path / name / "config.json", content)
    run = tmp_path / "other"

    def taken(resumed=False, **given):
        options = {"load": None, "pretrained_checkpoint": None} | given
        return of_run.entry(Namespace(**options), run, resumed=resumed)

    start = str(tmp_path / "base" / "checkpoints")
    assert taken(load=start) == taken(pretrained_checkpoint=start) == entry
    assert taken() == taken(load=start, resumed=True) == taken(load="/missing/checkpoints") == {}
