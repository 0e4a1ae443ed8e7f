"""Hostile and damaged corpora: bounded memory, no waiting, and nothing lost or left."""

import fcntl
import gzip
import json
import os
import socket
import subprocess
import sys
import textwrap

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megasink.data.corpus import Corpus
from megasink.data.hf_tokenizer import leading_ids, load_tokenizer, train_tokenizer
from megasink.data.preprocess import preprocess
from megasink.errors import ConfigError, UserError
from tests.damage.corpora import DEEP, LINE
from tests.distributed.pool import ROOT

KIB = 1 << 10


@pytest.mark.parametrize(
    ("name", "pack"),
    [("a.txt.gz", gzip.compress), ("a.md.zst", zstandard.compress), ("a.TXT.GZ", gzip.compress)],
)
def test_compressed_text_is_one_document(tmp_path, texts, name, pack):
    (tmp_path / name).write_bytes(pack("two\nlines 漢".encode()))
    assert texts(tmp_path / name) == texts(tmp_path) == ["two\nlines 漢"]


@pytest.mark.parametrize(
    ("name", "content", "where"),
    [
        ("a.txt", b"x" * 20_000, r"a\.txt is"),
        ("a.txt.gz", gzip.compress(b"x" * 20_000), r"a\.txt\.gz is"),
        ("a.jsonl", LINE + b"x" * 20_000 + b"\n", r"a\.jsonl:2 is"),
        ("a.jsonl.gz", gzip.compress(LINE + b" " * 20_000), r"a\.jsonl\.gz:2 is"),
        ("a.jsonl.zst", zstandard.compress(b"x" * (64 << 20)), r"a\.jsonl\.zst:1 is"),
    ],
    # gzip writes the time into its header: two workers would have tests of other names.
    ids=["txt", "txt.gz", "jsonl", "jsonl.gz", "jsonl.zst"],
)
def test_a_document_has_a_largest_size(tmp_path, texts, name, content, where):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=f"{where} longer than the .*10,240 bytes"):
        texts(tmp_path / name, max_document_bytes=10 * KIB)
    if name == "a.txt":
        assert texts(tmp_path / name, max_document_bytes=20_000) == ["x" * 20_000]


def test_binary_files_of_any_size_are_still_no_text(tmp_path, texts):
    (tmp_path / "a.bin").write_bytes(b"\0" + b"x" * 20_000)
    (tmp_path / "b.txt").write_text("text")
    assert texts(tmp_path, max_document_bytes=10 * KIB) == ["text"]


def test_cells_of_parquet_have_it_too(tmp_path, texts):
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["one", "x" * 20_000]}), path)
    with pytest.raises(UserError, match=r"a\.parquet#2 is longer than the limit of 10,240 bytes"):
        texts(path, max_document_bytes=10 * KIB)
    # 2 kB that hold 100,000 times the same 8 kB
    codes = pa.array([0] * 100_000, pa.int32())
    table = pa.table({"text": pa.DictionaryArray.from_arrays(codes, pa.array(["x" * 8 * KIB]))})
    pq.write_table(table, path, compression="zstd", store_schema=False)
    with pytest.raises(
        UserError, match=r"a\.parquet expands to more than 1,000 times its \d+ bytes"
    ):
        texts(path, max_document_bytes=10 * KIB)


def test_cells_that_are_too_long_on_average_are_not_read(tmp_path, texts):
    """One cell of 4 MB is in a page of its own, which would be decompressed to see its size."""
    pq.write_table(pa.table({"text": ["x" * (4 << 20)]}), tmp_path / "a.parquet")
    with pytest.raises(
        UserError, match=r"cells of column 'text' are longer than the limit of 1,000 b"
    ):
        texts(tmp_path / "a.parquet", max_document_bytes=1000)


def test_a_value_that_many_rows_share_is_in_memory_once(tmp_path):
    """260 rows of 3 MiB: a batch of them would be 780 MiB."""
    codes = pa.array([0] * 260, pa.int32())
    value = "x" * (3 << 20)
    table = pa.table({"text": pa.DictionaryArray.from_arrays(codes, pa.array([value]))})
    pq.write_table(table, tmp_path / "a.parquet", store_schema=False, compression="none")
    code = """
        import sys
        import pyarrow as pa
        from megasink.data.corpus import Corpus
        corpus = Corpus([sys.argv[1]], max_document_bytes=4 << 20)
        print(sum(len(document.text) for document in corpus), pa.default_memory_pool().max_memory())
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path / "a.parquet")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    read, peak = map(int, done.stdout.split())
    assert read == 260 * len(value)
    assert peak < 32 << 20


@pytest.mark.parametrize("line", [b"[" * DEEP + b"]" * DEEP, b'{"text": "x", "a":' + b"[" * DEEP])
def test_json_may_not_be_nested_without_end(tmp_path, texts, line):
    (tmp_path / "a.jsonl").write_bytes(LINE + line)
    with pytest.raises(UserError, match=r"a\.jsonl:2 is nested too deeply"):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("kind", ["pipe", "socket", "device", "folder"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, monkeypatch, kind, named):
    path = tmp_path / "in" / "a.jsonl"
    path.parent.mkdir()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        monkeypatch.chdir(path.parent)  # the path of a socket has 108 bytes
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif not named:
        path.symlink_to("/usr")
    else:
        return
    with pytest.raises(
        ConfigError, match="is not a regular file" if named else rf"jsonl is a.* {kind}"
    ):
        Corpus([path if named else path.parent])


def test_a_pipe_that_takes_the_place_of_a_file(tmp_path):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    corpus = Corpus([tmp_path])
    (tmp_path / "a.jsonl").unlink()
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match=r"a\.jsonl is a named pipe"):
        list(corpus)


def test_the_lock_of_a_dead_run_does_not_block_and_that_of_a_live_one_does(tmp_path, folder):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    holds = (
        "import fcntl, sys, time; f = open(sys.argv[1], 'w'); fcntl.flock(f, fcntl.LOCK_EX); "
        "print(1, flush=True); time.sleep(600)"
    )
    lock = tmp_path / "out.lock"
    command = [sys.executable, "-c", holds, str(lock)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout.readline()
        try:
            with pytest.raises(UserError, match="another run is writing"):
                preprocess(Corpus([tmp_path / "a.jsonl"]), tmp_path / "out", folder, workers=1)
        finally:
            other.kill()
    (tmp_path / "out.bin.partial").write_bytes(b"half")
    assert lock.exists()
    preprocess(Corpus([tmp_path / "a.jsonl"]), tmp_path / "out", folder, workers=1)
    assert {p.name for p in tmp_path.iterdir()} == {"a.jsonl", "out.bin", "out.idx", "out.json"}


def test_a_lock_file_of_somebody_else_is_kept(tmp_path, folder):
    """`--output poetry` beside poetry.lock."""
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "out.lock").write_text("of another program")
    preprocess(Corpus([tmp_path / "a.jsonl"]), tmp_path / "out", folder, workers=1)
    assert (tmp_path / "out.lock").read_text() == "of another program"
    with (tmp_path / "out.lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)


def test_a_link_in_the_place_of_a_partial_file_is_not_written_through(tmp_path, folder):
    (tmp_path / "a.jsonl").write_bytes(LINE)
    (tmp_path / "precious").write_text("keep")
    (tmp_path / "out.bin.partial").symlink_to("precious")
    preprocess(Corpus([tmp_path / "a.jsonl"]), tmp_path / "out", folder, workers=1)
    assert (tmp_path / "precious").read_text() == "keep"


def test_a_trained_tokenizer_may_have_a_bos(tmp_path, documents_with_bos):
    folder = documents_with_bos
    tokenizer = load_tokenizer(folder)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (3, 1, 400)
    assert leading_ids(tokenizer) == [3]
    text = "def f(x):\n    return x <|bos|>"
    ids = tokenizer(text, split_special_tokens=True).input_ids
    assert ids[0] == 3
    assert ids.count(3) == 1
    assert tokenizer.decode(ids, skip_special_tokens=True) == text
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": text}))
    report = preprocess(Corpus([tmp_path / "a.jsonl"]), tmp_path / "out", folder, workers=1)
    sidecar = json.loads((tmp_path / "out.json").read_text())
    assert (sidecar["before_document"], sidecar["after_document"]) == ([3], [1])
    assert sidecar["largest_id"] == report.largest_id == max(*ids, 3)


@pytest.fixture
def documents_with_bos(tmp_path, sources):
    from megasink.data.corpus import Document

    document = Document(sources[3], "test")
    train_tokenizer([document], 400, tmp_path / "bos", bos=True)
    return tmp_path / "bos"
