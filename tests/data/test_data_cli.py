import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from megatron.core.datasets.indexed_dataset import IndexedDataset

from megasink import cli
from megasink.data.hf_tokenizer import load_tokenizer
from tests.waiting import is_alive, until


def main(argv: list[str]) -> int:
    return cli.main(["data", *argv])


TOOL = Path(__file__).parents[2] / "tools" / "preprocess_data.py"


def test_train_a_tokenizer_and_tokenize(tmp_path, sources, capsys):
    inputs = tmp_path / "in"
    inputs.mkdir()
    for i, text in enumerate(sources[:2]):
        (inputs / f"{i}.py").write_text(text)
    (inputs / "binary").write_bytes(b"\xff\xfe")
    prefix = tmp_path / "out" / "code"
    argv = [str(inputs), "--output", str(prefix), "--train-tokenizer", "500", "--workers", "1"]
    assert main(argv) == 0
    summary = capsys.readouterr().out
    tokenizer = load_tokenizer(f"{prefix}-tokenizer")
    data = IndexedDataset(str(prefix))
    assert [tokenizer.decode(d[:-1]) for d in data] == sources[:2]
    tokens = int(data.sequence_lengths.sum())
    size = sum(len(s.encode()) for s in sources[:2])
    assert f"2 documents, {size / 1e6:.2f} MB, {tokens:,} tokens ({size / tokens:.2f} b" in summary
    assert f"skipped, not UTF-8 text: 1 ({inputs / 'binary'})" in summary
    assert f"--data-path {prefix} --tokenizer-model {prefix}-tokenizer" in summary


def test_all_problems_at_once(tmp_path, capsys):
    for name in ("out.bin", "tokenizer"):
        (tmp_path / name).write_text("")
    argv = ["/absent/1", "/absent/2", "--output", str(tmp_path / "out"), "--workers", "0"]
    argv += ["--train-tokenizer", "5", "--tokenizer-output", str(tmp_path / "tokenizer")]
    assert main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("megasink: error: 6 problems")
    for part in (
        "out.bin exist",
        "absent/1",
        "absent/2",
        "--workers 0",
        "r 5 is too",
        "--tokenizer,",
    ):
        assert part in error


def test_one_line_for_one_problem(tmp_path, capsys, folder):
    (tmp_path / "a.txt").write_text("text")
    argv = [str(tmp_path / "a.txt"), "--output", str(tmp_path / "out"), "--tokenizer", str(folder)]
    assert main([*argv, "--tokenizer-output", "x"]) == 2
    error = capsys.readouterr().err
    assert error == "megasink: error: --tokenizer-output needs --train-tokenizer, not --tokenizer\n"
    argv[-1] = str(tmp_path / "gone")
    assert main(argv) == 2
    assert "gone: no such folder; nothing is downloaded" in capsys.readouterr().err


def test_sigterm_leaves_nothing_that_loads(tmp_path, folder, monkeypatch, capsys):
    def told_to_end(corpus, what):
        yield from corpus
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)

    monkeypatch.setattr("megasink.data.corpus.Corpus.tracked", told_to_end)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x"}))
    argv = [str(tmp_path / "a.jsonl"), "--output", str(tmp_path / "out"), "--workers", "1"]
    assert main([*argv, "--tokenizer", str(folder)]) == 143
    assert "megasink: stopped by SIGTERM" in capsys.readouterr().err
    # The same command goes on from what is left; the lock is gone.
    assert not [p.name for p in tmp_path.iterdir() if p.suffix not in (".jsonl", ".partial")]
    monkeypatch.undo()
    assert main([*argv, "--tokenizer", str(folder)]) == 0
    assert {p.suffix for p in tmp_path.iterdir()} == {".jsonl", ".bin", ".idx", ".json"}


def children(pid: int) -> list[int]:
    return [int(c) for c in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_killed_run_leaves_nothing_that_loads(tmp_path, tmp_path_factory, folder):
    prefix = tmp_path / "out"
    large = tmp_path_factory.mktemp("large") / "a.txt"
    large.write_text(200 * Path(argparse.__file__).read_text())
    options = ["--output", str(prefix), "--tokenizer", str(folder), "--workers", "2"]
    run = subprocess.Popen([sys.executable, str(TOOL), str(large), *options])
    partial = tmp_path / "out.bin.partial"

    def writing() -> bool:
        assert run.poll() is None
        return partial.exists() and partial.stat().st_size > 0

    until(writing)
    workers = children(run.pid)
    os.kill(run.pid, signal.SIGKILL)
    run.wait()
    assert partial.stat().st_size > 0
    assert not IndexedDataset.exists(str(prefix))
    assert not [p for p in tmp_path.iterdir() if p.suffix in (".bin", ".idx", ".json")]
    assert len(workers) >= 2
    try:
        until(lambda: not any(map(is_alive, workers)))
    finally:
        for pid in filter(is_alive, workers):
            os.kill(pid, signal.SIGKILL)

    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "again"}))  # another command starts over
    assert main([str(tmp_path / "a.jsonl"), *options]) == 0
    assert len(IndexedDataset(str(prefix))) == 1
    names = {p.name for p in tmp_path.iterdir()}
    assert names == {"a.jsonl", "out.bin", "out.idx", "out.json"}
    assert np.fromfile(tmp_path / "out.bin", np.uint16)[-1] == 1
