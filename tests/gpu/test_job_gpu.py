"""A whole job by the commands of a shell on one GPU: text, training, resume, export, analysis.

MEGASINK_TEST_DEVICE=cpu runs the same job on a CPU.
"""

import json
import math
import os
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

DEVICE = os.environ.get("MEGASINK_TEST_DEVICE", "cuda")
ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"
    ),
]

FLAGS = shlex.split(f"""
    --device {DEVICE} --ranks 1 --bf16 --use-distributed-optimizer --num-layers 2
    --hidden-size 256 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --normalization RMSNorm --swiglu
    --disable-bias-linear --seed 7 --position-embedding-type rope --eval-iters 0
    --untie-embeddings-and-output-weights --attention-variant sink --head-balance-coeff 0.1
    --log-interval 1 --num-workers 0 --save-interval 6 --make-vocab-size-divisible-by 8
""")
MOCK = shlex.split("--mock-data --tokenizer-type NullTokenizer --vocab-size 256")


def megasink(*argv):
    """The output of a command, which must succeed."""
    command = [sys.executable, "-m", "megasink", *map(str, argv)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-3000:]
    return done.stdout


def losses(run):
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return {line["iteration"]: line["lm_loss"] for line in lines if "lm_loss" in line}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """whole: 12 steps; run: 6 steps and 6 after a resume; hf: its export."""
    folder = tmp_path_factory.mktemp("job")
    text, docs = folder / "text", ROOT / "docs"
    megasink("data", docs, "--output", text, "--train-tokenizer", "400", "--workers", "1")
    source = ["--data-path", text, "--tokenizer-model", f"{text}-tokenizer", "--split", "100,0,0"]
    line = [*FLAGS, *source, "--deterministic-mode"]
    megasink("train", "--run-dir", folder / "whole", *line, "--train-iters", "12")
    stopped = ["--train-iters", "12", "--exit-interval", "6"]
    megasink("train", "--run-dir", folder / "run", *line, *stopped)
    megasink("train", "--run-dir", folder / "run", *line, "--train-iters", "12", "--resume", "auto")
    megasink("convert-to-hf", folder / "run", "--output", folder / "hf", "--device", DEVICE)
    return folder


def test_a_resumed_run_has_the_losses_of_a_whole_one(folder):
    whole, resumed = losses(folder / "whole"), losses(folder / "run")
    assert list(whole) == list(range(1, 13))
    # A mean: one step's few texts may be odd ones, and they change with the pages.
    assert sum(whole[step] for step in range(7, 13)) / 6 < whole[1] - 0.2
    assert resumed == whole


def test_the_run_and_its_export_are_analyzed_alike(folder):
    found = {}
    for name in ("run", "hf"):
        output = folder / f"{name}-page"
        samples = ["--data", ROOT / "docs", "--seq-length", "64", "--max-samples", "4"]
        megasink("analyze", folder / name, *samples, "--output", output, "--device", DEVICE)
        found[name] = json.loads((output / "results.json").read_text())["metrics"]
    values = [torch.tensor(found[name]["importance"]["values"]) for name in ("run", "hf")]
    torch.testing.assert_close(*values, rtol=2e-2, atol=2e-2)


def test_it_continues_a_text(folder):
    prompt = ["--prompt", "Attention", "--max-new-tokens", "8", "--device", DEVICE]
    assert megasink("generate", folder / "run", *prompt).strip()


@pytest.mark.skipif(not find_spec("transformer_engine"), reason="needs TransformerEngine")
def test_fp8_layers_train_as_bfloat16_ones(tmp_path):
    """Linear layers in FP8 around attention in bf16: losses within 2 % after 6 steps."""
    line = [*FLAGS, *MOCK, "--transformer-impl", "transformer_engine", "--train-iters", "6"]
    for name, flags in (("bf16", []), ("fp8", ["--fp8-format", "hybrid"])):
        megasink("train", "--run-dir", tmp_path / name, *line, *flags)
    bf16, fp8 = losses(tmp_path / "bf16"), losses(tmp_path / "fp8")
    assert fp8 != bf16
    assert all(math.isclose(fp8[step], bf16[step], rel_tol=0.02) for step in bf16)
