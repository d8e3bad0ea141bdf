#!/usr/bin/env bash
# Runs the measurements that need a GPU, the most telling ones first, and writes one JSON file each.
#
#   bash benchmarks/gpu.sh               what fits into 8 minutes
#   LIMIT=2400 bash benchmarks/gpu.sh    all of it
#
# LIMIT is in seconds. A measurement is not started if what is left is less than it needs; what was left out is said at
# the end and is no failure. Files go to OUT (default: benchmarks/results), PYTHON is the interpreter (default: python3).
# Needs a GPU and jax, flax, optax and ml_collections, and torch for the comparison with PyTorch.
# Exit codes: 0 all that ran passed, 1 something failed, 2 this machine cannot run it.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-benchmarks/results}"
python="${PYTHON:-python3}"
limit="${LIMIT:-480}"
# What one measurement may take at most.
longest=150
failed=()
left_out=()

if ! [[ "$limit" =~ ^[0-9]+$ ]]; then
  echo "error: LIMIT=$limit: needs a whole number of seconds" >&2
  exit 2
fi
"$python" -c '
import importlib.util, sys
missing = [name for name in ("jax", "flax", "optax", "ml_collections") if importlib.util.find_spec(name) is None]
if missing:
    sys.exit(f"error: not installed: pip install {chr(32).join(missing)}")
import jax
if jax.default_backend() != "gpu":
    sys.exit(f"error: no GPU: JAX runs on {jax.default_backend()}")
' || exit 2
mkdir -p "$out"
# As much as a run may take; see launch/gpu_node.sh.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"

run() { # NAME SECONDS MODULE [ARGUMENT …]: a process of its own; a failure does not stop the rest
  local name="$1" needs="$2" module="$3" left=$((limit - SECONDS)) code=0
  shift 3
  if ((left < needs)); then
    left_out+=("$name")
    return
  fi
  echo "-- $name"
  timeout --kill-after=10 "$((left < longest ? left : longest))" \
    "$python" -m "$module" --output="$out/$name.json" "$@" || code=$?
  if ((code)); then
    echo "error: $name: $( ((code == 124)) && echo 'took too long' || echo "exit code $code")" >&2
    failed+=("$name")
  fi
}

measure() { # NAME SECONDS CONFIG [--config.… …]
  local name="$1" needs="$2" config="$3"
  shift 3
  run "$name" "$needs" benchmarks.step --name="$name" --config="$config" "$@"
}

# 16 sequences an update instead of hundreds: accumulation repeats the same work, and a dozen steps should take seconds.
short=(--config.train.global_batch_size=16)
few=(--steps=12 --warmup=2)
# Two that should learn alike: 40 steps on text, with a learning rate that is there at once.
learning=("${short[@]}" --tokens=text --steps=40 --config.optimizer.warmup_steps=5)

# Whether attention within documents is right on this GPU: of other steps the speed would mean nothing.
run attention 60 benchmarks.gpu_attention
measure 1b 45 configs/1b.py "${learning[@]}"
run peers 140 benchmarks.peers_gpu
measure 1b_fp8 45 configs/1b.py "${learning[@]}" --config.model.matmul_precision=fp8 --beside="$out/1b.json"
# What of the memory's bandwidth decoding reaches.
run decode_1b 60 benchmarks.decode --config=configs/1b.py
run decode_1b_int8 60 benchmarks.decode --config=configs/1b.py --cache=int8

# The other sizes.
measure neox 45 configs/neox.py:production "${few[@]}" "${short[@]}"
measure xlarge 45 configs/mix.py:xlarge "${few[@]}" "${short[@]}"
measure d24 45 configs/depth.py:24 "${few[@]}" "${short[@]}"
measure 7b_8layers 45 configs/code.py:7b "${few[@]}" --config.model.num_layers=8 --config.train.global_batch_size=8 \
  --config.train.per_device_batch_size=4

# What Muon costs.
measure d24_adamw 45 configs/depth.py:24 "${few[@]}" "${short[@]}" --config.optimizer.name=adamw \
  --config.optimizer.learning_rate=3e-4 --config.optimizer.adam_learning_rate=0 \
  --config.optimizer.muon_momentum_warmup_steps=0 --config.optimizer.embedding_learning_rate=0

# What of a block is kept, and how many sequences are worked on at a time.
for policy in none dots dots_no_batch full; do
  measure "1b_batch8_remat_$policy" 40 configs/1b.py "${few[@]}" "${short[@]}" --config.train.per_device_batch_size=8 \
    --config.model.remat_policy="$policy"
done
measure 1b_batch16_remat_dots 40 configs/1b.py "${few[@]}" "${short[@]}" --config.train.per_device_batch_size=16 \
  --config.model.remat_policy=dots
measure 1b_unrolled 120 configs/1b.py "${few[@]}" "${short[@]}" --config.model.scan_layers=false
measure 1b_documents_visible 40 configs/1b.py "${few[@]}" "${short[@]}" --config.data.document_mask=false
measure xlarge_fp8 45 configs/mix.py:xlarge "${few[@]}" "${short[@]}" --config.model.matmul_precision=fp8
measure 7b_8layers_fp8 45 configs/code.py:7b "${few[@]}" --config.model.num_layers=8 --config.train.global_batch_size=8 \
  --config.train.per_device_batch_size=4 --config.model.matmul_precision=fp8

# Of the optimizer: its state in other types, and in host memory.
measure 1b_moments_bfloat16 40 configs/1b.py "${few[@]}" "${short[@]}" --config.optimizer.moment_dtype=bfloat16
measure 1b_moments_int8 40 configs/1b.py "${few[@]}" "${short[@]}" --config.optimizer.moment_dtype=int8
measure 1b_offload_optimizer 40 configs/1b.py "${few[@]}" "${short[@]}" --config.mesh.host_offload=optimizer
measure 1b_offload_all 40 configs/1b.py "${few[@]}" "${short[@]}" --config.mesh.host_offload=all
measure 1b_float16 40 configs/1b.py "${few[@]}" "${short[@]}" --config.model.dtype=float16
measure 1b_loss_chunk_8192 40 configs/1b.py "${few[@]}" "${short[@]}" --config.train.loss_chunk_tokens=8192

# What XLA can be told: products by cuBLAS alone, no CUDA graphs, all tilings of Triton tried out.
measure 1b_xla_no_triton 40 configs/1b.py "${few[@]}" "${short[@]}" --xla=xla_gpu_enable_triton_gemm=false
measure 1b_xla_no_graphs 40 configs/1b.py "${few[@]}" "${short[@]}" --xla=xla_gpu_enable_command_buffer=
measure 1b_xla_autotune_4 90 configs/1b.py "${few[@]}" "${short[@]}" --xla=xla_gpu_autotune_level=4 \
  --xla=xla_gpu_exhaustive_tiling_search=true
run peers_cudnn 140 benchmarks.peers_gpu --sides=maxlm,torch_cudnn

if ((${#left_out[@]})); then
  echo "left out, as LIMIT=$limit seconds were too short: ${left_out[*]}"
fi
if ((${#failed[@]})); then
  echo "error: failed: ${failed[*]}" >&2
  exit 1
fi
