"""Damaged runs and checkpoints, for the commands that read them."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from tests.damage.harness import Case, Sound
from tests.damage.sound import training

Edit = Callable[[Path], None]
DEEP = b"[" * 200_000


def _case(command: str, edit: Edit, says: str = "", code: int = 2) -> Case:
    """A command on a copy of the run after `edit` of it."""

    def make(folder: Path, sound: Sound) -> list[str]:
        run = folder / "run"
        shutil.copytree(sound.run, run)
        edit(run)
        if command == "resume":
            flags = ["--run-dir", str(run), "--data-path", str(sound.data), "--resume"]
            return training(sound, *flags, "--override-opt-param-scheduler", iterations=3)
        tokenizer = ["--tokenizer", str(sound.tokenizer)]
        return {
            "generate": ["generate", run, "--prompt", "Text", "--device", "cpu", *tokenizer],
            "analyze": [
                *["analyze", run, "--data", sound.root / "texts.jsonl", "--output", "{out}"],
                *["--device", "cpu", *tokenizer],
            ],
            "convert": ["convert-to-hf", run, "--output", "{out}", *tokenizer, "--no-verify"],
            "curves": ["compare", run],
            "compare": ["compare", run, sound.run, "--output", "{out}"],
        }[command]

    return Case(make, code, says, writes=command == "resume")


def _newest(run: Path) -> Path:
    return run / "checkpoints" / "iter_0000002"


def _shards(run: Path) -> list[Path]:
    return sorted(_newest(run).glob("*.distcp"))


def _alone(run: Path) -> None:
    """The newest checkpoint is the only one: there is none to fall back to."""
    shutil.rmtree(run / "checkpoints" / "iter_0000001", ignore_errors=True)


def alone(edit: Edit) -> Edit:
    def both(run: Path) -> None:
        _alone(run)
        edit(run)

    return both


def write(name: str, content: bytes) -> Edit:
    return lambda run: _write(run / name, content)


def _write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


def in_newest(name: str, content: bytes | None) -> Edit:
    """Replace a file of the newest checkpoint; None removes it."""

    def edit(run: Path) -> None:
        path = _newest(run) / name
        path.unlink(missing_ok=True)
        if content is not None:
            path.write_bytes(content)

    return edit


def _cut_shards(run: Path) -> None:
    for path in _shards(run):
        os.truncate(path, path.stat().st_size // 2)


def _swapped_shards(run: Path) -> None:
    """The weights of another step under the index of this one, a byte short."""
    other = sorted((run / "checkpoints" / "iter_0000001").glob("*.distcp"))[0]
    _shards(run)[0].write_bytes(other.read_bytes()[1:])
    _alone(run)


def _garbage_shards(run: Path) -> None:
    for path in _shards(run):
        path.write_bytes(os.urandom(path.stat().st_size))


def _shard_is_pipe(run: Path) -> None:
    path = _shards(run)[0]
    path.unlink()
    os.mkfifo(path)


def _without_shards(run: Path) -> None:
    for path in _shards(run):
        path.unlink()


def _metadata_of_pickle(run: Path) -> None:
    (_newest(run) / ".metadata").write_bytes(b"cos\nsystem\n(S'true'\ntR.")


def _flipped_metadata(run: Path) -> None:
    path = _newest(run) / ".metadata"
    content = bytearray(path.read_bytes())
    for at in range(100, len(content), 97):
        content[at] ^= 0x41
    path.write_bytes(content)


def _other_shape(run: Path) -> None:
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"hidden_size": 32', '"hidden_size": 64'))


def _arguments(text: bytes) -> Edit:
    return write("config.json", b'{"arguments": ' + text + b"}")


def _tracker_is_folder(run: Path) -> None:
    (run / TRACKER).unlink()
    (run / TRACKER).mkdir()


TRACKER = "checkpoints/latest_checkpointed_iteration.txt"
CASES = {
    "shards-cut/generate": _case("generate", alone(_cut_shards)),
    "shards-cut/convert": _case("convert", alone(_cut_shards)),
    "shards-cut/resume": _case("resume", alone(_cut_shards)),
    "shards-missing/generate": _case("generate", alone(_without_shards)),
    "shards-missing/analyze": _case("analyze", alone(_without_shards)),
    "shards-swapped/convert": _case("convert", _swapped_shards),
    "shards-garbage/generate": _case("generate", alone(_garbage_shards)),
    "shard-is-a-pipe/convert": _case("convert", alone(_shard_is_pipe)),
    "metadata-missing/generate": _case("generate", alone(in_newest(".metadata", None))),
    "metadata-empty/convert": _case("convert", alone(in_newest(".metadata", b""))),
    "metadata-text/analyze": _case("analyze", alone(in_newest(".metadata", b"no pickle"))),
    "metadata-code/generate": _case("generate", alone(_metadata_of_pickle)),
    "metadata-flipped/convert": _case("convert", alone(_flipped_metadata)),
    "metadata-missing/resume": _case("resume", alone(in_newest(".metadata", None))),
    "tracker-a-folder/generate": _case("generate", _tracker_is_folder),
    "format-missing/generate": _case("generate", alone(in_newest("metadata.json", None))),
    "format-deep/generate": _case("generate", alone(in_newest("metadata.json", DEEP))),
    "tracker-text/generate": _case("generate", write(TRACKER, b"soon")),
    "tracker-bytes/generate": _case("generate", write(TRACKER, b"\xff\xfe")),
    "tracker-missing-step/analyze": _case("analyze", write(TRACKER, b"77")),
    "tracker-huge/generate": _case("generate", write(TRACKER, b"9" * 5000)),
    "tracker-empty/resume": _case("resume", write(TRACKER, b""), code=0),
    "config-cut/generate": _case("generate", write("config.json", b'{"arguments": {')),
    "config-deep/generate": _case("generate", write("config.json", DEEP)),
    "config-deep/analyze": _case("analyze", write("config.json", DEEP)),
    "config-list/generate": _case("generate", write("config.json", b"[]")),
    "config-number/analyze": _case("analyze", write("config.json", b"3")),
    "config-bytes/convert": _case("convert", write("config.json", b"\xff\xfe\0")),
    "config-empty/convert": _case("convert", _arguments(b"{}")),
    "config-null/generate": _case("generate", _arguments(b"null")),
    "config-wrong-types/generate": _case("generate", _arguments(b'{"num_layers": "two"}')),
    "config-other-shape/generate": _case("generate", _other_shape),
    "config-other-shape/convert": _case("convert", _other_shape),
    "metrics-cut/curves": _case("curves", write("metrics.jsonl", b'{"iteration": 1, "lm_'), ""),
    "metrics-list/curves": _case("curves", write("metrics.jsonl", b"[1]\n")),
    "metrics-deep/curves": _case("curves", write("metrics.jsonl", DEEP + b"\n")),
    "metrics-bytes/compare": _case("compare", write("metrics.jsonl", b"\xff\xfe\n")),
    "metrics-words/compare": _case(
        "compare", write("metrics.jsonl", b'{"iteration": "one", "lm_loss": "low"}\n')
    ),
    "metrics-empty/compare": _case("compare", write("metrics.jsonl", b"")),
}
