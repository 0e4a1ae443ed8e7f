"""The trainer on two GPUs over NCCL: losses and balance of each layout are those of one GPU.

MEGASINK_TEST_DEVICE=cpu runs the same on a CPU, over gloo.
"""

import json
import os
import shlex
import subprocess
import sys

import pytest
import torch

DEVICE = os.environ.get("MEGASINK_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and torch.cuda.device_count() < 2, reason="needs two CUDA devices"
    ),
]

FLAGS = shlex.split(f"""
    --device {DEVICE} --num-layers 2 --hidden-size 256 --num-attention-heads 4 --seq-length 256
    --max-position-embeddings 256 --micro-batch-size 2 --global-batch-size 4 --train-iters 4
    --lr 1e-3 --normalization RMSNorm --swiglu --disable-bias-linear --seed 7
    --position-embedding-type rope --untie-embeddings-and-output-weights
    --tokenizer-type NullTokenizer --vocab-size 256 --mock-data --eval-iters 0
    --eval-interval 100 --log-interval 1 --head-balance-coeff 0.1 --num-workers 0
    --transformer-impl local --use-cpu-initialization --no-gradient-accumulation-fusion
    --no-rope-fusion --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-persist-layer-norm
""")
LAYOUTS = {
    "tp": "--tensor-model-parallel-size 2 --sequence-parallel",
    "cp": "--context-parallel-size 2",
    "cp-a2a": "--context-parallel-size 2 --cp-comm-type a2a",
    "dp": "--head-balance-scope global",
    "dp-zero": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "pp": "--pipeline-model-parallel-size 2",
}
SERIES = ("lm_loss", "balance_loss", "imbalance", "grad_norm")


def train(folder, ranks, more=""):
    """The logged values of every step, in float32."""
    command = [sys.executable, "-m", "megasink", "train", *FLAGS, *shlex.split(more)]
    subprocess.run([*command, "--ranks", str(ranks), "--run-dir", str(folder)], check=True)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [[line[name] for name in SERIES] for line in lines if "lm_loss" in line]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    return train(tmp_path_factory.mktemp("one") / "run", 1)


@pytest.mark.parametrize("flags", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_a_layout_trains_as_one_gpu(flags, single, tmp_path):
    ours = train(tmp_path / "run", 2, flags)
    assert len(ours) == len(single) == 4
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(single), rtol=2e-4, atol=1e-6)
