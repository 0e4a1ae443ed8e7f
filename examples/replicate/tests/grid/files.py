"""A grid file of tiny runs."""

from pathlib import Path
from typing import Any

STEPS = 40
FLAGS = f"""
cpu = true
ranks = 1
num-layers = 2
hidden-size = 64
num-attention-heads = 4
seq-length = 32
max-position-embeddings = 32
position-embedding-type = "rope"
normalization = "RMSNorm"
swiglu = true
disable-bias-linear = true
micro-batch-size = 2
global-batch-size = 4
train-iters = {STEPS}
lr = 1e-3
log-interval = 1
num-workers = 0
eval-iters = 1
eval-interval = 20
"""
MOCK = 'tokenizer-type = "NullTokenizer"\nvocab-size = 256\nmock-data = true\n'
LETTERS = """
tokenizer-model = "{out}/data/tokenizer"
data-path = "{out}/data/letters"
split = "90,10,0"
"""
"""Data of `languages.write_triggers`."""
POINTS = 'vanilla = {attention-variant = "vanilla"}\nsink = {attention-variant = "sink"}\n'
TRACE = """
[measure.trace]
command = \"\"\"
analyze {run} --checkpoints --data {out}/data/letters-sample.jsonl --max-samples 2 --no-loss
--device cpu --output {run}/trace
\"\"\"
"""


def write(
    path: Path,
    *,
    points: str = POINTS,
    seeds: Any = (1, 2),
    metrics: Any = ("valid_lm_loss", "imbalance", "trace/sink_rate"),
    flags: str = "",
    data: str = MOCK,
    rest: str = TRACE,
    top: str = "",
) -> Path:
    """Write a grid file; the arguments replace its parts or are added to them."""
    path.write_text(
        f'title = "Tiny | runs"\nseeds = {list(seeds)}\nmetrics = {list(metrics)}\n{top}\n'
        f"[flags]\n{FLAGS}{data}{flags}\n[axes.attention]\n{points}\n{rest}"
    )
    return path
