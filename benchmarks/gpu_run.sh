#!/usr/bin/env bash
# Trains a 124M model on real text on one GPU through maxlm train: with a kill, a resumption, an evaluation, an export.
#
#   bash benchmarks/gpu_run.sh prepare DIR [OPTION …]   on a machine with a network: writes DIR and prints its size
#   bash benchmarks/gpu_run.sh run DIR [OPTION …]       on the GPU machine: writes OUT/run.json within 570 seconds
#
# DIR has the tokens of Debian's documentation and the wheels that a machine with jax, flax, optax, orbax-checkpoint,
# tensorstore, tokenizers, psutil and tqdm lacks for maxlm train. Options are those of benchmarks.gpu_run_prepare and
# benchmarks.gpu_run; --minutes=3 trains for a shorter time. OUT (default: benchmarks/results/gpu) also gets the log of
# the processes. PYTHON is the interpreter (default: python3), LIMIT the time limit in seconds (default: 570).
# Exit codes: 0 done, 1 a part failed, 2 bad input, 124 the time was too short.
set -euo pipefail
usage='usage: benchmarks/gpu_run.sh prepare|run DIR [OPTION …]'
if (($# < 2)); then
  echo "error: $usage" >&2
  exit 2
fi
action="$1"
# An absolute path, because the next line changes the directory.
directory="$(realpath -m -- "$2")"
shift 2
cd "$(dirname "$0")/.."
python="${PYTHON:-python3}"
source benchmarks/gpu_wheels.sh

case "$action" in
  prepare)
    exec "$python" -m benchmarks.gpu_run_prepare "$directory" "$@"
    ;;
  run)
    WHEELS="${WHEELS-$directory/wheels}"
    if [ -d "$WHEELS" ]; then
      use_wheels
    fi
    exec timeout --kill-after=10 "${LIMIT:-570}" \
      "$python" -m benchmarks.gpu_run "$directory" --output="${OUT:-benchmarks/results/gpu}/run.json" "$@"
    ;;
  *)
    echo "error: no action $action; $usage" >&2
    exit 2
    ;;
esac
