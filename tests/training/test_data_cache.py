"""Indices of samples in --data-cache-path belong to the contents of a data set, not to its path."""

import json
import shutil

from megasink.data.corpus import Corpus
from megasink.data.preprocess import preprocess
from tests.runs import TINY, UNTIED, short_documents, steps

FLAGS = [*TINY, *UNTIED, *"--split 80,20,0 --eval-iters 1 --num-workers 0 --train-iters 3".split()]


def losses(run):
    return [(step["lm_loss"], step["grad_norm"]) for step in steps(run)]


def test_a_data_set_made_anew_has_indices_of_its_own(pool, tmp_path):
    data = short_documents(tmp_path)

    def trained(name, cache):
        run, where = tmp_path / name, ["--data-cache-path", str(tmp_path / cache)]
        pool.train([*FLAGS, *data, *where, "--run-dir", str(run)])
        return losses(run)

    before = trained("first", "cache")
    documents = tmp_path / "documents.jsonl"
    lines = documents.read_text().splitlines(keepends=True)
    documents.write_text("".join(lines[: len(lines) // 3]))
    corpus = Corpus([str(documents)])
    preprocess(corpus, tmp_path / "text", tmp_path / "tokenizer", workers=1, overwrite=True)
    again = trained("again", "cache")
    assert again == trained("fresh", "another-cache")
    assert again != before


def test_copies_at_other_paths_share_their_indices(pool, tmp_path):
    data = short_documents(tmp_path)
    copy = tmp_path / "elsewhere"
    shutil.copytree(tmp_path, copy)
    runs = {}
    for name, flags in {
        "one": data,
        "two": [w.replace(str(tmp_path), str(copy)) for w in data],
    }.items():
        run = tmp_path / f"run-{name}"
        pool.train(
            [*FLAGS, *flags, "--data-cache-path", str(tmp_path / "cache"), "--run-dir", str(run)]
        )
        runs[name] = losses(run), sorted(path.name for path in (tmp_path / "cache").iterdir())
    assert runs["one"] == runs["two"]
    sidecar = json.loads((copy / "text.json").read_text())
    assert set(sidecar["sha256"]) == {".bin", ".idx"}
