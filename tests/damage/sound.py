"""What is damaged: a tokenizer, a data set, a run with checkpoints, a model, and its analysis."""

import json
import textwrap
from pathlib import Path

from tests.damage.harness import Case, Sound, judge

MODEL = """
--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
--max-position-embeddings 16 --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --micro-batch-size 2 --global-batch-size 2 --lr 1e-3 --eval-interval 2
--eval-iters 1 --split 70,30,0 --save-interval 1 --num-workers 0 --log-interval 1
""".split()
TEXTS = [f"Text {i}: nothing in it stands twice, {'again ' * i}and it ends." for i in range(12)]


def training(sound: Sound, *flags: str, iterations: int = 2) -> list[str]:
    """The command line of one rank."""
    tokenizer = ["--tokenizer-model", str(sound.tokenizer)]
    return ["rank", *MODEL, *tokenizer, "--train-iters", str(iterations), *flags]


def make_sound(root: Path, *, large: bool = False, analysis: bool = True) -> Sound:
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
    return sound
