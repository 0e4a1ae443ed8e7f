"""Damaged folders of transformers, and analyses on disk."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path

from tests.damage.harness import Case, Sound

Edit = Callable[[Path], None]
DEEP = b"[" * 200_000


def _model(command: str, edit: Edit, says: str = "") -> Case:
    """`analyze` or `convert-from-hf` of a copy of the model after `edit` of it."""

    def make(folder: Path, sound: Sound) -> list[str]:
        model = folder / "model"
        shutil.copytree(sound.hf, model)
        edit(model)
        if command == "convert":
            return ["convert-from-hf", str(model), "--output", "{out}"]
        data = ["--data", str(sound.root / "texts.jsonl"), "--device", "cpu"]
        return ["analyze", str(model), *data, "--output", "{out}", "--max-samples", "2"]

    return Case(make, 2, says)


def _report(edit: Edit, says: str = "") -> Case:
    """`report` over the sound analysis and a copy after `edit` of it."""

    def make(folder: Path, sound: Sound) -> list[str]:
        shutil.copytree(sound.analysis, folder / "analysis")
        edit(folder / "analysis")
        return ["report", str(folder / "analysis"), str(sound.analysis), "--output", "{out}"]

    return Case(make, 2, says)


def write(name: str, content: bytes) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).write_bytes(content)

    return edit


def cut(name: str, size: int) -> Edit:
    return lambda folder: os.truncate(folder / name, size)


def gone(name: str) -> Edit:
    return lambda folder: (folder / name).unlink()


def pipe(name: str) -> Edit:
    def edit(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return edit


def entry(name: str, **entries: object) -> Edit:
    """Change entries of a JSON file; None removes one."""

    def edit(folder: Path) -> None:
        path = folder / name
        found = json.loads(path.read_text()) | entries
        path.write_text(json.dumps({k: v for k, v in found.items() if v is not None}))

    return edit


def _huge_header(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(struct.pack("<Q", 1 << 62) + path.read_bytes()[8:])


def _offsets_beyond(folder: Path) -> None:
    path = folder / "model.safetensors"
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    name = next(n for n in header if n != "__metadata__")
    header[name]["data_offsets"] = [0, 1 << 50]
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + content[8 + size :])


CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
CASES = {
    "weights-cut/analyze": _model("analyze", cut(WEIGHTS, 5000)),
    "weights-cut/convert": _model("convert", cut(WEIGHTS, 5000)),
    "weights-empty/convert": _model("convert", write(WEIGHTS, b"")),
    "weights-gone/convert": _model("convert", gone(WEIGHTS)),
    "weights-pipe/convert": _model("convert", pipe(WEIGHTS)),
    "weights-header/analyze": _model("analyze", _huge_header),
    "weights-header/convert": _model("convert", _huge_header),
    "weights-offsets/convert": _model("convert", _offsets_beyond),
    "config-cut/analyze": _model("analyze", write(CONFIG, b'{"model_type": ')),
    "config-cut/convert": _model("convert", write(CONFIG, b'{"model_type": ')),
    "config-deep/analyze": _model("analyze", write(CONFIG, DEEP)),
    "config-deep/convert": _model("convert", write(CONFIG, DEEP)),
    "config-list/analyze": _model("analyze", write(CONFIG, b"[]")),
    "config-list/convert": _model("convert", write(CONFIG, b"[]")),
    "config-bytes/analyze": _model("analyze", write(CONFIG, b"\xff\xfe")),
    "config-pipe/analyze": _model("analyze", pipe(CONFIG)),
    "config-no-heads/convert": _model("convert", entry(CONFIG, num_attention_heads=0)),
    "config-words/convert": _model("convert", entry(CONFIG, hidden_size="wide")),
    "config-words/analyze": _model("analyze", entry(CONFIG, hidden_size="wide")),
    "config-huge/analyze": _model("analyze", entry(CONFIG, hidden_size=1 << 40)),
    "tokenizer-cut/analyze": _model("analyze", cut(TOKENIZER, 1000)),
    "results-cut/report": _report(write("results.json", b'{"format": 2, ')),
    "results-list/report": _report(write("results.json", b"[]")),
    "results-deep/report": _report(write("results.json", DEEP)),
    "results-bytes/report": _report(write("results.json", b"\xff\xfe")),
    "results-no-model/report": _report(entry("results.json", model=None)),
    "results-no-datasets/report": _report(entry("results.json", datasets=None)),
    "samples-cut/report": _report(cut("samples.npz", 300)),
    "samples-gone/report": _report(gone("samples.npz")),
    "samples-text/report": _report(write("samples.npz", b"no arrays")),
    "geometry-text/report": _report(write("geometry.npz", b"no arrays")),
}
