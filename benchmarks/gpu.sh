#!/usr/bin/env bash
# Runs all GPU measurements that are ready and writes one JSON file each to OUT (default: benchmarks/results).
# Needs a GPU and python3 with jax, flax, optax and ml_collections; each measurement may take 150 seconds at most.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-benchmarks/results}"
mkdir -p "$out"
python="${PYTHON:-python3}"
failed=0

"$python" -c 'import jax; assert jax.default_backend() == "gpu", f"no GPU: JAX runs on {jax.default_backend()}"' || exit 2

measure() { # NAME CONFIG [--config.… …]: one after the other, each in a process of its own; a failure does not stop the rest
  local name="$1" config="$2"
  shift 2
  echo "-- $name"
  timeout 150 "$python" -m benchmarks.step --name="$name" --config="$config" --output="$out/$name.json" "$@" || failed=1
}

# The full 1B step at window 2048. 32 sequences an update instead of 512: accumulation repeats the same work, and a
# measurement of 20 steps should take seconds.
short="--config.train.global_batch=32"
measure 1b configs/1b.py "$short"
measure 1b_documents_visible configs/1b.py "$short" --config.data.isolate_documents=false
measure 1b_batch8 configs/1b.py "$short" --config.train.micro_batch=8
measure 1b_batch8_remat_none configs/1b.py "$short" --config.train.micro_batch=8 --config.model.remat=none
measure 1b_batch16_remat_full configs/1b.py "$short" --config.train.micro_batch=16 --config.model.remat=full
measure 1b_unrolled configs/1b.py "$short" --config.model.scan_layers=false
# The same in float16, with small moments, and with state in host memory.
measure 1b_float16 configs/1b.py "$short" --config.model.dtype=float16
measure 1b_moments_int8 configs/1b.py "$short" --config.optimizer.moments=int8
measure 1b_offload_optimizer configs/1b.py "$short" --config.mesh.offload=optimizer
measure 1b_offload_all configs/1b.py "$short" --config.mesh.offload=all
exit "$failed"
