"""Every wrong command line gets its own sentence, all of them in one message, before step 1."""

import heapq
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from megasink.data.corpus import Corpus
from megasink.data.preprocess import preprocess
from megasink.data.tokenizer import train_tokenizer

MODEL = (
    "--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 "
    "--max-position-embeddings 64 --micro-batch-size 2 --global-batch-size 8 "
    "--train-iters 4 --lr 1e-3 --normalization RMSNorm --swiglu "
    "--position-embedding-type rope"
).split()
MOCK = [*MODEL, "--mock-data", "--tokenizer-type", "NullTokenizer", "--vocab-size", "255"]

# name -> (flags, one phrase per problem that must be in the message)
REFUSED = {
    "heads-tp": (
        [*MOCK, "--num-attention-heads", "6", "--tensor-model-parallel-size", "4"],
        ["--num-attention-heads 6 is not divisible by --tensor-model-parallel-size 4"],
    ),
    "unknown-variant": (
        [*MOCK, "--attention-variant", "sunk"],
        ["--attention-variant 'sunk' is unknown: choose vanilla, sink, off-by-one"],
    ),
    "negative-coefficient": (
        [*MOCK, "--head-balance-coeff", "-0.5"],
        ["--head-balance-coeff -0.5 is negative"],
    ),
    "negative-warm-up": (
        [*MOCK, "--head-balance-warmup-iters", "-1"],
        ["--head-balance-warmup-iters -1 is negative"],
    ),
    "shared-heads": (
        [*MOCK, "--head-balance-shared-heads", "3"],
        ["--head-balance-shared-heads 3 of 4 heads", "at most 2"],
    ),
    "refresh-of-nothing": (
        [*MOCK, "--head-balance-shared-refresh", "3"],
        ["without --head-balance-shared-heads"],
    ),
    "unknown-scope": (
        [*MOCK, "--head-balance-scope", "world"],
        ["'world' is unknown: choose global, data-parallel, microbatch"],
    ),
    "kernel-that-drops-the-sink": (
        [*MOCK, "--attention-backend", "fused"],
        ["--attention-backend fused", "use --attention-kernel"],
    ),
    "kernel-of-another-device": ([*MOCK, "--attention-kernel", "cudnn"], ["'cudnn' cannot run"]),
    "unknown-kernel": ([*MOCK, "--attention-kernel", "flush"], ["'flush'"]),
    "inference-only-spec": (
        [*MOCK, "--transformer-impl", "inference_optimized"],
        ["inference_optimized has no backward pass", "--head-balance-coeff 0"],
    ),
    "no-cuda": (
        [*MOCK, "--distributed-backend", "nccl", "--transformer-impl", "transformer_engine"],
        ["--distributed-backend nccl needs CUDA", "transformer_engine needs CUDA"],
    ),
    "parts-that-need-cuda": (
        [*MOCK, "--async-save", "--profile", "--record-memory-history", "--log-straggler"],
        [
            "--async-save needs CUDA",
            "--profile needs CUDA",
            "--record-memory-history needs CUDA",
            "--log-straggler needs CUDA",
        ],
    ),
    "dropout": ([*MOCK, "--attention-dropout", "0.1"], ["dropout 0.1 breaks the identity"]),
    "no-data": (MODEL, ["no training data", "no tokenizer"]),
    "missing-data": (
        [*MODEL, "--data-path", "nowhere/text", "--tokenizer-model", "nowhere/tokenizer"],
        ["nowhere/text.bin and nowhere/text.idx not found", "nowhere/tokenizer: no such folder"],
    ),
    "softmax-type": ([*MOCK, "--softmax-type", "learnable"], ["say it with --attention-variant"]),
    "moe": ([*MOCK, "--num-experts", "4"], ["--num-experts"]),
    "context-parallel": ([*MOCK, "--context-parallel-size", "2"], ["--context-parallel-size"]),
    "masked-per-token-loss": (
        [*MOCK, "--calculate-per-token-loss", "--eod-mask-loss"],
        ["drop one of the two flags"],
    ),
    "unknown-flag": (
        [*MOCK, "--head-balance-coef", "1", "--attention-variant", "y"],
        ["unknown: --head-balance-coef 1", "'y' is unknown"],
    ),
    "no-steps": ([*MOCK, "--train-iters", "0"], ["--train-iters 0: train at least one step"]),
    "hidden-by-heads": (
        [*MOCK, "--num-attention-heads", "5"],
        ["--hidden-size 64 is not divisible by --num-attention-heads 5"],
    ),
    "two-sided-window": ([*MOCK, "--window-size", "15,3"], ["--window-size 15,3: give LEFT,0"]),
    "vocabulary-by-tp": (
        [
            *MOCK,
            "--make-vocab-size-divisible-by",
            "1",
            "--tensor-model-parallel-size",
            "4",
            "--vocab-size",
            "257",
        ],
        ["rows of the embedding are not divisible by --tensor-model-parallel-size 4"],
    ),
    "resume-nothing": ([*MOCK, "--resume"], ["--resume needs --run-dir"]),
    "load-nothing": ([*MOCK, "--load", "nowhere"], ["--load nowhere: no finished checkpoint"]),
    "everything": (
        [*MODEL, "--attention-variant", "x", "--head-balance-coeff", "-1", "--resume"],
        ["'x' is unknown", "-1.0 is negative", "no training data", "no tokenizer", "--run-dir"],
    ),
    "s-by-s-masks": (
        [*MOCK, "--reset-attention-mask"],
        ["--reset-attention-mask: it makes S x S masks: use --dataloader-inter-document-masking"],
    ),
    "positions-that-nothing-reads": (
        [*MOCK, "--reset-position-ids"],
        ["--reset-position-ids changes nothing under --position-embedding-type rope"],
    ),
    "negative-prefix": ([*MOCK, "--prefix-lm-tokens", "-1"], ["--prefix-lm-tokens -1 is negative"]),
    "prefix-without-targets": (
        [*MOCK, "--prefix-lm-tokens", "64"],
        ["--prefix-lm-tokens 64 leaves no target in --seq-length 64: use less than 64"],
    ),
    "prefix-with-everything": (
        [
            *[*MOCK, "--prefix-lm-tokens", "3", "--dataloader-inter-document-masking"],
            *["--window-size", "15,0", "--attention-bias-type", "alibi"],
            *["--position-embedding-type", "none"],
        ],
        [
            "--prefix-lm-tokens with --window-size",
            "--prefix-lm-tokens with --dataloader-inter-document-masking",
            "--prefix-lm-tokens with --attention-bias-type",
        ],
    ),
    "unknown-bias": (
        [*MOCK, "--attention-bias-type", "t6"],
        ["--attention-bias-type 't6' is unknown: choose none, alibi, t5, bucket"],
    ),
    "positions-twice": (
        [*MOCK, "--attention-bias-type", "alibi"],
        ["would tell positions twice: give --position-embedding-type none"],
    ),
    "kernel-without-a-bias": (
        [
            *[*MOCK, "--attention-bias-type", "alibi", "--position-embedding-type", "none"],
            *["--attention-kernel", "flash-cpu"],
        ],
        ["'flash-cpu' cannot run", "with a distance bias", "it adds no bias to the scores"],
    ),
    "buckets": (
        [
            *[*MOCK, "--attention-bias-type", "t5", "--position-embedding-type", "none"],
            *["--relative-attention-num-buckets", "31", "--relative-attention-max-distance", "12"],
        ],
        ["--relative-attention-num-buckets 31", "--relative-attention-max-distance 12 lies in"],
    ),
    "relative-of-transformer-engine": (
        [*MOCK, "--position-embedding-type", "relative"],
        ["relative: it needs TransformerEngine's attention", "--attention-bias-type t5"],
    ),
    "positions-of-pictures": (
        [*MOCK, "--position-embedding-type", "mrope"],
        ["mrope: text has one position for each token: use rope"],
    ),
    "sinusoids-without-a-table": (
        [*MOCK, "--sinusoidal-position-embedding", "--hidden-size", "65", "--kv-channels", "16"],
        ["--sinusoidal-position-embedding with --position-embedding-type rope", "65 is odd"],
    ),
    "upstream": ([*MOCK, "--global-batch-size", "3"], ["Megatron refuses this configuration"]),
}
ACCEPTED = {
    "tp1": MOCK,
    "tp2": [*MOCK, "--tensor-model-parallel-size", "2", "--vocab-size", "300"],
    "tp1-same-vocabulary": [*MOCK, "--vocab-size", "300"],
    "off-by-one": [*MOCK, "--attention-variant", "off-by-one", "--bf16"],
    "prefix": [*MOCK, "--prefix-lm-tokens", "5"],
    "documents": [*MOCK, "--dataloader-inter-document-masking", "--reset-position-ids"],
    "documents-t5-window": [
        *[*MOCK, "--dataloader-inter-document-masking", "--window-size", "15,0"],
        *["--attention-bias-type", "t5", "--position-embedding-type", "none"],
    ],
    "sinusoids": [
        *[*MOCK, "--sinusoidal-position-embedding", "--reset-position-ids"],
        *["--position-embedding-type", "learned_absolute"],
    ],
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A data set and two tokenizers: its own, and one with other tokens."""
    folder = tmp_path_factory.mktemp("data")
    for name, module in (("a", textwrap), ("b", heapq)):
        (folder / f"{name}.txt").write_text(Path(module.__file__).read_text())
    for name in "ab":
        train_tokenizer(Corpus([str(folder / f"{name}.txt")]), 400, folder / f"tokenizer-{name}")
    corpus = Corpus([str(folder / "a.txt")])
    preprocess(corpus, folder / "text", folder / "tokenizer-a", workers=1)
    return folder


@pytest.fixture(scope="module")
def answers(files):
    """Every command line above through one process."""
    own = ["--data-path", str(files / "text"), "--tokenizer-model"]
    refused = {name: flags for name, (flags, _) in REFUSED.items()}
    refused["wrong-tokenizer"] = [*MODEL, *own, str(files / "tokenizer-b")]
    refused["small-embedding"] = [*MODEL, *own, str(files / "tokenizer-a")]
    refused["small-embedding"] += ["--padded-vocab-size", "128"]
    for name in ("wrong-tokenizer", "small-embedding"):
        refused[name] += ["--split", "1,0,0"]
    refused["empty-part"] = [*MODEL, *own, str(files / "tokenizer-a")]
    broken = ["--data-path", str(files / "broken"), "--tokenizer-model", str(files / "tokenizer-a")]
    (files / "broken.bin").write_bytes(b"")
    (files / "broken.idx").write_bytes((files / "text.idx").read_bytes()[:20])
    refused["broken-index"] = [*MODEL, *broken]
    text = [*MODEL, *own, str(files / "tokenizer-a"), "--split", "1,0,0"]
    accepted = ACCEPTED | {"text": text}
    cases = {**refused, **accepted}
    result = subprocess.run(
        [sys.executable, "-W", "ignore", str(Path(__file__).with_name("parse_worker.py"))],
        input=json.dumps(list(cases.values())),
        capture_output=True,
        text=True,
        timeout=120,
        # Megatron reads the world size from the environment.
        env={**os.environ, "WORLD_SIZE": "4", "RANK": "0", "LOCAL_RANK": "0"},
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return dict(zip(cases, json.loads(result.stdout), strict=True))


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_every_reason(answers, name):
    problems = answers[name].get("problems", [])
    text = "\n".join(problems)
    for phrase in REFUSED[name][1]:
        assert phrase in text
    assert all("\n" not in problem for problem in problems)


def test_many_problems_are_one_message(answers):
    assert len(answers["everything"]["problems"]) == 5


def test_a_data_set_of_another_tokenizer_is_refused(answers):
    (problem,) = answers["wrong-tokenizer"]["problems"]
    assert "tokenizer-a" in problem
    assert "whose tokens are not those of" in problem


def test_a_vocabulary_larger_than_the_embedding_is_refused(answers):
    (problem,) = answers["small-embedding"]["problems"]
    assert "has 400 tokens but the embedding only 128 rows" in problem


def test_a_part_of_the_split_without_a_document_is_refused(answers):
    """Megatron would count its epochs for ever."""
    (problem,) = answers["empty-part"]["problems"]
    assert "--split 969,30,1 gives the validation and the test part none of the 1 doc" in problem


def test_a_broken_index_is_refused(answers):
    (problem,) = answers["broken-index"]["problems"]
    assert "broken.idx is broken" in problem


@pytest.mark.parametrize("name", [*ACCEPTED, "text"])
def test_accepted(answers, name):
    assert "problems" not in answers[name]


def test_defaults_of_the_cpu_platform(answers):
    args = answers["tp1"]["args"]
    assert args["distributed_backend"] == "gloo"
    assert args["transformer_impl"] == "local"
    assert args["use_cpu_initialization"] is True


def test_defaults_of_every_platform(answers):
    args = answers["tp1"]["args"]
    assert args["attention_dropout"] == args["hidden_dropout"] == 0.0
    assert args["dist_ckpt_optim_fully_reshardable"] is True
    assert args["attention_variant"] == "sink"
    assert args["head_balance_coeff"] == 1e-4


def test_the_rows_of_the_embedding_do_not_depend_on_the_layout(answers):
    rows = [answers[name]["args"]["padded_vocab_size"] for name in ("tp2", "tp1-same-vocabulary")]
    assert rows == [384, 384]
    assert answers["text"]["args"]["padded_vocab_size"] == 512
