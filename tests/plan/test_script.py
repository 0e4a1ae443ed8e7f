"""Flags read out of launch scripts, without running them."""

from pathlib import Path

import pytest

from megasink.errors import UserError
from megasink.plan import launch_script, run_plan

SHELL = r"""#!/bin/bash
#SBATCH --nodes=4
set -euo pipefail
SCRIPT_DIR="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" &>/dev/null && pwd)"
source "${SCRIPT_DIR}/model.sh"
if [ -z "$1" ]; then echo "usage: $0 DATA"; exit 1; fi
DATA=${1:-/data/text}  # don't stop at this quote
BATCH=8 LAYERS=$((2 * 3 + ${MORE_LAYERS:-1}))
FREQ=()
for ((i = 0; i < LAYERS; i++)); do
  if (( i < 1 )); then FREQ+=(0); else FREQ+=(1); fi
done
printf -v LIST "[%s]" "$(IFS=', '; echo "${FREQ[*]}")"
if [[ "$PRECISION" == "fp16" ]]; then HALF=--fp16
elif [ $BATCH -gt 4 ] && [ -z "${PRECISION:-}" ]; then HALF=--bf16
else HALF=; fi
case $MODE in
  long) LENGTH=8192 ;;
  *) LENGTH=4096 ;;
esac
TRAIN=(
  --seq-length $LENGTH
  # --seq-length 1
  "--lr 3e-4"
)
TRAIN+=(--split '99,1,0')
[ $BATCH -gt 100 ] && TRAIN+=(--micro-batch-size 2)
run="torchrun --nproc_per_node 8 --nnodes $SLURM_NNODES pretrain_gpt.py ${MODEL[@]} ${TRAIN[*]}"
run+=" --num-layers $LAYERS --moe-layer-freq $LIST $HALF --data-path $DATA/x \
  $EXTRA_ARGS $@"
echo ${run} > log.py
eval ${run} --save '${OUT}/checkpoints' 2>&1 | tee "log_$(date +%s)"
"""
FLAGS = (
    "--hidden-size 64 --seq-length 4096 --lr 3e-4 --split 99,1,0 --num-layers 7 "
    "--moe-layer-freq [0,1,1,1,1,1,1] --bf16 --data-path /data/text/x --save $OUT/checkpoints"
).split()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "model.sh").write_text("MODEL=(--hidden-size 64)\n")
    return tmp_path


def read(folder: Path, text: str, name: str = "train.sh", overridden=(), **given: str):
    (folder / name).write_text(text)
    return launch_script.read(folder / name, given, overridden)


def test_a_shell_script_is_followed_to_its_flags(folder):
    found = read(folder, SHELL)
    assert found.flags == FLAGS
    assert any("EXTRA_ARGS" in note for note in found.notes)
    # SLURM_NNODES is open, so the count of the batch script stands.
    assert found.ranks == 32


def test_set_overrides_what_a_script_assigns(folder):
    found = read(folder, SHELL, PRECISION="fp16", BATCH="128", MODE="long", EXTRA_ARGS="--swiglu")
    flags = " ".join(found.flags)
    for part in ("--fp16", "--micro-batch-size 2", "--seq-length 8192", "--swiglu"):
        assert part in flags


def test_a_value_of_a_command_is_named_and_nothing_runs(folder):
    text = f"N=$(touch {folder}/ran; nproc)\nM=$((N * 2))\n"
    text += "if [ $N -gt 4 ]; then A=1; else A=2; fi\n"
    line = "torchrun pretrain_gpt.py --num-layers $M --hidden-size $A --kv-channels $KV --lr $LR"
    with pytest.raises(UserError) as error:
        read(folder, text + line)
    assert "N (--hidden-size)" in str(error.value)
    assert "KV (--kv-channels)" in str(error.value)
    assert "--set NAME=VALUE" in str(error.value)
    found = read(folder, text + line, N="8", KV="1")
    # A plan does not depend on the learning rate.
    assert found.flags == "--num-layers 16 --hidden-size 1 --kv-channels 1".split()
    assert any("--lr" in note for note in found.notes)
    found = read(folder, text + line, overridden=("kv-channels", "num-layers", "hidden-size"))
    assert found.flags == []
    assert not (folder / "ran").exists()


def test_a_variable_in_the_name_of_a_flag_is_named(folder):
    text = "torchrun x.py --num-layers 4 --tensor$PART-parallel-size 2 --$(hostname) 1"
    with pytest.raises(UserError, match=r"PART \(--tensor\$PART-par.*a command \(--\$\(\.\.\.\)\)"):
        read(folder, text)
    found = read(folder, text[:-15], PART="-model")
    assert found.flags[2:] == ["--tensor-model-parallel-size", "2"]


def test_arguments_that_only_conditions_read_are_named(folder):
    text = "if [ $2 = 8B ]; then LAYERS=32; fi\ntorchrun x.py --num-layers $LAYERS"
    with pytest.raises(UserError, match=r"LAYERS \(--num-layers\), 2 \(a condition\)"):
        read(folder, text)
    (folder / "train.sh").write_text(text)
    assert launch_script.read(folder / "train.sh", {"2": "8B"}, ()).flags == ["--num-layers", "32"]


def test_loops_and_texts_without_an_end_are_refused(folder):
    for text in ("while true; do :; done", "f() { f; }; f", "X=aa; while [ 1 ]; do X=$X$X; done"):
        with pytest.raises(UserError, match=r"train\.sh"):
            read(folder, text)


@pytest.mark.parametrize(
    ("line", "ranks"),
    [
        ("torchrun --nproc-per-node=4 --nnodes=2 pretrain_gpt.py --num-layers 2", 8),
        ("mpirun -np 16 python pretrain_gpt.py --num-layers 2", 16),
        ("ray job submit -- python3 train.py --num-layers 2 --actor-num-nodes 2 "
         "--actor-num-gpus-per-node 4", 8),
        ("python pretrain_gpt.py --num-layers 2", None),
        # Not a multiple of a replica: the plan is for one.
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --num-layers 2 "
         "--tensor-model-parallel-size 8 --pipeline-model-parallel-size 16", None),
    ],
)  # fmt: skip
def test_ranks_are_those_that_the_script_starts(folder, line, ranks):
    assert read(folder, line).ranks == ranks


def test_a_file_of_a_functional_test(folder):
    text = """ENV_VARS:
  NCCL_ALGO: Ring
MODEL_ARGS:
# a comment
  --num-layers: 2
  --bf16: true
  --swiglu: false
  --moe-layer-freq: ([0]+[1]*26)
  --recompute-modules: "[core_attn mlp]"
  --save: ${CHECKPOINTS}
  --lr: 1e-2 # of a test
  --rampup-batch-size: 2 2 8
TEST_TYPE: regular
"""
    wanted = "--num-layers 2 --bf16 --moe-layer-freq ([0]+[1]*26) --recompute-modules core_attn mlp"
    found = read(folder, text, "model_config.yaml")
    assert (
        found.flags == f"{wanted} --save $CHECKPOINTS --lr 1e-2 --rampup-batch-size 2 2 8".split()
    )


def test_the_command_line_overrides_a_script(folder):
    (folder / "train.sh").write_text(
        "torchrun --nproc_per_node 2 x.py --num-layers 2 --lr $LR --kv-channels $1"
    )
    line = ["--script", str(folder / "train.sh"), "--lr", "1", "--set", "1=8"]
    args, flags = run_plan.read_line(line)
    assert (args.ranks, flags) == (2, "--num-layers 2 --kv-channels 8 --lr 1".split())
    args, _ = run_plan.read_line([*line, "--ranks", "4"])
    assert args.ranks == 4
    with pytest.raises(UserError, match="--set A: give NAME=VALUE"):
        run_plan.read_line(["--script", str(folder / "train.sh"), "--set", "A"])
    with pytest.raises(UserError, match="--set A=1 needs --script"):
        run_plan.read_line(["--set", "A=1"])
    with pytest.raises(UserError, match="no such file"):
        run_plan.read_line(["--script", str(folder / "absent.sh")])


def test_a_yaml_file_may_have_lists_anchors_and_merged_mappings(folder):
    text = """BASE: &base
  --num-layers: &layers 2
  --lr: 1.0e-4
MODEL_ARGS:
  <<: *base
  --window-size:
    - 127
    - 0
  --kv-channels: *layers
"""
    wanted = "--num-layers 2 --lr 1.0e-4 --window-size 127 0 --kv-channels 2"
    assert read(folder, text, "model_config.yml").flags == wanted.split()
    for text in ("MODEL_ARGS:\n  --num-layers: {a: 1}\n", "MODEL_ARGS: *unknown\n"):
        with pytest.raises(UserError, match=r"train\.yaml"):
            read(folder, text, "train.yaml")
