"""Bits per byte count the bytes of the texts, not the space that a tokenizer puts before each."""

import json
import math

import pytest
import torch

from megasink.analysis.analysis_folder import read_analysis
from megasink.analysis.capture.input_samples import inputs_of
from megasink.analysis.capture.probed_models import of_transformers
from megasink.analysis.measure import measure
from megasink.analysis.options import AnalysisOptions
from megasink.analysis.pages import ablation_page
from megasink.analysis.pages import analysis_page as pages
from megasink.analysis.ranks import Ranks
from megasink.analysis.run_analysis import bytes_by_token
from megasink.cli import main
from megasink.data.corpus import Document
from megasink.data.hf_tokenizer import load_tokenizer, train_tokenizer
from tests.analysis.capture.tiny_models import tiny_model
from tests.llama_like import llama_like

TEXTS = ["two words, it's 2048", "\n\tx  =  y", "naïve слово 漢字 🙂", "the cat sat on the mat"]
KINDS = {
    "llama 2": {"bos": "<|bos|>"},
    "without bos": {},
    "metaspace": {"bos": "<|bos|>", "legacy": False},
    "gemma": {"bos": "<|bos|>", "dummy_prefix": False},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes") / "tokenizer"
    train_tokenizer([Document(text, "here") for text in TEXTS], 340, folder, bos=True)
    return load_tokenizer(folder)


@pytest.fixture(params=KINDS)
def kind(request, trained):
    tokenizer = llama_like(trained, **KINDS[request.param])
    return tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=64), tokenizer


def by_hand(model, tokenizer, texts, length=64):
    """Bits and bytes of the scored text, which is what the tokens decode to."""
    bits = size = 0
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids[:, :length]
        with torch.no_grad():
            logs = model(ids).logits[0, :-1].log_softmax(-1)
        bits -= float(logs.gather(1, ids[0, 1:, None]).double().sum()) / math.log(2)
        special = tokenizer.bos_token_id is not None
        scored = tokenizer.decode(ids[0], skip_special_tokens=True).encode()
        before = b"" if special else tokenizer.decode(ids[0, :1]).encode()
        assert text.encode().startswith(scored)
        size += len(scored) - len(before)
    return bits / size


@pytest.mark.parametrize("length", [64, 7])
def test_an_analysis_counts_the_bytes_of_the_texts(kind, length):
    model, tokenizer = kind
    # Only ASCII where texts are cut, as a cut may be inside a character.
    texts = TEXTS if length == 64 else [text for text in TEXTS if text.isascii()]
    probed = of_transformers(model, tokenizer, "tiny")
    options = AnalysisOptions(batch_size=2, seq_length=length)
    samples = inputs_of(options, probed, texts).samples
    known = bytes_by_token(probed, Ranks())
    assert known is not None
    values = measure(probed, samples, options, token_bytes=known).analysis_values(0)
    found = float(values.overall["bits_per_byte"])
    assert found == pytest.approx(by_hand(model, tokenizer, texts, length), rel=1e-5)


def test_the_commands_count_the_bytes_of_a_file(kind, tmp_path, monkeypatch):
    monkeypatch.setattr(pages, "figures", lambda *_: [])
    monkeypatch.setattr(ablation_page, "pictures", lambda *_: [])
    for part in kind:
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps({"text": t}) + "\n" for t in TEXTS))
    flags = f"{tmp_path}/model --data {tmp_path}/texts.jsonl --device cpu --output {tmp_path}"
    assert main(f"analyze {flags}/analysis".split()) == 0
    assert main(f"ablate {flags}/ablation --heads 0.1".split()) == 0
    found = [float(read_analysis(tmp_path / "analysis").values("bits_per_byte"))]
    points = json.loads((tmp_path / "ablation" / "ablation.json").read_text())["points"]
    (unchanged,) = [point for point in points if point["row"] == "unchanged"]
    found += [value["bits_per_byte"] for value in unchanged["values"].values()]
    assert found == pytest.approx([by_hand(*kind, TEXTS)] * 2, rel=1e-5)


def test_a_sink_token_stands_before_texts_too(trained):
    tokenizer = llama_like(trained)
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=64)
    from dataclasses import replace

    probed = replace(of_transformers(model, tokenizer, "tiny"), first=(5,))
    options = AnalysisOptions(batch_size=2, seq_length=32)
    samples = inputs_of(options, probed, TEXTS).samples
    measured = measure(probed, samples, options, token_bytes=bytes_by_token(probed, Ranks()))
    assert [one.bytes for one in measured.samples] == [len(text.encode()) for text in TEXTS]


def test_pieces_of_one_text_have_their_own_spaces(trained, tmp_path):
    """Only the first begins the text; a BOS stands before each."""
    tokenizer = llama_like(trained, bos="<|bos|>")
    model = tiny_model("llama", vocab_size=len(tokenizer), max_position_embeddings=64)
    text = " ".join(["the cat sat on the mat"] * 20)
    (tmp_path / "one.txt").write_text(text)
    probed = of_transformers(model, tokenizer, "tiny")
    options = AnalysisOptions(data=(str(tmp_path / "one.txt"),), batch_size=2, seq_length=12)
    samples = inputs_of(options, probed).samples
    assert len(samples) > 5
    assert {sample.tokens[0] for sample in samples} == {tokenizer.bos_token_id}
    measured = measure(probed, samples, options, token_bytes=bytes_by_token(probed, Ranks()))
    ids = [token for sample in samples for token in sample.tokens[1:]]
    assert sum(one.bytes for one in measured.samples) == len(tokenizer.decode(ids))
