"""`megasink analyze` of models, tokenizers and data with something wrong: one line, exit code 2."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers.processors import TemplateProcessing
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedTokenizerFast,
)

from megasink.analysis import measure
from megasink.analysis.capture.probe import ProbedModel
from megasink.analysis.capture.transformers_model import TransformersProbe
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.pages import analysis_page as pages
from megasink.analysis.ranks import Ranks
from megasink.analysis.run_analysis import analyze as analyze_model
from megasink.cli import main
from megasink.errors import UserError
from tests.analysis.capture.tiny_models import save_with_tokenizer

TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(5)]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A sound model with a tokenizer, and texts."""
    root = tmp_path_factory.mktemp("bad")
    save_with_tokenizer(root, "llama", TEXTS, 330)
    (root / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    (root / "empty.txt").write_text("")
    (root / "other-key.jsonl").write_text('{"body": "a text"}\n')
    return root


def analyze(root, output, model="llama", flags="", data="texts.jsonl"):
    command = f"analyze {root / model} --data {root / data} --output {output} --device cpu"
    return main([*command.split(), "--seq-length", "24", *flags.split()])


def line(capsys):
    """What was said; one line."""
    captured = capsys.readouterr()
    assert captured.out == ""
    said = [t for t in captured.err.splitlines() if t and "Loading weights" not in t]
    assert len(said) == 1, said
    assert said[0].startswith("megasink: error: ")
    return said[0]


def copy(root, name, **config):
    folder = root / name
    shutil.copytree(root / "llama", folder)
    changed = json.loads((folder / "config.json").read_text()) | config
    (folder / "config.json").write_text(json.dumps(changed))
    return folder


def truncated(root, name):
    path = copy(root, name) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:5000])


def without_attention(root, name):
    folder = copy(root, name)
    tiny = {"hidden_size": 32, "num_hidden_layers": 2}
    MambaForCausalLM(MambaConfig(vocab_size=330, **tiny)).save_pretrained(folder)


def encoder_decoder(root, name):
    copy(root, name, model_type="t5", architectures=["T5ForConditionalGeneration"])


def without_tokenizer(root, name):
    # transformers makes a tokenizer of one token for this type of model.
    folder = copy(root, name)
    for path in folder.glob("tokenizer*"):
        path.unlink()
    tiny = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    GPT2LMHeadModel(GPT2Config(vocab_size=330, **tiny)).save_pretrained(folder)


def bypassing(root, name):
    folder = copy(root, name)
    tiny = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
    BloomForCausalLM(BloomConfig(vocab_size=330, **tiny)).save_pretrained(folder)


def nan_weights(root, name):
    path = copy(root, name) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.self_attn.v_proj.weight"][8:] = torch.nan  # the second group
    save_file(weights, path, {"format": "pt"})


def more_tensors(root, name, key="model.layers.0.self_attn.q_proj.lora_A"):
    path = copy(root, name) / "model.safetensors"
    save_file(load_file(path) | {key: torch.ones(2, 32)}, path, {"format": "pt"})


def stored_as(root, name, dtype, **config):
    path = copy(root, name, **config) / "model.safetensors"
    weights = load_file(path)
    key = "model.layers.0.mlp.up_proj.weight"
    save_file(weights | {key: weights[key].to(dtype)}, path, {"format": "pt"})


MODELS = {
    "int8": (
        lambda root, name: stored_as(root, name, torch.int8),
        "model.layers.0.mlp.up_proj.weight is stored as I8, without a quantization_config",
    ),
    "fp8-of-an-unknown-method": (
        lambda root, name: stored_as(
            root, name, torch.float8_e4m3fn, quantization_config={"quant_method": "mine"}
        ),
        "up_proj.weight is stored as F8_E4M3, without a quantization_config that transformers",
    ),
    "flash": (
        lambda root, name: copy(root, name, _attn_implementation="flash_attention_2"),
        "uses flash_attention_2, which exposes neither weights nor masks: add",
    ),
    "bypassing": (bypassing, "BloomForCausalLM bypasses transformers' attention"),
    "truncated": (truncated, "transformers cannot load {}: Error while deserializing header"),
    "without-tokenizer": (without_tokenizer, "{} has no tokenizer files, such as tokenizer.json"),
    "more-layers": (
        lambda root, name: copy(root, name, num_hidden_layers=3),
        "do not match its config.json: model.layers.2.input_layernorm.weight is missing",
    ),
    "more-tensors": (
        more_tensors,
        "ForCausalLM has no model.layers.0.self_attn.q_proj.lora_A",
    ),
    "wider": (
        lambda root, name: copy(root, name, hidden_size=64),
        "lm_head.weight is [330, 32], not [330, 64]",
    ),
    "own-code": (
        lambda root, name: copy(
            root, name, model_type="mine", auto_map={"AutoConfig": "x.Y", "AutoModel": "x.Z"}
        ),
        "cannot load {}: it needs custom code, and megasink runs no code from a model folder",
    ),
    "nan-weights": (
        nan_weights,
        "activations of every sample are infinite or NaN, first in layer 1, heads [2, 3]: the "
        "model's weights have infinite or NaN values, first in "
        "model.layers.1.self_attn.v_proj.weight, so another dtype does not help",
    ),
    "without-attention": (without_attention, "attention in the 2 layers of MambaForCausalLM"),
    "encoder-decoder": (encoder_decoder, "this kind of AutoModel: AutoModelForCausalLM.\n"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models_that_cannot_be_read(root, tmp_path, capsys, name):
    make, problem = MODELS[name]
    make(root, name)
    capsys.readouterr()
    assert analyze(root, tmp_path / "out", model=name) == 2
    assert problem.format(root / name) in f"{line(capsys)}\n"
    assert not (tmp_path / "out" / "results.json").exists()
    assert not (tmp_path / "out" / "partial").exists()


@pytest.mark.parametrize(
    ("flags", "data", "problem"),
    [
        ("--seq-length 65", "texts.jsonl", "--seq-length 65 is longer than the 64 positions of"),
        ("", "empty.txt", "no document in"),
        ("--metrics gradeint", "texts.jsonl", "(did you mean gradient?)"),
        ("--metrics gradient --no-loss", "texts.jsonl", "--metrics gradient needs the loss"),
        ("", "other-key.jsonl", "other-key.jsonl:1 has no key 'text': pass --json-key with one of"),
        ("--output /proc/none/x", "texts.jsonl", "cannot be written"),  # in other words to root
    ],
)
def test_options_and_data(root, tmp_path, capsys, flags, data, problem):
    assert analyze(root, tmp_path, flags=flags.format(root), data=data) == 2
    assert problem.format(root) in line(capsys)


@pytest.mark.parametrize(("first", "length"), [((), 64), ((5,), 63)])
def test_the_length_follows_the_model(root, tmp_path, monkeypatch, first, length):
    """64 positions, one of them of a sink token where there is one."""
    asked = []

    def stop(options, length, model, texts):
        asked.append(length)
        raise UserError("enough")

    monkeypatch.setattr("megasink.analysis.capture.input_samples._samples", stop)
    options = AnalysisOptions(output=tmp_path)
    rest = dict.fromkeys(("open_probe", "module", "tokenizer", "vocabulary"))
    model = ProbedModel(**rest, facts={"name": "mine"}, positions=64, first=first, heads=[4])
    with pytest.raises(UserError, match="enough"):
        analyze_model(model, options, Ranks())
    assert asked == [length]


def test_a_folder_without_the_right_to_write(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("os.access", lambda path, mode: False)  # root may write anywhere
    assert analyze(root, tmp_path / "deeper" / "out") == 2
    assert f"cannot be written: no permission to write to {tmp_path}" in line(capsys)


def test_texts_that_begin_with_bos(root, tmp_path, capsys):
    folder = copy(root, "adds-bos")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    special = tokenizer.eos_token
    tokenizer.bos_token = special
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{special} $A", special_tokens=[(special, tokenizer.eos_token_id)]
    )
    tokenizer.save_pretrained(folder)
    (root / "bos.jsonl").write_text(json.dumps({"text": special + TEXTS[0]}) + "\n")
    capsys.readouterr()
    flags = "--parse-special-tokens"
    assert analyze(root, tmp_path / "out", "adds-bos", flags, data="bos.jsonl") == 2
    said = line(capsys)
    assert f"{root}/bos.jsonl:1 already begins with the BOS token 1, and the tokenizer" in said
    assert "--bos none" in said


def test_an_error_in_the_first_batch_leaves_room_for_its_cure(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])

    def fail(*_args, **_keywords):
        raise UserError("use a smaller batch")

    with monkeypatch.context() as patched:
        patched.setattr(TransformersProbe, "forward", fail)
        assert analyze(root, tmp_path) == 2
    assert "use a smaller batch" in line(capsys)
    assert analyze(root, tmp_path, flags="--batch-size 1") == 0


@pytest.mark.parametrize(
    ("dtype", "scale", "cure"),
    [
        (torch.float16, 1, "run the model in a wider dtype (--dtype float32)"),
        (torch.float32, 1, "the model's weights are finite and already in float32"),
        (
            torch.float16,
            torch.nan,
            "the model's weights have infinite or NaN values, first in weight, ",
        ),
    ],
)
def test_the_cure_for_activations_that_are_not_finite(dtype, scale, cure):
    model = torch.nn.Linear(2, 2, bias=False, dtype=dtype)
    model.weight.data.mul_(scale)
    assert measure._cure(model).startswith(cure)


def test_one_sample_with_nan_is_named_and_left_out(root, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    folder = copy(root, "one-token")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    token = next(t for t in tokenizer.encode(TEXTS[3]) if t not in tokenizer.encode(TEXTS[0]))
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"][token] = torch.nan
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    assert analyze(root, tmp_path, "one-token") == 0
    bad = [i for i, text in enumerate(TEXTS) if token in tokenizer.encode(text)[:24]]
    found = json.loads((tmp_path / "results.json").read_text())
    assert [entry["sample"] for entry in found["non_finite"]] == bad
    assert found["non_finite"][0]["layers"] == [0, 1]
    assert found["non_finite"][0]["heads"] == [0, 1, 2, 3]
    assert found["samples"] == len(TEXTS) - len(bad) > 0
    assert None not in found["metrics"]["importance"]["values"][0]
    said = capsys.readouterr().err
    for i in bad:
        assert f"texts.jsonl:{i + 1} has infinite or NaN values in layers [0, 1], heads" in said


def test_tensors_that_the_class_ignores_itself(root, tmp_path, monkeypatch):
    """Buffers of older releases are no weights."""
    monkeypatch.setattr(pages, "figures", lambda analyses, kinds: [])
    more_tensors(root, "buffers", "model.layers.0.self_attn.rotary_emb.inv_freq")
    assert analyze(root, tmp_path / "out", model="buffers") == 0
