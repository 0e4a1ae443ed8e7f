"""GPT-OSS as released: YaRN and MXFP4 are imported, trained under TP, SP and EP, and exported."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.convert.test_commands import megasink
from tests.distributed.layout import SINGLE
from tests.runs import resumed_from, steps

TASKS = "tests.convert.gpt_oss_tasks"
TRAIN = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 101 --seq-length 64
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --num-workers 0 --eval-iters 1
    --eval-interval 100 --save-interval 3 --log-interval 1 --tensor-model-parallel-size 2
    --sequence-parallel --expert-model-parallel-size 2 --expert-tensor-parallel-size 1
    --moe-token-dispatcher-type alltoall
""".split()


@pytest.fixture(scope="module")
def released(pool, tmp_path_factory):
    folder = tmp_path_factory.mktemp("released") / "gpt-oss"
    pool.run(f"{TASKS}:save_released", SINGLE, folder=str(folder))
    return folder


@pytest.fixture(scope="module")
def imported(pool, released):
    """The run of its import, whose logits are compared with those of transformers."""
    run = released.parent / "run"
    ((code, said, errors),) = megasink(pool, ["convert-from-hf", released, "--output", run])
    assert (code, errors) == (0, "")
    assert "verified on 128 tokens of random tokens (no tokenizer), float32" in said
    assert "100% of 16 generated tokens" in said
    return run


def test_flags_have_the_numbers_of_yarn(imported):
    flags = (imported / "flags.txt").read_text()
    for words in (
        "--position-embedding-type yarn --rotary-base 150000",
        "--rotary-scaling-factor 32 --yarn-original-max-position-embeddings 16",
        "--yarn-beta-fast 32 --yarn-beta-slow 1 --mscale 1 --mscale-all-dim 0",
        "--no-yarn-correction-range-round-to-int",
        "--window-size 7,0 --window-attn-skip-freq [1,0] ",
        "--bf16",
    ):
        assert words in flags


def test_its_export_has_the_unpacked_weights_to_the_bit(pool, released, imported, tmp_path):
    ((code, said, errors),) = megasink(
        pool, ["convert-to-hf", imported, "--output", tmp_path / "hf"]
    )
    assert (code, errors) == (0, "")
    assert "target: GptOssForCausalLM (gpt_oss): as imported" in said
    where = {"folder": str(released), "exported": str(tmp_path / "hf")}
    assert pool.run(f"{TASKS}:differing", SINGLE, **where) == [[]]
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (released, tmp_path / "hf")
    )
    del before["quantization_config"], before["transformers_version"]
    assert {key: after.get(key) for key in before} == before


def test_it_trains_resumes_and_is_exported(pool, imported, tmp_path):
    flags = (imported / "flags.txt").read_text().split()
    run, start = tmp_path / "run", ["--load", str(imported / "checkpoints"), "--finetune"]
    line = [*flags, *TRAIN, *start, "--run-dir", str(run)]
    pool.train([*line, "--train-iters", "3"], 2)
    pool.train([*line, "--train-iters", "5", "--resume", "--override-opt-param-scheduler"], 2)
    assert resumed_from(run) == [None, 3]
    losses = [step["lm_loss"] for step in steps(run)]
    assert len(losses) == 5
    assert losses[-1] < losses[0]
    ((code, said, errors),) = megasink(pool, ["convert-to-hf", run, "--output", tmp_path / "hf"])
    assert (code, errors) == (0, "")
    assert "GptOssForCausalLM (gpt_oss)" in said


@pytest.fixture(scope="module")
def packed(pool, tmp_path_factory):
    """A folder, the flags of a step on packed documents, and its loss and gradient norm."""
    folder = tmp_path_factory.mktemp("packed")
    (found,) = pool.run(f"{TASKS}:packed_and_alone", SINGLE, folder=str(folder))
    return folder, *found


@pytest.mark.parametrize("comm_type", ["all_gather", "a2a"])
def test_packed_documents_under_windows_are_documents_alone(pool, packed, comm_type):
    """With YaRN, sinks and a window of 5 in every second layer, of stock transformers."""
    folder, flags, loss, norm = packed
    layout = ["--context-parallel-size", "2", "--cp-comm-type", comm_type]
    run = folder / comm_type
    pool.train([*flags, *layout, "--run-dir", str(run)], 2)
    (step,) = steps(run)
    assert step["lm_loss"] == pytest.approx(loss, rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("_scales", lambda t: t[:, :-1], "_blocks [4, 192, 2, 16] and "),
        ("_blocks", lambda t: t[..., :8].clone(), "do not match: MXFP4 needs [experts, rows, b"),
        ("_blocks", lambda t: t.short(), "is I16, not U8"),
        ("_scales", None, "gate_up_proj_blocks"),
    ],
)
def test_blocks_that_do_not_fit_are_refused(pool, released, tmp_path, name, change, said):
    shutil.copytree(released, tmp_path / "hf")
    path = tmp_path / "hf" / "model.safetensors"
    tensors, key = load_file(path), f"model.layers.1.mlp.experts.gate_up_proj{name}"
    changed = tensors.pop(key)
    if change is not None:
        tensors[key] = change(changed).contiguous()
    save_file(tensors, path)
    command = ["convert-from-hf", tmp_path / "hf", "--output", tmp_path / "run"]
    ((code, _, errors),) = megasink(pool, command)
    assert code != 0
    assert said in errors
    assert len(errors.splitlines()) == 1
    assert not (tmp_path / "run").exists()


def test_a_block_is_unpacked_as_the_format_says():
    from megasink.convert.safetensors_files import unpack

    blocks = torch.arange(16, dtype=torch.uint8).reshape(1, 1, 1, 16) * 16 + 15  # high half counts
    numbers = unpack(blocks, torch.tensor([[[128]]], dtype=torch.uint8))[0, :, 0]
    magnitudes = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    assert numbers[0::2].tolist() == [-12.0] * 16
    assert numbers[1::2].tolist() == [*(2 * magnitudes).tolist(), *(-2 * magnitudes).tolist()]
