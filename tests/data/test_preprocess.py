import errno
import json
import multiprocessing
import os
import signal
from pathlib import Path

import numpy as np
import pytest
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset
from megatron.core.tokenizers import MegatronTokenizer
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from megasink.data.corpus import Corpus
from megasink.data.encode import EncoderSettings, encode_in_order
from megasink.data.hf_tokenizer import load_tokenizer, tokenizer_hash
from megasink.data.preprocess import preprocess
from megasink.data.text_tokenizer import Part
from megasink.errors import ConfigError, UserError

EOD = 1
TEXTS = ["def f(x):\n    return x\n", "  naïve <|endoftext|> 🙂", "\n", "last"]


def write_lines(path, texts):
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    return path


def documents_of(prefix) -> list[np.ndarray]:
    data = IndexedDataset(str(prefix))
    return [d.copy() for d in data]  # what it gives are views of a map it closes when it goes


def gpt_samples(prefix, folder, sequence_length: int) -> list[np.ndarray]:
    """One epoch of Megatron's own dataset over `prefix`: samples of sequence_length + 1 tokens."""
    tokenizer = MegatronTokenizer.from_pretrained(
        tokenizer_path=str(folder), metadata_path={"library": "huggingface"}
    )
    config = GPTDatasetConfig(
        random_seed=0,
        sequence_length=sequence_length,
        blend=([str(prefix)], None),
        split="1,0,0",
        tokenizer=tokenizer,
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
    )
    train, _, _ = BlendedMegatronDatasetBuilder(
        GPTDataset, [None, None, None], lambda: True, config
    ).build()
    assert (tokenizer.eod, tokenizer.pad, tokenizer.vocab_size) == (EOD, 2, 1024)
    samples = [train[i] for i in range(len(train))]
    assert all(s["loss_mask"].all() for s in samples)
    return [np.append(s["tokens"].numpy(), s["labels"][-1].item()) for s in samples]


def test_documents_come_back_each_with_one_eod(tmp_path, folder, tokenizer):
    corpus = Corpus([write_lines(tmp_path / "a.jsonl", [*TEXTS, ""])])
    report = preprocess(corpus, tmp_path / "new" / "out.v1", folder, workers=1)
    data = IndexedDataset(str(tmp_path / "new" / "out.v1"))
    assert [tokenizer.decode(d[:-1]) for d in data] == TEXTS
    for document in data:
        # the "<|endoftext|>" that a text spells is text, not an end
        assert np.flatnonzero(document == EOD).tolist() == [len(document) - 1]
    assert data.document_indices.tolist() == [0, 1, 2, 3, 4]
    assert data.index.dtype == np.uint16
    assert report.documents == 4
    assert report.tokens == data.sequence_lengths.sum()
    assert report.text_bytes == sum(len(t.encode()) for t in TEXTS)
    assert report.skipped.empty == 1


def test_the_sidecar_says_what_was_made_of_what(tmp_path, folder, tokenizer):
    report = preprocess(
        Corpus([write_lines(tmp_path / "a.jsonl", TEXTS)]), tmp_path / "out", folder, workers=1
    )
    sidecar = json.loads((tmp_path / "out.json").read_text())
    assert sidecar["tokens"] == report.tokens
    assert sidecar["tokenizer"] == {"folder": str(folder), "sha256": tokenizer_hash(tokenizer)}
    assert (sidecar["before_document"], sidecar["after_document"]) == ([], [EOD])
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        ["a.jsonl", *(f.name for f in report.files)]
    )


def test_megatron_trains_on_it(tmp_path, folder, tokenizer, sources):
    corpus = Corpus([write_lines(tmp_path / "a.jsonl", sources[:2])])
    preprocess(corpus, tmp_path / "out", folder, workers=1)
    stream = np.concatenate(documents_of(tmp_path / "out"))
    samples = gpt_samples(tmp_path / "out", folder, 512)
    assert len(samples) == (len(stream) - 1) // 512
    joined = np.concatenate([s[:-1] for s in samples])
    assert np.bincount(joined, minlength=1024)[EOD] >= 1
    # every sample is a run of the stream of both documents, in one order or the other
    halves = np.split(stream, [np.flatnonzero(stream == EOD)[0] + 1])
    streams = [np.concatenate(h).astype(np.int64).tobytes() for h in (halves, halves[::-1])]
    assert any(all(s.tobytes() in whole for s in samples) for whole in streams)


def test_a_tokenizer_with_bos_of_its_own_keeps_it(tmp_path, tokenizer):
    backend = type(tokenizer.backend_tokenizer).from_str(tokenizer.backend_tokenizer.to_str())
    backend.add_special_tokens(["<|bos|>"])
    backend.post_processor = TemplateProcessing(
        single="<|bos|> $A <|endoftext|>", special_tokens=[("<|bos|>", 1024), ("<|endoftext|>", 1)]
    )
    PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", bos_token="<|bos|>"
    ).save_pretrained(tmp_path / "bos")
    corpus = Corpus([write_lines(tmp_path / "a.jsonl", TEXTS)])
    preprocess(corpus, tmp_path / "out", tmp_path / "bos", workers=1)
    for document, text in zip(documents_of(tmp_path / "out"), TEXTS, strict=True):
        assert document[0] == 1024
        assert document[1:-1].tolist() == tokenizer.encode(text, split_special_tokens=True)
        assert document[-1] == EOD


def test_overwriting_clears_the_sample_indices_that_megatron_cached(tmp_path, folder):
    lines = tmp_path / "a.jsonl"
    prefix = tmp_path / "out"
    preprocess(Corpus([write_lines(lines, ["old"] * 400)]), prefix, folder, workers=1)
    gpt_samples(prefix, folder, 8)
    assert list((prefix / "cache").rglob("*.npy"))
    corpus = Corpus([write_lines(lines, ["new data"] * 10)])
    report = preprocess(corpus, prefix, folder, workers=1, overwrite=True)
    assert len(gpt_samples(prefix, folder, 8)) == (report.tokens - 1) // 8
    assert prefix.with_suffix(".bin").stat().st_size == 2 * report.tokens  # nothing old behind it


def test_files_do_not_depend_on_the_number_of_workers(tmp_path, folder, sources):
    texts = [line for s in sources[:2] for line in s.splitlines() if line] + sources
    corpus = Corpus([write_lines(tmp_path / "a.jsonl", texts)])
    for workers in (1, 3):
        preprocess(corpus, tmp_path / str(workers), folder, workers=workers)
    for suffix in (".bin", ".idx", ".json"):
        one, three = ((tmp_path / f"{n}{suffix}").read_bytes() for n in (1, 3))
        assert one == three


def test_batches_come_back_in_order(tokenizer, sources):
    settings = EncoderSettings(tokenizer.backend_tokenizer.to_str(), [], [EOD], "uint16")
    # long and short in turn, so that a later batch is ready before an earlier one
    batches = [[Part(sources[i % 5][: (i % 2) * 20_000 + i])] for i in range(40)]
    serial, parallel = (list(encode_in_order(batches, settings, n)) for n in (1, 2))
    for one, two in zip(serial, parallel, strict=True):
        assert one.tokens.tolist() == two.tokens.tolist()
        assert (one.lengths, one.text_bytes) == (two.lengths, two.text_bytes)


def test_a_failing_run_leaves_nothing_and_destroys_nothing(tmp_path, folder):
    lines = write_lines(tmp_path / "a.jsonl", TEXTS)
    preprocess(Corpus([lines]), tmp_path / "out", folder, workers=1)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    bad = tmp_path / "bad.jsonl"
    bad.write_text(lines.read_text() * 400 + "not JSON\n")
    with pytest.raises(UserError, match=r"bad\.jsonl:1601 is not valid JSON"):
        preprocess(Corpus([bad]), tmp_path / "out", folder, workers=2, overwrite=True)
    bad.unlink()
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_an_old_index_never_stands_beside_new_tokens(tmp_path, folder, monkeypatch):
    corpus = Corpus([write_lines(tmp_path / "a.jsonl", TEXTS)])
    preprocess(corpus, tmp_path / "out", folder, workers=1)
    rename = Path.rename

    def stop_before_the_index(self, target):
        if target.suffix == ".idx":
            raise OSError(errno.ENOSPC, "No space left on device")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", stop_before_the_index)
    with pytest.raises(UserError, match="out cannot be written: No space left"):
        preprocess(corpus, tmp_path / "out", folder, workers=1, overwrite=True)
    assert (tmp_path / "out.bin").exists()
    assert not IndexedDataset.exists(str(tmp_path / "out"))


def test_outputs_that_cannot_be(tmp_path, folder):
    corpus = Corpus([write_lines(tmp_path / "a.jsonl", TEXTS)])
    with pytest.raises(ConfigError, match=r"a prefix: leave \.bin off"):
        preprocess(corpus, tmp_path / "out.bin", folder)
    with pytest.raises(ConfigError, match=r"would write into the input .*: choose another folder"):
        preprocess(Corpus([tmp_path]), tmp_path / "sub" / "out", folder)
    records = write_lines(tmp_path / "own.json", TEXTS)
    with pytest.raises(ConfigError, match=r"would write into the input .*own\.json"):
        preprocess(Corpus([records]), tmp_path / "own", folder, overwrite=True)
    with pytest.raises(ConfigError, match="--workers 0: use 1 or more"):
        preprocess(corpus, tmp_path / "out", folder, workers=0)
    with pytest.raises(UserError, match=r"a\.jsonl/out cannot be created: "):
        preprocess(corpus, tmp_path / "a.jsonl" / "out", folder)


def test_a_worker_that_dies_is_an_error_and_no_hang(tokenizer):
    settings = EncoderSettings(tokenizer.backend_tokenizer.to_str(), [], [EOD], "uint16")

    def batches():
        for i in range(100):
            if i == 5:
                for child in multiprocessing.active_children():
                    os.kill(child.pid, signal.SIGKILL)
            yield [Part("text")]

    with pytest.raises(UserError, match="one of 2 tokenizing processes died"):
        list(encode_in_order(batches(), settings, 2))


def test_loading_needs_no_network(folder, monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("the network was asked")

    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr("socket.getaddrinfo", refuse)
    assert len(load_tokenizer(folder)) == 1024
