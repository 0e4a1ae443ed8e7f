"""What a plan replaces because the machine that trains has it."""

import pytest

from megasink.plan.stand_in_flags import with_stand_ins

MODEL = "--num-layers 2 --hidden-size 64 --num-attention-heads 2"
RUN = "--seq-length 64 --micro-batch-size 1 --train-iters 9 --lr 1 --max-position-embeddings 64"
OTHERS = "--mock-data --tokenizer-type NullTokenizer --vocab-size"


def planned(text):
    words = text.split()
    return " ".join(with_stand_ins(words, words))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--data-path $DATA/text --vocab-size 100", f"{OTHERS} 100"),
        ("--train-data-path 0.3 a --valid-data-path b --vocab-size 100", f"{OTHERS} 100"),
        ("--tokenizer-type GPT2BPETokenizer --vocab-file v --merge-file m", f"{OTHERS} 50257"),
        ("--tokenizer-model meta-llama/Llama-3.1-8B", f"{OTHERS} 128256"),
        ("--tokenizer-model unheard-of", f"{OTHERS} 131072"),
        ("--mock-data --tokenizer-type NullTokenizer --vocab-size 9", f"{OTHERS} 9"),
    ],
)
def test_data_and_tokenizer(given, wanted):
    assert planned(f"{MODEL} {RUN} {given}").replace(f"{MODEL} {RUN} ", "").split("  ") == [wanted]


def test_a_tokenizer_that_is_here_stays(tmp_path):
    assert f"--tokenizer-model {tmp_path}" in planned(f"{MODEL} {RUN} --tokenizer-model {tmp_path}")


@pytest.mark.parametrize(
    ("given", "kept", "named"),
    [
        ("--load x --save y --wandb-project z --async-save --use-checkpoint-args", "", ""),
        (
            "--transformer-impl transformer_engine --fp8-format hybrid --fp8-margin 1",
            "",
            "--fp8-format --transformer-impl",
        ),
        ("--transformer-impl local", "--transformer-impl local", ""),
        ("--moe-grouped-gemm --tp-comm-overlap", "", "--moe-grouped-gemm --tp-comm-overlap"),
        (
            "--moe-token-dispatcher-type flex",
            "--moe-token-dispatcher-type alltoall",
            "--moe-token-dispatcher-type",
        ),
        (
            "--recompute-modules layernorm mlp",
            "--recompute-modules core_attn mlp",
            "--recompute-modules",
        ),
        ("--cuda-graph-impl local", "--cuda-graph-impl local", ""),  # refused
    ],
)
def test_packages_and_what_is_outside(capsys, given, kept, named):
    line = planned(f"{MODEL} {RUN} {given} --vocab-size 100")
    assert line == " ".join(f"{MODEL} {RUN} {kept} {OTHERS} 100".split())
    assert capsys.readouterr().err.strip().endswith(f"without {named}" if named else "-size)")


def test_what_the_configuration_of_a_model_does_not_have(capsys):
    added = "--seq-length 4096 --micro-batch-size 1 --train-iters 1000 --lr 1e-4"
    line = planned(f"{MODEL} --vocab-size 100")
    assert added in line
    assert "--max-position-embeddings 4096" in line
    assert added in capsys.readouterr().err
    assert "--train-iters" not in planned(f"{MODEL} --train-samples 9 --vocab-size 100")


@pytest.mark.parametrize(("given", "batch"), [("", "64"), ("--global-batch-size 32 ", "32")])
def test_a_schedule_of_batch_sizes_is_planned_at_one(capsys, given, batch):
    schedule = ["--step-batch-size-schedule", "0:16 2B:64"]
    words = [*f"{MODEL} {RUN} {given}--mock-data --vocab-size 9".split(), *schedule]
    line = " ".join(with_stand_ins(words, words))
    assert f"--global-batch-size {batch}" in line
    assert "schedule" not in line
    assert f"--global-batch-size {batch} in place of" in capsys.readouterr().err
