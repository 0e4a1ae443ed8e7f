#!/usr/bin/env bash
''':'
# Pretrain a GPT with sink attention and the head-balance loss. All of these work and accept extra
# flags at the end (the last occurrence of a flag wins):
#
#   torchrun --nproc-per-node 8 examples/pretrain_gpt_sink.sh      this file is also Python
#   bash examples/pretrain_gpt_sink.sh                             all devices of this machine
#   srun --nodes 4 --ntasks-per-node 1 bash examples/pretrain_gpt_sink.sh     several nodes
#   sbatch --nodes 4 --ntasks-per-node 1 --gpus-per-node 8 --wrap \
#          "srun bash examples/pretrain_gpt_sink.sh"
#
# DATA_PATH is the prefix written by tools/preprocess_data.py, TOKENIZER its tokenizer folder and
# RUN_DIR the run folder: repeating the same command resumes from its newest complete checkpoint, as
# sbatch --requeue and torchrun --max-restarts need. RANKS_PER_NODE overrides the number of processes
# per node.
# Several nodes without Slurm: start this file on each with NNODES and MASTER_ADDR set.

set -euo pipefail
python=${PYTHON:-python3}

nnodes=${NNODES:-${SLURM_NNODES:-1}}
if [[ -z ${RANKS_PER_NODE:-} ]]; then
  if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1; then
    RANKS_PER_NODE=$(nvidia-smi --list-gpus | wc -l)
  else
    RANKS_PER_NODE=1
  fi
fi
launch=("$python" -m torch.distributed.run --nnodes "$nnodes" --nproc-per-node "$RANKS_PER_NODE")
if [[ $nnodes -gt 1 ]]; then
  # Rendezvous at the first host of the allocation, with the same job id on every node.
  if [[ -z ${MASTER_ADDR:-} && -n ${SLURM_JOB_NODELIST:-} ]]; then
    MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
  fi
  : "${MASTER_ADDR:?set MASTER_ADDR to the name of the first node}"
  launch+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
           --rdzv-id "${SLURM_JOB_ID:-megasink}")
else
  launch+=(--rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr 127.0.0.1)
fi
# SIGTERM or Ctrl-C writes a checkpoint; by default torchrun kills the ranks 30 s later.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
exec "${launch[@]}" "$0" "$@"
: <<'"the end of the Python part"'
'''

# The Python part, run by torchrun on each rank. The flags are defined only here.
import argparse
import os
import sys

# The 0.6B shape of the paper: 20 layers of 10 heads of 128 (Fu et al., section 5.1).
FLAGS = """
    --num-layers 20 --hidden-size 1280 --num-attention-heads 10
    --seq-length 2048 --max-position-embeddings 2048
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --qk-layernorm --untie-embeddings-and-output-weights --init-method-std 0.02

    --attention-variant sink --head-balance-coeff 1e-4

    --micro-batch-size 4 --global-batch-size 256
    --lr 6e-4 --min-lr 0 --lr-decay-style WSD --lr-wsd-decay-style linear
    --weight-decay 0.1 --adam-beta1 0.9 --adam-beta2 0.95 --clip-grad 1.0
    --bf16 --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather

    --split 99,1,0 --eval-interval 500 --eval-iters 20
    --save-interval 1000 --log-interval 10
"""


# Steps of the run, and of the learning-rate warmup and decay.
STEPS, WARMUP, DECAY = 21400, 500, 4280


def schedule():
    """Return the paper's schedule, scaled proportionally to another --train-iters."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--train-iters", nargs="?")
    asked = parser.parse_known_args()[0].train_iters or ""
    steps = int(asked) if asked.isdigit() else STEPS
    return [
        *("--train-iters", str(steps)),
        *("--lr-warmup-iters", str(steps * WARMUP // STEPS)),
        *("--lr-wsd-decay-iters", str(max(1, steps * DECAY // STEPS))),
    ]


def flags():
    """Return the flags above, then those from the environment and the command line."""
    given = FLAGS.split() + schedule()
    for variable, flag in (
        ("DATA_PATH", "--data-path"),
        ("TOKENIZER", "--tokenizer-model"),
        ("RUN_DIR", "--run-dir"),
    ):
        if os.environ.get(variable):
            given += [flag, os.environ[variable]]
    given += sys.argv[1:]
    if any(flag.partition("=")[0] == "--run-dir" for flag in given):
        given = ["--resume", "auto", *given]
    return given


if __name__ == "__main__":
    from megasink.train.pretrain import main

    sys.exit(main(flags()))

"the end of the Python part"
