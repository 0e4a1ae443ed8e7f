"""A tiny run of six steps that is killed, damaged and resumed: its flags, and what it left."""

import json
import shlex

FLAGS = shlex.split("""
    --num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 32
    --max-position-embeddings 32 --micro-batch-size 2 --global-batch-size 4 --train-iters 6
    --lr 1e-3 --normalization RMSNorm --swiglu --disable-bias-linear
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 255 --mock-data --eval-iters 1
    --eval-interval 100 --log-interval 1 --save-interval 2 --head-balance-coeff 0.1
    --num-workers 0
""")


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "lm_loss" in line]
    assert [line["iteration"] for line in steps] == [1, 2, 3, 4, 5, 6]
    return [(line["lm_loss"], line["balance_loss"], line["grad_norm"]) for line in steps]


def only_line(text):
    (line,) = [line for line in text.splitlines() if line.startswith("megasink: ")]
    return line


def resumed_from(folder):
    return json.loads((folder / "starts.jsonl").read_text().splitlines()[-1])["resumed_from"]
