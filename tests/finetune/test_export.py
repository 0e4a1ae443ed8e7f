"""An export differs from its original in the trained values and in what was requested alone."""

import json
import math
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from megasink.errors import UserError
from megasink.finetune import export_finetuned
from megasink.finetune import sft_training as finetune
from megasink.finetune.chats import ChatTokenizer
from megasink.finetune.options import FinetuneOptions
from megasink.transformers.load_hf_folder import load_weights
from tests.chats import ENDS, MARKED, chat_tokenizer
from tests.finetune.models import MODELS, edit, facts_of, make

FILES = ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json")


def options_of(root, **changes):
    given = {
        "model": root / "model",
        "data": (root / "chats.jsonl",),
        "seq_length": 128,
        "micro_batch_size": 2,
        "global_batch_size": 2,
        "lr": 0.1,
    }
    return FinetuneOptions(**given | changes)


@pytest.fixture
def model(root, tmp_path):
    """A function that makes a model, and the conversations, in the test's folder."""

    def made(name):
        chat_tokenizer(root / "tokenizer", tmp_path / "model", MARKED)
        make(name, tmp_path / "model", 322)
        shutil.copy(root / "chats.jsonl", tmp_path)
        return tmp_path

    return made


def trained(options, folder):
    """A trainer after two steps (the first has a rate of 0), the chats, and what is held out."""
    chats = ChatTokenizer(options.model)
    rows, held_out, _ = finetune.tokenized(options, chats, folder / "partial")
    config = finetune.arguments(options, folder / "run")
    config.max_steps = 2
    trainer = finetune.make_trainer(options, config, chats.tokenizer, rows, 0)
    finetune.train(trainer, held_out)
    return trainer, chats, held_out


def differing(one, other, requested=()):
    """(file, key) of the JSON files that differ; independent of what the command compares."""
    found = []
    for name in FILES:
        a, b = (json.loads((folder / name).read_text()) for folder in (one, other))
        found += [(name, k) for k in {**a, **b} if a.get(k, found) != b.get(k, found)]
    return sorted(set(found) - set(requested))


@pytest.mark.parametrize("name", MODELS)
def test_only_values_and_the_requested_key_differ(model, name):
    """Over dense models, experts, sinks, gates and megasink's own modeling file."""
    root = model(name)
    options = options_of(root, bf16=name == "own-sink")
    trainer, chats, _ = trained(options, root)
    asked = MODELS[name][1].get("output_router_logits", False)
    assert any("aux_loss" in log for log in trainer.state.log_history) == asked
    finetune.export(trainer, chats, options, root / "out")
    old, new = root / "model", root / "out"
    assert differing(old, new) == [("generation_config.json", "eos_token_id")]
    ids = json.loads((new / "generation_config.json").read_text())["eos_token_id"]
    assert chats.tokenizer.convert_ids_to_tokens(ids) == ["<|endoftext|>", ENDS]
    texts = {path.name for path in old.iterdir()} - {"model.safetensors"}
    assert texts == {path.name for path in new.iterdir()} - {"model.safetensors"}
    for path in texts - {"generation_config.json"}:
        assert (old / path).read_bytes() == (new / path).read_bytes(), path
    assert facts_of(old / "model.safetensors") == facts_of(new / "model.safetensors")
    before, now = (load_file(folder / "model.safetensors") for folder in (old, new))
    changed = {n for n in before if not torch.equal(before[n], now[n])}
    assert any("self_attn.q" in name for name in changed)
    assert not any(part in name for part in ("sinks", "bias", "norm", "embed") for name in changed)
    # The values are those that were trained, rounded once.
    kinds = {"dtype": torch.float32, "attn_implementation": "megasink"}
    inside = finetune.merged(load_weights(old, **kinds), finetune.newest_checkpoint(root / "run"))
    ids = torch.arange(3, 40)[None]
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=ids).logits.float()
        error = (inside.eval()(ids).logits - expected).abs().max() / expected.abs().max()
    assert error < (0.1 if options.bf16 else 1e-4)
    rounded = getattr(torch, MODELS[name][2])
    for key, value in load_weights(new, **kinds).state_dict().items():
        exact = inside.state_dict()[key]
        assert torch.equal(value, exact) or torch.equal(value, exact.to(rounded).float()), key


@pytest.mark.parametrize("name", ["own-experts", "granite_swa"])
def test_all_weights_are_trained_and_written_in_their_types(model, name):
    root = model(name)
    options = options_of(root, full=True)
    trainer, chats, _ = trained(options, root)
    finetune.export(trainer, chats, options, root / "out")
    old, new = root / "model", root / "out"
    assert differing(old, new) == [("generation_config.json", "eos_token_id")]
    assert facts_of(old / "model.safetensors") == facts_of(new / "model.safetensors")
    now, inside = load_file(new / "model.safetensors"), trainer.model.state_dict()
    wide = [n for n, value in now.items() if value.dtype == torch.float32]
    assert any("sinks" in name for name in wide)
    for name in wide:
        assert torch.equal(now[name], inside[name]), name
        before = load_file(old / "model.safetensors")[name]
        assert ("sinks" not in name) or not torch.equal(now[name], before), name


def test_shards_and_what_transformers_does_not_load_are_kept(model):
    """Weights in several files, a tied head that is stored, layers of multi-token prediction."""
    root = model("llama")
    folder = root / "model"
    tensors = load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    names = sorted(tensors)
    parts = {"model-00001-of-00002.safetensors": names[:4],
             "model-00002-of-00002.safetensors": names[4:]}  # fmt: skip
    for file, those in parts.items():
        save_file({n: tensors[n] for n in those}, folder / file, {"format": "pt"})
    (folder / "model.safetensors").unlink()
    weight_map = {n: file for file, those in parts.items() for n in those}
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    whole = load_weights(folder, dtype=torch.float32, attn_implementation="megasink")
    with torch.no_grad():
        whole.model.embed_tokens.weight.add_(1)
    (root / "out").mkdir()
    export_finetuned.write_model(whole, folder, root / "out")
    for file in (*parts, "model.safetensors.index.json"):
        assert (root / "out" / file).is_file()
    now = {n: v for file in parts for n, v in load_file(root / "out" / file).items()}
    assert now.keys() == tensors.keys()
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert torch.equal(now[name], tensors["model.embed_tokens.weight"] + 1), name


def test_the_end_of_the_tokenizer_needs_no_entry(model):
    """Of a model whose answers already end there, nothing differs."""
    root = model("qwen3")
    edit(root / "model" / "generation_config.json", eos_token_id=[1, 321])
    options = options_of(root)
    trainer, chats, _ = trained(options, root)
    finetune.export(trainer, chats, options, root / "out")
    assert differing(root / "model", root / "out") == []


def test_an_adapter_is_exported_with_the_tokenizer(model, capsys):
    root = model("qwen3")
    options = options_of(root, adapter=True)
    trainer, chats, _ = trained(options, root)
    finetune.export(trainer, chats, options, root / "out")
    for name in FILES[2:]:
        assert (root / "out" / name).read_bytes() == (root / "model" / name).read_bytes()
    assert not (root / "out" / "config.json").exists()
    assert "pass eos_token_id=[1, 321] to generate()" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("config.json", {"use_cache": False}),
        ("config.json", {"new": None}),
        ("generation_config.json", {"pad_token_id": 5}),
        ("tokenizer_config.json", {"model_max_length": 3}),
    ],
)
def test_an_unrequested_difference_ends_the_command(model, monkeypatch, name, changes):
    root = model("qwen3")
    options = options_of(root)
    trainer, chats, _ = trained(options, root)
    write_model = export_finetuned.write_model

    def changed(what, original, folder, *others):
        write_model(what, original, folder, *others)
        edit(folder / name, **changes)

    monkeypatch.setattr(export_finetuned, "write_model", changed)
    with pytest.raises(UserError, match=rf"{name}: {next(iter(changes))} .* -> "):
        finetune.export(trainer, chats, options, root / "out")
    assert not (root / "out").exists()


def test_quantized_weights_and_pickles_are_refused(model):
    root = model("qwen3")
    edit(root / "model" / "config.json", quantization_config={"quant_method": "mxfp4"})
    with pytest.raises(UserError, match=r"quantized weights \(mxfp4\)"):
        finetune.original(options_of(root))
    edit(root / "model" / "config.json", quantization_config=None, text_config=3)
    with pytest.raises(UserError, match="transformers cannot load"):
        finetune.original(options_of(root))
    edit(root / "model" / "config.json", text_config=None)
    (root / "model" / "model.safetensors").rename(root / "model" / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"has no model\.safetensors"):
        finetune.original(options_of(root))


def test_a_router_loss_that_trl_does_not_compute_is_refused(model):
    root = model("own-experts")
    edit(root / "model" / "config.json", output_router_logits=True)
    with pytest.raises(UserError, match="output_router_logits"):
        trained(options_of(root), root)
    root = model("own-sink")  # dense: there is none
    edit(root / "model" / "config.json", output_router_logits=True)
    trained(options_of(root), root)


def test_tokens_that_the_model_does_not_have_are_named(model):
    root = model("qwen3")
    edit(root / "model" / "config.json", vocab_size=5)
    options, chats = options_of(root), ChatTokenizer(root / "model")
    with pytest.raises(UserError, match="vocabulary has 5 tokens"):
        finetune.tokenized(options, chats, root / "partial")


@pytest.mark.parametrize("name", ["qwen3", "router-loss"])
def test_the_held_out_loss_is_the_mean_over_targets_of_the_language_model(model, name):
    """Of stock transformers, one conversation after another; whatever the batch size."""
    root = model(name)
    values = []
    for size in (1, 2):
        options = options_of(root, full=True, lr=1e-9, micro_batch_size=size)
        chats = ChatTokenizer(options.model)
        *_, sample = finetune.tokenized(options, chats, root / f"partial{size}")
        config = finetune.arguments(options, root / f"run{size}")
        trainer = finetune.make_trainer(options, config, chats.tokenizer, sample, 0)
        values.append(finetune.held_out_loss(trainer, sample))
    assert values[0] == values[1]
    stock = load_weights(root / "model", dtype=torch.float32, attn_implementation="eager").eval()
    total, targets, means = 0.0, 0, []
    for row in sample:
        labels = torch.tensor(row["labels"])[1:]
        with torch.no_grad():
            logits = stock(torch.tensor([row["input_ids"]])).logits[0, :-1]
        losses = torch.nn.functional.cross_entropy(
            logits.double(), labels.long(), reduction="none", ignore_index=-100
        )[labels != -100]
        total, targets = total + float(losses.sum()), targets + len(losses)
        means.append(float(losses.mean()))
    assert values[0] == pytest.approx(total / targets, rel=1e-5)
    assert not math.isclose(total / targets, sum(means) / len(means), rel_tol=1e-4)


@pytest.mark.parametrize("name", ["own-latent", "gpt_oss", "qwen3_next", "qwen3_5"])
def test_the_loss_of_a_step_is_that_of_each_conversation_alone(model, name):
    """Of stock transformers with eager attention, before the first update."""
    root = model(name)
    options = options_of(root, global_batch_size=128)
    chats = ChatTokenizer(options.model)
    rows, _, _ = finetune.tokenized(options, chats, root / "partial")
    config = finetune.arguments(options, root / "run")
    config.max_steps = 1
    trainer = finetune.make_trainer(options, config, chats.tokenizer, rows, 0)
    trainer.train()
    (loss,) = (log["loss"] for log in trainer.state.log_history if "loss" in log)
    stock = load_weights(root / "model", dtype=torch.float32, attn_implementation="eager").eval()
    total, targets = 0.0, 0
    for row in rows:
        labels = torch.tensor(row["labels"])[1:].long()
        with torch.no_grad():
            logits = stock(torch.tensor([row["input_ids"]])).logits[0, :-1].double()
        total += float(torch.nn.functional.cross_entropy(logits, labels, reduction="sum"))
        targets += int((labels != -100).sum())
    assert loss == pytest.approx(total / targets, rel=1e-5)
