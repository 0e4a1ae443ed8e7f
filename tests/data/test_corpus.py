import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megasink.data.corpus import Corpus
from megasink.errors import ConfigError, UserError

TEXTS = ["one", "  two\r\n\ttabs ", "três 漢字 🙂", "nul \0 in JSON"]
LINES = "".join(json.dumps({"text": t, "other": 1}) + "\n" for t in TEXTS).encode()


def write_parquet(path, column, texts=TEXTS):
    pq.write_table(pa.table({"id": range(len(texts)), column: texts}), path, row_group_size=2)


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", LINES),
        ("a.ndjson", LINES.rstrip()),
        ("a.json", b"\xef\xbb\xbf" + LINES),
        ("a.jsonl.gz", gzip.compress(LINES)),
        ("two_members.jsonl.gz", gzip.compress(LINES[:20]) + gzip.compress(LINES[20:])),
        ("a.jsonl.zst", zstandard.compress(LINES)),
        ("two_frames.jsonl.zst", zstandard.compress(LINES[:9]) + zstandard.compress(LINES[9:])),
        ("blank.jsonl", LINES.replace(b"}\n", b"}\n\n \n")),
    ],
)
def test_json_lines_in_every_form(tmp_path, texts, name, data):
    (tmp_path / name).write_bytes(data)
    assert texts(tmp_path / name) == TEXTS
    assert texts(tmp_path) == TEXTS


def test_parquet_row_by_row(tmp_path, texts):
    write_parquet(tmp_path / "a.parquet", "content", [*TEXTS, None])
    dictionary = pa.table({"content": pa.array(TEXTS).dictionary_encode()})
    pq.write_table(dictionary, tmp_path / "b.parquet")
    corpus = Corpus([tmp_path], json_key="content")
    documents = list(corpus)
    assert [d.text for d in documents] == TEXTS + TEXTS
    assert documents[1].source == f"{tmp_path / 'a.parquet'}#2"
    assert corpus.skipped.empty == 1
    assert corpus.read_bytes == corpus.total_bytes


def test_a_text_file_is_one_document_unchanged(tmp_path, texts):
    text = "  first\r\n\tsecond\ufeff\r  \n\n\ufffd"
    (tmp_path / "program.py").write_bytes(text.encode())
    assert texts(tmp_path / "program.py") == [text]


def test_folders_are_sorted_by_parts_and_leave_out_hidden_names(tmp_path, texts):
    for name in [
        "b.txt",
        "a/z.md",
        "a/y/x.c",
        "a-b/q",
        ".git/config",
        "a/.hidden",
        "__pycache__/k",
    ]:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path) == ["a/y/x.c", "a/z.md", "a-b/q", "b.txt"]
    assert texts(tmp_path / "b.txt", tmp_path / "a") == ["b.txt", "a/y/x.c", "a/z.md"]


def test_json_in_a_folder_is_records_only_if_its_first_line_is_one(tmp_path, texts):
    pretty = json.dumps({"text": "settings"}, indent=1)
    (tmp_path / "pretty.json").write_text(pretty)
    (tmp_path / "other.json").write_text('{"name": "package"}')
    (tmp_path / "records.json").write_bytes(LINES)
    assert texts(tmp_path) == ['{"name": "package"}', pretty, *TEXTS]


def test_what_is_not_utf8_is_counted(tmp_path):
    (tmp_path / "a.txt").write_bytes("señal".encode("latin-1"))
    (tmp_path / "b.tar").write_bytes(b"name\0\0\0text")
    (tmp_path / "c.jsonl").write_bytes(b'{"text": "ok"}\n{"text": "\xff"}\n{"text": "\\ud800"}\n')
    (tmp_path / "d.txt").write_bytes(b"")
    corpus = Corpus([tmp_path])
    assert [d.text for d in corpus] == ["ok"]
    assert (corpus.skipped.invalid_utf8, corpus.skipped.empty) == (4, 1)
    assert corpus.skipped.examples[-1] == f"{tmp_path / 'c.jsonl'}:3"


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        (
            "a.jsonl",
            b'{"text": "x"}\n{"text": \n',
            r"a\.jsonl:2 is not valid JSON .*one JSON object",
        ),
        ("a.jsonl", b'["x"]\n', r"a\.jsonl:1 is a JSON list, not an object"),
        ("a.jsonl", b'{"b": 1, "a": 2}\n', r"'text': pass --json-key with one of \['a', 'b'\]"),
        ("a.jsonl", b'{"text": 3}\n', r"a\.jsonl:1: 'text' is a JSON number, not a string"),
        ("a.json", b'{\n "text": "x"\n}', r"a\.json:1 is not valid JSON"),
        ("a.jsonl.gz", gzip.compress(LINES)[:-9], r"a\.jsonl\.gz cannot be read: Truncated"),
        ("a.jsonl.gz", b"plain", r"a\.jsonl\.gz cannot be read: zlib"),
        ("a.jsonl.zst", zstandard.compress(LINES * 9)[:-1], r"zst cannot be read: Truncated"),
        ("a.parquet", b"PAR1 no PAR1", r"a\.parquet is not a readable parquet file"),
        ("a.txt", b"", r"no document in .* 1 file, 1 are empty and 0 are not UTF-8"),
        ("a.txt", b"\xff", r"no document in .* 1 file, 0 are empty and 1 are not UTF-8"),
    ],
)
def test_bad_data_is_named_with_its_place(tmp_path, name, data, message):
    (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match=message):
        list(Corpus([tmp_path / name]))


def test_parquet_columns_that_are_missing_or_no_text(tmp_path):
    write_parquet(tmp_path / "a.parquet", "body")
    with pytest.raises(UserError, match=r"no column 'text': .* one of \['body', 'id'\]"):
        list(Corpus([tmp_path]))
    with pytest.raises(UserError, match="column 'id' contains int64, not strings"):
        list(Corpus([tmp_path], json_key="id"))


def test_missing_inputs_are_reported_together(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "dangling").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError) as caught:
        Corpus([tmp_path / "absent", tmp_path / "folder", "/dev/null"])
    absent, dangling, device = caught.value.problems
    assert "absent does not exist" in absent
    assert "dangling cannot be read: No such file" in dangling
    assert "/dev/null is not a regular file" in device


def test_a_link_out_of_a_folder_is_refused_and_one_that_is_named_is_read(tmp_path):
    (tmp_path / "secret.txt").write_text("of another folder")
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "own.txt").write_text("of this folder")
    (folder / "inside.txt").symlink_to("own.txt")
    assert [document.text for document in Corpus([folder])] == ["of this folder"] * 2
    (folder / "outside.txt").symlink_to("../secret.txt")
    with pytest.raises(UserError, match=r"outside\.txt is a link to .*secret\.txt, outside "):
        Corpus([folder])
    named = Corpus([folder / "outside.txt"])
    assert [document.text for document in named] == ["of another folder"]
    (tmp_path / "folder-link").symlink_to("folder")
    (folder / "outside.txt").unlink()
    assert len(list(Corpus([tmp_path / "folder-link"]))) == 2
