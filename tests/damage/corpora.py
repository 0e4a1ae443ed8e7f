"""Damaged and hostile corpora, and tokenizers, for `megasink data`."""

import gzip
import io
import json
import os
import random
import struct
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.damage.harness import Case, Sound

LINE = json.dumps({"text": "a text of several words"}).encode() + b"\n"
LINES = LINE * 50
MIB = 1 << 20


def _data(folder: Path, sound: Sound, *flags: str) -> list[str]:
    options = ["--output", "{out}/text", "--tokenizer", str(sound.tokenizer), "--workers", "1"]
    return ["data", str(folder), *options, *flags]


def _file(name: str, content: bytes, *flags: str, named: bool = True) -> Callable[..., list[str]]:
    def make(folder: Path, sound: Sound) -> list[str]:
        (folder / name).write_bytes(content)
        return _data(folder / name if named else folder, sound, *flags)

    return make


def _long_line(name: str, begin: bytes, *flags: str) -> Callable[..., list[str]]:
    """A line without an end: 3 GiB of it where that is asked for."""

    def make(folder: Path, sound: Sound) -> list[str]:
        pieces = 3 * 1024 if sound.large else 9
        limit = [] if sound.large else ["--max-document-bytes", str(4 * MIB)]
        path = folder / name
        with path.open("wb") as raw:
            if name.endswith(".gz"):
                out = gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1)
            elif name.endswith(".zst"):
                out = zstandard.ZstdCompressor(level=1).stream_writer(raw, closefd=False)
            else:
                out = raw
            out.write(begin)
            for _ in range(pieces):
                out.write(b"x" * MIB)
            if out is not raw:
                out.close()
        return _data(path, sound, *limit, *flags)

    return make


def _sparse(name: str) -> Callable[..., list[str]]:
    def make(folder: Path, sound: Sound) -> list[str]:
        with (folder / name).open("wb") as file:
            file.truncate(1 << 40)
        return _data(folder / name, sound)

    return make


def _link(target: str, name: str = "text.txt", named: bool = False) -> Callable[..., list[str]]:
    def make(folder: Path, sound: Sound) -> list[str]:
        (folder / name).symlink_to(target)
        return _data(folder / name if named else folder, sound)

    return make


def _parquet(write: Callable[[Path, Sound], None]) -> Callable[..., list[str]]:
    def make(folder: Path, sound: Sound) -> list[str]:
        write(folder / "a.parquet", sound)
        limit = [] if sound.large else ["--max-document-bytes", "100000"]
        return _data(folder / "a.parquet", sound, *limit)

    return make


def _table(path: Path, array: pa.Array, **options: object) -> None:
    pq.write_table(pa.table({"text": array}), path, compression="zstd", **options)


def _dictionary_bomb(path: Path, sound: Sound) -> None:
    value = "x" * (64 * MIB if sound.large else 60_000)
    array = pa.DictionaryArray.from_arrays(pa.array([0] * 100_000, pa.int32()), pa.array([value]))
    _table(path, array, store_schema=False)


def _one_value(path: Path, sound: Sound) -> None:
    _table(path, pa.array(["x" * (1500 * MIB if sound.large else MIB)]), use_dictionary=False)


def _prefix_bomb(path: Path, sound: Sound) -> None:
    size = 8 * MIB if sound.large else 60_000
    array = pa.array(["x" * size] * 200)
    _table(path, array, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"})


def _damaged_parquet(seed: int) -> Callable[..., list[str]]:
    def make(folder: Path, sound: Sound) -> list[str]:
        whole = io.BytesIO()
        words = [f"text {i} of many" * (i % 7) for i in range(500)]
        pq.write_table(pa.table({"text": words}), whole, compression="snappy")
        content, rng = bytearray(whole.getvalue()), random.Random(seed)
        for _ in range(30):
            content[rng.randrange(4, len(content) - 8)] = rng.randrange(256)
        (folder / "a.parquet").write_bytes(content)
        return _data(folder / "a.parquet", sound)

    return make


def _huge_footer(path: Path, sound: Sound) -> None:
    path.write_bytes(b"PAR1" + b"\0" * 100 + struct.pack("<I", 0x7FFFFFF0) + b"PAR1")


def _zstd_window() -> bytes:
    """A frame that asks for a window of 2 GB."""
    options = zstandard.ZstdCompressionParameters(window_log=31, enable_ldm=True)
    compressor = zstandard.ZstdCompressor(compression_params=options).compressobj()
    return compressor.compress(LINES) + compressor.flush()


def _tar(name: str) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        info = tarfile.TarInfo(name)
        info.size = 5
        archive.addfile(info, io.BytesIO(b"hello"))
    return out.getvalue()


def _name(name: bytes) -> Callable[..., list[str]]:
    def make(folder: Path, sound: Sound) -> list[str]:
        Path(os.fsdecode(os.fsencode(folder) + b"/" + name)).write_bytes(b"\xff\xfe no text")
        return _data(folder, sound)

    return make


def _listed(folder: Path, sound: Sound) -> list[str]:
    """Beside a text: the summary names what was skipped."""
    (folder / "good.txt").write_text("a text")
    return _name(b"a\xff\x1b[31m.txt")(folder, sound)


def _tokenizer(name: str, content: bytes) -> Callable[..., list[str]]:
    def make(folder: Path, sound: Sound) -> list[str]:
        for path in sound.tokenizer.iterdir():
            (folder / path.name).write_bytes(path.read_bytes())
        (folder / name).write_bytes(content)
        (folder / "texts.jsonl").write_bytes(LINES)
        argv = _data(folder / "texts.jsonl", sound)
        return [str(folder) if a == str(sound.tokenizer) else a for a in argv]

    return make


def _trained(content: bytes) -> Callable[..., list[str]]:
    """The same, while a tokenizer is trained: nothing of it stays."""

    def make(folder: Path, sound: Sound) -> Sequence[str]:
        (folder / "a.jsonl").write_bytes(content)
        return ["data", str(folder / "a.jsonl"), "--output", "{out}/x", "--train-tokenizer", "330"]

    return make


def _unreadable(folder: Path, sound: Sound) -> list[str]:
    (folder / "a.jsonl").write_bytes(LINES)
    (folder / "b.jsonl").symlink_to("b.jsonl")  # a link to itself; root reads any file
    return _data(folder, sound)


DEEP = 200_000
# What a reader of one format refuses is in tests/data: these do more than that to a command.
CASES = {
    "json-deep-objects": Case(
        _file("a.jsonl", b'{"text": "x", "a":' + b'{"a":' * DEEP + b"1" + b"}" * DEEP + b"}"),
        says="a.jsonl:1 is nested too deeply",
    ),
    "json-deep-open": Case(_file("a.jsonl", b"[" * DEEP), says="a.jsonl:1"),
    "json-deep-in-folder": Case(_file("a.json", b"[" * DEEP + b"]" * DEEP, named=False), code=0),
    "json-many-values": Case(
        _file("a.jsonl", b'{"text": "x", "a": [' + b"[]," * (5 << 20) + b"1]}"),
        says="a.jsonl:1 has more than",
    ),
    "json-commas-in-text": Case(
        _file("a.jsonl", json.dumps({"text": "a,b\\[{" * (1 << 20)}).encode()), code=0
    ),
    "json-huge-number": Case(
        _file("a.jsonl", b'{"text": "x", "n": ' + b"9" * 10_000 + b"}"), says="a.jsonl:1"
    ),
    "json-many-keys": Case(
        _file("a.jsonl", json.dumps({f"key {i}": i for i in range(10_000)}).encode()),
        says="has no key 'text'",
    ),
    "json-utf16": Case(_file("a.jsonl", LINES.decode().encode("utf-16")), says="a.jsonl"),
    "json-nul": Case(_file("a.jsonl", b"\0" * 1000 + b"\n"), says="a.jsonl:1 is not valid JSON"),
    "json-surrogates": Case(_file("a.jsonl", b'{"text": "\\ud800"}\n'), says="no document"),
    "line-long": Case(_long_line("a.jsonl", b'{"text": "'), says="a.jsonl:1 is longer than"),
    "line-long-gz": Case(_long_line("a.jsonl.gz", LINE + b'"'), says="a.jsonl.gz:2 is longer"),
    "line-long-zst": Case(_long_line("a.jsonl.zst", b'{"'), says="a.jsonl.zst:1 is longer than"),
    "text-long": Case(_long_line("a.txt", b"x"), says="a.txt is longer than"),
    "text-long-gz": Case(_long_line("a.txt.gz", b"x"), says="a.txt.gz is longer than"),
    "text-long-zst": Case(_long_line("a.md.zst", b"x"), says="a.md.zst is longer than"),
    "text-long-trained": Case(
        lambda f, s: (
            [
                *[
                    a
                    for a in _long_line("a.txt", b"x")(f, s)
                    if a not in ("--tokenizer", s.tokenizer)
                ],
            ]
            and [
                *["data", str(f / "a.txt"), "--output", "{out}/x", "--train-tokenizer", "330"],
                *([] if s.large else ["--max-document-bytes", "1000"]),
            ]
        ),
        says="a.txt is longer than",
    ),
    "blank-lines": Case(
        _file("a.jsonl.gz", gzip.compress(b"\n" * (2 * MIB)), "--max-document-bytes", str(MIB)),
        says="bytes of blank lines",
    ),
    "sparse-text": Case(_sparse("a.txt"), says="no document"),
    "sparse-lines": Case(_sparse("a.jsonl"), says="a.jsonl:1 is longer than"),
    "gz-crc": Case(
        _file("a.jsonl.gz", gzip.compress(LINES)[:-8] + b"\0" * 8), says="cannot be read"
    ),
    "gz-tar": Case(_file("a.tar.gz", _tar("x"), named=False), says="no document"),
    "gz-empty": Case(_file("a.jsonl.gz", b""), says="no document"),
    "zst-window": Case(_file("a.jsonl.zst", _zstd_window()), says="a.jsonl.zst cannot be read"),
    "zst-garbage-after": Case(
        _file("a.jsonl.zst", zstandard.compress(LINES) + b"garbage"), says="a.jsonl.zst"
    ),
    "parquet-dictionary-bomb": Case(_parquet(_dictionary_bomb), says="1,000 times"),
    "parquet-one-value": Case(_parquet(_one_value), says="a.parquet"),
    "parquet-prefix-bomb": Case(_parquet(_prefix_bomb), says="1,000 times"),
    "parquet-huge-footer": Case(_parquet(_huge_footer), says="a.parquet is not a readable"),
    "dev-zero-behind-link": Case(_link("/dev/zero"), says="text.txt is a device"),
    "dev-zero-named": Case(_link("/dev/zero", named=True), says="is not a regular file"),
    "dev-zero-jsonl": Case(_link("/dev/zero", "a.jsonl.gz"), says="a.jsonl.gz is a device"),
    "kernel-memory": Case(_link("/proc/self/mem"), says="text.txt"),
    "link-to-folder": Case(_link("/usr"), says="is a link to a folder"),
    "link-dangling": Case(_link("/nowhere"), says="text.txt cannot be read: No such file"),
    "link-to-itself": Case(_unreadable, says="b.jsonl"),
    "name-with-escapes": Case(_name(b"a\x1b[31m\n.txt"), says="no document"),
    "name-not-utf8": Case(_name(b"a\xff.txt"), says="no document"),
    "name-in-summary": Case(_listed, code=0),
    "tokenizer-truncated": Case(_tokenizer("tokenizer.json", b'{"version": "1.0", "mod'), says="h"),
    "tokenizer-empty": Case(_tokenizer("tokenizer.json", b""), says="cannot load the tokenizer"),
    "tokenizer-list": Case(_tokenizer("tokenizer.json", b"[1]"), says="cannot load the tokenizer"),
    "tokenizer-deep": Case(
        _tokenizer("tokenizer.json", b"[" * DEEP), says="cannot load the tokenizer"
    ),
    "tokenizer-config": Case(_tokenizer("tokenizer_config.json", b"\xff"), says="tokenizer"),
    "tokenizer-no-eod": Case(_tokenizer("tokenizer_config.json", b"{}"), says="tokenizer"),
    "trained-on-bad-json": Case(_trained(LINES + b"{"), says="a.jsonl:51 is not valid JSON"),
    "trained-on-nothing": Case(_trained(b"\n \n"), says="no document"),
}
CASES |= {f"parquet-bytes-{i}": Case(_damaged_parquet(i), says="a.parquet") for i in range(4)}
