#!/bin/sh
# Runs a `megasink ...` or `torchrun ...` line, or any other program of the image. It ends in exec,
# so that the scheduler's signals reach the trainer and not a shell.
set -eu

if [ $# -eq 0 ]; then
  set -- megasink --help
elif ! command -v "$1" >/dev/null 2>&1; then
  echo "entrypoint: '$1' is not a program in this image; start the command with megasink or torchrun" >&2
  exit 127
fi

# Docker's default of 64 MB makes NCCL fail with nothing but "unhandled system error".
if [ "$1" = torchrun ] && [ -e /dev/nvidiactl ]; then
  shm_kb=$(df -Pk /dev/shm 2>/dev/null | awk 'NR == 2 { print $2 }')
  if [ "${shm_kb:-0}" -lt 1048576 ]; then
    echo "entrypoint: /dev/shm is under 1 GB; run the container with --ipc=host or --shm-size" >&2
  fi
fi

exec "$@"
