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
# per node, one for each device of CUDA_VISIBLE_DEVICES, of SLURM_GPUS_ON_NODE or of the machine, and
# MAX_RESTARTS (0) how often torchrun starts the ranks again. The flags are those of the
# recipe p0-0.6b, or of --recipe NAME (docs/recipes.md). Several nodes without Slurm or Kubernetes:
# start this file on each with NNODES and MASTER_ADDR set (docs/launch.md).

set -euo pipefail
python=${PYTHON:-python3}

nnodes=${NNODES:-${SLURM_NNODES:-${PET_NNODES:-1}}}
RANKS_PER_NODE=${RANKS_PER_NODE:-${PET_NPROC_PER_NODE:-}}
if [[ -z $RANKS_PER_NODE ]]; then
  # The devices that this process may use, of those that the machine has; one rank without any.
  case ${CUDA_VISIBLE_DEVICES-unset} in
    unset)
      # Without the instances of MIG, which are on lines of their own.
      gpus=$(nvidia-smi --list-gpus 2>/dev/null | sed -n /^GPU/p | wc -l) || gpus=0
      RANKS_PER_NODE=${SLURM_GPUS_ON_NODE:-$((gpus > 0 ? gpus : 1))}
      ;;
    '' | -1* | NoDevFiles) RANKS_PER_NODE=1 ;;
    *)
      commas=${CUDA_VISIBLE_DEVICES//[^,]/}
      RANKS_PER_NODE=$((${#commas} + 1))
      ;;
  esac
fi
torchrun=torch.distributed.run
[[ $nnodes -gt 1 ]] && torchrun=megasink.training.multi_host_torchrun # the same, and says for whom a host waits
launch=("$python" -m "$torchrun" --nnodes "$nnodes" --nproc-per-node "$RANKS_PER_NODE"
        --max-restarts "${MAX_RESTARTS:-0}"
        "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1")
if [[ $nnodes -gt 1 ]]; then
  # Else hosts whose clocks differ train apart from each other: a rank refuses another number.
  [[ $RANKS_PER_NODE = *[!0-9]* ]] || export MEGASINK_RANKS=$((nnodes * RANKS_PER_NODE))
  # Rendezvous at the first host of the allocation, with the same job id on every node.
  if [[ -z ${MASTER_ADDR:-} && -n ${SLURM_JOB_NODELIST:-} ]]; then
    # No `head`: it would end scontrol by SIGPIPE, and so this script.
    hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
    MASTER_ADDR=${hosts%%$'\n'*}
  fi
  : "${MASTER_ADDR:?set MASTER_ADDR to the name of the first node}"
  # torchrun would ask what the host's own name resolves to, often a loopback address.
  address=$("$python" -m megasink.training.network "$MASTER_ADDR")
  launch+=(--rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
           ${SLURM_JOB_ID:+--rdzv-id "$SLURM_JOB_ID"} # else the run folder
           --local-addr "${address% *}" --rdzv-conf "is_host=${address#* }")
  # Else an agent that joins later, on a host that came back, waits in vain for the address of the
  # ranks' store: torch tells it only once (dynamic_rendezvous.py, next_rendezvous).
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
else
  launch+=(--rdzv-backend c10d --rdzv-endpoint localhost:0 --local-addr 127.0.0.1)
fi
# SIGTERM or Ctrl-C writes a checkpoint; by default torchrun kills the ranks 30 s later.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-600}
exec "${launch[@]}" "$0" "$@"
: <<'"the end of the Python part"'
'''

# The Python part, run by torchrun on each rank.
import os
import sys


def flags():
    """Return the recipe, then the flags from the environment and the command line."""
    chosen = any(word.partition("=")[0] == "--recipe" for word in sys.argv)
    given = [] if chosen else ["--recipe", "p0-0.6b"]
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
    from megasink.training.pretrain import main

    sys.exit(main(flags()))

"the end of the Python part"
