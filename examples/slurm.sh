#!/usr/bin/env bash
# Pretraining on 4 nodes of 8 GPUs, until it is done: at the time limit, after a preemption and after
# the loss of a node Slurm requeues the job, which goes on from its newest checkpoint.
#
#   export DATA_PATH=/shared/corpus TOKENIZER=/shared/corpus-tokenizer RUN_DIR=/shared/runs/gated
#   sbatch examples/slurm.sh --recipe p0-2b --attention-variant gated
#
# Submit it from the checkout. All nodes share the run folder. IMAGE runs it in a container through
# Pyxis (docker/README.md), where MOUNTS must name the shared file system: IMAGE=megasink.sqsh
# MOUNTS=/shared.
#
# COPY_TO=s3://bucket/run copies the run folder to an object store at the end of every job, with the
# AWS command line.
#
# The warning comes 10 minutes before the end, for one step and one checkpoint. It goes to this
# shell (B:), which hands it on: it has to know whether the ranks ended for it.
#SBATCH --job-name=megasink
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:USR1@600
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.out

set -euo pipefail
: "${RUN_DIR:?set RUN_DIR to a folder that all nodes share}"
# Not known in a container, where scontrol is missing.
hosts=$(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR=${hosts%%$'\n'*}

script=examples/pretrain_gpt_sink.sh
container=()
if [[ -n ${IMAGE:-} ]]; then
  script=/opt/megasink/$script
  container=(--container-image="$IMAGE" --container-mounts="${MOUNTS:?set MOUNTS}")
fi

warned=
trap 'warned=1; scancel --signal=USR1 "$SLURM_JOB_ID"' USR1
# Where a node is lost, the others end by themselves (docs/launch.md) or are ended here.
srun --kill-on-bad-exit=1 "${container[@]}" bash "$script" "$@" &
job=$!
code=0
wait "$job" || code=$?
if [[ -n $warned ]]; then # the trap has interrupted `wait`
  code=0
  wait "$job" || code=$?
fi
if [[ -n ${COPY_TO:-} ]]; then
  aws s3 sync "$RUN_DIR" "$COPY_TO" --exclude 'data-cache/*' || echo "no copy in $COPY_TO" >&2
fi
if [[ -n $warned ]]; then
  [[ $code -eq 0 ]] || scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
