#!/usr/bin/env bash
# Runs the training process of one node for train.sbatch: task.sh FILE COMMAND… If the command exits with 74, because a
# device of the node computes wrong results, the script adds the name of the node to FILE. It exits with the same code.
set -euo pipefail
faulty="$1"
shift
# Slurm signals all processes of a step. This shell waits until the command has saved.
trap : TERM
code=0
"$@" || code=$?
if [ "$code" -eq 74 ]; then
  echo "${SLURMD_NODENAME:-$(hostname)}" >>"$faulty" || echo "error: cannot add this node to $faulty" >&2
fi
exit "$code"
