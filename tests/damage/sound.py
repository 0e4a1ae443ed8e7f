"""What is damaged: a tokenizer, a data set, a run with checkpoints, a model, and its analysis."""

import json
import shutil
import textwrap
from pathlib import Path

from tests.damage.harness import Case, Sound, forked, judge

MODEL = """
--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 64 --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --eval-interval 2
--eval-iters 1 --split 70,30,0 --save-interval 1 --num-workers 0 --log-interval 1
""".split()
# What `analyze`, `ablate` and `sweep` are told, and the first of the results that each writes.
FLAGS = {
    "analyze": ["--max-samples", "3", "--seq-length", "16"],
    "ablate": [
        *("--max-samples", "2", "--seq-length", "16", "--score", "awft", "--zeroed", "25"),
        *("--seeds", "1", "--layer", "0"),
    ],
    "sweep": ["--max-samples", "2", "--lengths", "4", "6"],
}
RESULTS = {"analyze": "results.json", "ablate": "ablation.json", "sweep": "sweep.json"}
TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(12)]


def training(sound: Sound, *flags: str, iterations: int = 2) -> list[str]:
    """The command line of one rank."""
    tokenizer = ["--tokenizer-model", str(sound.tokenizer)]
    return ["rank", *MODEL, *tokenizer, "--train-iters", str(iterations), *flags]


def make_sound(
    root: Path, *, large: bool = False, analysis: bool = True, unfinished: bool = True
) -> Sound:
    """Make all of it in a folder; the run, and the analysis if asked for, by forked processes."""
    from megasink.data.corpus import Corpus
    from megasink.data.preprocess import preprocess
    from tests.analysis.capture.tiny_models import save_with_tokenizer

    sound = Sound(root, large)
    save_with_tokenizer(root, "llama", TEXTS, 330)
    lines = root / "texts.jsonl"
    source = Path(textwrap.__file__).read_text().split("\n\n")
    lines.write_text("".join(json.dumps({"text": t}) + "\n" for t in [*TEXTS, *source]))
    preprocess(Corpus([lines]), sound.data, sound.tokenizer, workers=1)

    def train(folder: Path, sound: Sound) -> list[str]:
        flags = ["--run-dir", str(sound.run), "--data-path", str(sound.data)]
        return training(sound, *flags)

    def analyze(folder: Path, sound: Sound) -> list[str]:
        data = ["--data", str(lines), "--output", str(sound.analysis), "--device", "cpu"]
        return ["analyze", str(sound.hf), *data, "--max-samples", "3", "--seq-length", "16"]

    for name, make in (("train", train), *([("analyze", analyze)] if analysis else [])):
        outcome = judge(name, Case(make, code=0), root / "making" / name, sound)
        assert not outcome.wrong, outcome.wrong
    for command, result in RESULTS.items() if unfinished else ():
        _leave_unfinished(sound, command, result)
    return sound


def line_of(command: str, sound: Sound, output: Path) -> list[str]:
    """The line of a command that writes to `Sound.unfinished`."""
    data = ["--data", str(sound.root / "texts.jsonl"), "--device", "cpu"]
    return [command, str(sound.hf), *data, *FLAGS[command], "--output", str(output)]


def _leave_unfinished(sound: Sound, command: str, result: str) -> None:
    """Run a command to its results, where a folder in the place of the first ends it."""
    output, logs = sound.unfinished(command), sound.root / "ending" / command
    (output / result).mkdir(parents=True)
    logs.mkdir(parents=True)
    line = [*line_of(command, sound, output), "--overwrite"]
    code, _ = forked(line, logs / "stderr.log", logs / "stdout.log")
    assert code == 2, (logs / "stderr.log").read_text()
    (output / result).rmdir()
    again = Case(lambda *_: line_of(command, sound, _copied(output, logs / "again")), 0)
    outcome = judge(command, again, logs / "sound", sound)
    assert not outcome.wrong, outcome.wrong


def _copied(folder: Path, copy: Path) -> Path:
    shutil.copytree(folder, copy)
    return copy
