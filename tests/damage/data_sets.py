"""Damaged `.bin` and `.idx` files, and lists of them, for training."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megasink.data.indexed_dataset import _sampled_slices
from tests.damage.harness import Case, Sound
from tests.damage.sound import training

HEADER = 34
Edit = Callable[[Path], None]


def _case(edit: Edit, says: str, code: int = 2, sidecar: bool = False, *flags: str) -> Case:
    """Train on a copy of the data set after `edit` of its prefix."""

    def make(folder: Path, sound: Sound) -> list[str]:
        prefix = folder / "text"
        for suffix in (".bin", ".idx", *([".json"] if sidecar else [])):
            shutil.copy(sound.data.with_name(f"text{suffix}"), folder)
        edit(prefix)
        return training(sound, "--data-path", str(prefix), "--data-cache-path", "{out}", *flags)

    return Case(make, code, says)


def bytes_at(suffix: str, offset: int, content: bytes) -> Edit:
    def edit(prefix: Path) -> None:
        with prefix.with_name(prefix.name + suffix).open("r+b") as file:
            file.seek(offset, os.SEEK_SET if offset >= 0 else os.SEEK_END)
            file.write(content)

    return edit


def cut(suffix: str, size: int) -> Edit:
    def edit(prefix: Path) -> None:
        os.truncate(prefix.with_name(prefix.name + suffix), size)

    return edit


def in_part(part: str, at: int, value: int) -> Edit:
    """Set an entry of the lengths, pointers or ends of an index."""

    def edit(prefix: Path) -> None:
        path = prefix.with_name(prefix.name + ".idx")
        count = struct.unpack("<Q", path.read_bytes()[18:26])[0]
        kind, start = {"lengths": ("<i4", 0), "pointers": ("<i8", 4), "ends": ("<i8", 12)}[part]
        size = np.dtype(kind).itemsize
        place = at if at >= 0 else count + (part == "ends") + at
        content = np.array([value], kind).tobytes()
        bytes_at(".idx", HEADER + start * count + size * place, content)(prefix)

    return edit


def _id(value: int, at: int) -> Edit:
    return bytes_at(".bin", 2 * at, struct.pack("<H", value))


def _signed(prefix: Path) -> None:
    """The same tokens as int32, one of them negative."""
    path = prefix.with_name("text.bin")
    tokens = np.fromfile(path, np.uint16).astype(np.int32)
    tokens[7] = -5
    tokens.tofile(path)
    index = prefix.with_name("text.idx")
    bytes_at(".idx", 17, b"\x04")(prefix)
    count = struct.unpack("<Q", index.read_bytes()[18:26])[0]
    pointers = np.frombuffer(index.read_bytes(), "<i8", count, HEADER + 4 * count) * 2
    bytes_at(".idx", HEADER + 4 * count, pointers.tobytes())(prefix)


def _replace(suffix: str, make: Callable[[Path], None]) -> Edit:
    def edit(prefix: Path) -> None:
        path = prefix.with_name(prefix.name + suffix)
        path.unlink()
        make(path)

    return edit


def _all_lengths_zero(prefix: Path) -> None:
    path = prefix.with_name("text.idx")
    count = struct.unpack("<Q", path.read_bytes()[18:26])[0]
    bytes_at(".idx", HEADER, b"\0" * 4 * count)(prefix)


def _sidecar(content: bytes) -> Edit:
    return lambda prefix: _write(prefix.with_name("text.json"), content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def _sidecar_entry(**entries: object) -> Edit:
    def edit(prefix: Path) -> None:
        path = prefix.with_name("text.json")
        path.write_text(json.dumps(json.loads(path.read_text()) | entries))

    return edit


def _listed(flag: str, content: bytes, says: str) -> Case:
    def make(folder: Path, sound: Sound) -> list[str]:
        (folder / "list").write_bytes(content)
        return [a for a in training(sound, flag, str(folder / "list")) if a not in _SPLIT]

    return Case(make, 2, says)


def _between(prefix: Path) -> None:
    """Three million tokens, all of them beyond the vocabulary where nobody looks before step 1."""
    count = 3 << 20
    tokens = np.full(count, 60_000, np.uint16)
    for part in _sampled_slices(count):
        tokens[part] = 7
    tokens.tofile(prefix.with_name("text.bin"))
    lengths = np.full(count // 1024, 1024, "<i4")
    pointers = np.arange(len(lengths), dtype="<i8") * 2048
    ends = np.arange(len(lengths) + 1, dtype="<i8")
    head = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(ends))
    arrays = b"".join(part.tobytes() for part in (lengths, pointers, ends))
    prefix.with_name("text.idx").write_bytes(head + arrays)


def _cut_caches(folder: Path, sound: Sound) -> list[str]:
    """What a kill leaves of the sample indices that Megatron writes in place: they are remade."""
    cache = sound.run / "data-cache"
    caches = list(cache.glob("*.npy"))
    assert caches
    for path in caches:
        os.truncate(path, path.stat().st_size // 2)
    return training(sound, "--data-path", str(sound.data), "--data-cache-path", str(cache))


_SPLIT = ("--split", "70,30,0")
CASES = {
    "bin-short": _case(cut(".bin", 100), "text.bin has 100 bytes: it is cut short"),
    "bin-short-by-a-byte": _case(lambda p: cut(".bin", _size(p, ".bin") - 1)(p), "cut short"),
    "bin-empty": _case(cut(".bin", 0), "text.bin has 0 bytes"),
    "bin-is-a-pipe": _case(_replace(".bin", os.mkfifo), "text.bin"),
    "bin-is-a-folder": _case(_replace(".bin", Path.mkdir), "text.bin"),
    "bin-is-a-device": _case(_replace(".bin", lambda p: p.symlink_to("/dev/zero")), "text.bin"),
    "idx-empty": _case(cut(".idx", 0), "text.idx is cut short: it has 0 bytes"),
    "idx-header-alone": _case(cut(".idx", HEADER), "text.idx has 34 bytes"),
    "idx-short": _case(lambda p: cut(".idx", _size(p, ".idx") - 8)(p), "text.idx has"),
    "idx-of-text": _case(bytes_at(".idx", 0, b"no index at all, text"), "is not a Megatron index"),
    "idx-version": _case(bytes_at(".idx", 9, b"\x02"), "is not a Megatron index"),
    "idx-dtype": _case(bytes_at(".idx", 17, b"\x63"), "has the token type 99"),
    "idx-dtype-float": _case(bytes_at(".idx", 17, b"\x06"), "has the token type 6"),
    "idx-dtype-wider": _case(bytes_at(".idx", 17, b"\x05"), "sequence"),
    "idx-count-huge": _case(bytes_at(".idx", 18, b"\xff" * 8), "sequences and"),
    "idx-count-none": _case(bytes_at(".idx", 18, b"\0" * 16), "text.idx"),
    "idx-is-a-pipe": _case(_replace(".idx", os.mkfifo), "text.idx"),
    "length-negative": _case(in_part("lengths", 3, -7), "sequence 3 has -7 tokens"),
    "length-huge": _case(in_part("lengths", 3, 2**31 - 1), "sequence 3 has 2,147,483,647 tokens"),
    "lengths-zero": _case(_all_lengths_zero, "--split"),
    "pointer-beyond": _case(in_part("pointers", -1, 10**9), "starting at byte 1,000,000,000"),
    "pointer-overflow": _case(in_part("pointers", 2, 2**63 - 1), "sequence 2"),
    "pointer-negative": _case(in_part("pointers", 2, -2), "sequence 2"),
    "documents-first": _case(in_part("ends", 0, 1), "documents from sequence 1"),
    "documents-last": _case(in_part("ends", -1, 10**6), "to 1000000"),
    "documents-falling": _case(in_part("ends", 3, 0), "document 3 begins before"),
    "id-beyond": _case(_id(60_000, 20), "text.bin contains the id 60,000 at token 20"),
    "id-first-beyond": _case(_id(330, 5), "the vocabulary has only 330"),
    "id-between": _case(_between, "contains the id 60,000, but the vocabulary has only 330"),
    "caches-cut": Case(_cut_caches, code=0),
    "id-negative": _case(_signed, "text.bin contains the id -5 at token 7"),
    "sidecar-id": _case(
        _sidecar_entry(largest_id=330), "contains the id 330 according to", sidecar=True
    ),
    "sidecar-tokens": _case(_sidecar_entry(tokens=5), "states 5 tokens", sidecar=True),
    "sidecar-list": _case(_sidecar(b"[]"), "does not describe", sidecar=True),
    "sidecar-deep": _case(_sidecar(b"[" * 200_000), "does not describe", sidecar=True),
    "sidecar-bytes": _case(_sidecar(b"\xff\xfe"), "does not describe", sidecar=True),
    "sidecar-half": _case(_sidecar(b'{"tokenizer": 3}'), "does not describe", sidecar=True),
    "list-missing-data": _listed("--data-args-path", b"1 /nowhere/a", "/nowhere/a"),
    "list-not-text": _listed("--data-args-path", b"\xff\xfe", "--data-args-path"),
    "list-not-json": _listed("--per-split-data-args-path", b"{", "is not JSON"),
}


def _size(prefix: Path, suffix: str) -> int:
    return prefix.with_name(prefix.name + suffix).stat().st_size
