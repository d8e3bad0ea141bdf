#!/usr/bin/env bash
# Runs the measurements that need a GPU, the most informative first, and writes a JSON file after each.
#
#   bash benchmarks/gpu.sh               the checks of the computation and the shipped step, within 570 seconds
#   bash benchmarks/gpu.sh               the norm kernels, fp8, experts and decoding, within 570 seconds
#   bash benchmarks/gpu.sh               the comparison with PyTorch, within 570 seconds
#   LIMIT=3600 bash benchmarks/gpu.sh    all measurements
#
# Each call skips the measurements that have a JSON file. LIMIT is in seconds. A measurement starts only if it fits into
# the remaining time; the script lists the skipped ones, which are no failure. Files go to OUT (default:
# benchmarks/results/gpu), PYTHON is the interpreter (default: python3). The profile and the compiled program of 1b are
# in OUT/profile. Measurements share compiled programs in JAX_COMPILATION_CACHE_DIR (default: ~/.cache/maxlm/benchmarks),
# so `compile_seconds` is shorter for a program that an earlier measurement compiled.
#
# Needs a GPU and jax, flax, optax, orbax-checkpoint and ml_collections, and torch and transformers for the comparison
# with PyTorch. NANOCHAT is a directory with nanochat's source, if it should be compared too. On a machine without network, WHEELS is a directory of wheels to use (see benchmarks/gpu_run.sh).
# Exit codes: 0 all measurements that ran passed, 1 a measurement failed, 2 this machine has no GPU or lacks a package.
set -euo pipefail
cd "$(dirname "$0")/.."
out="${OUT:-benchmarks/results/gpu}"
python="${PYTHON:-python3}"
limit="${LIMIT:-570}"
source benchmarks/gpu_wheels.sh
# Maximum seconds of a measurement that is not declared to need more.
longest=240
failed=()
skipped=()

if ! [[ "$limit" =~ ^[0-9]+$ ]]; then
  echo "error: LIMIT=$limit: needs a whole number of seconds" >&2
  exit 2
fi
use_wheels
"$python" -c '
import importlib.util, sys
packages = {"jax": "jax", "flax": "flax", "optax": "optax", "orbax": "orbax-checkpoint", "ml_collections": "ml_collections"}
missing = [package for module, package in packages.items() if importlib.util.find_spec(module) is None]
if missing:
    sys.exit(f"error: not installed: pip install {chr(32).join(missing)}")
import jax
if jax.default_backend() != "gpu":
    sys.exit(f"error: no GPU: JAX runs on {jax.default_backend()}")
' || exit 2
# A measurement that fails or is killed may leave its file here, and runs again at the next call.
mkdir -p "$out/unfinished"
# The fraction that training uses; see launch/gpu_node.sh.
export XLA_PYTHON_CLIENT_MEM_FRACTION="${XLA_PYTHON_CLIENT_MEM_FRACTION:-0.92}"
cache=~/.cache/maxlm/benchmarks
export JAX_COMPILATION_CACHE_DIR="${JAX_COMPILATION_CACHE_DIR:-$cache}"

run() { # NAME SECONDS MODULE [ARGUMENT …]: runs in a separate process; a failure does not stop the script
  local name="$1" needs="$2" module="$3" left=$((limit - SECONDS)) code=0
  local most=$((needs > longest ? needs : longest))
  shift 3
  if [ -s "$out/$name.json" ]; then
    return
  fi
  if ((left < needs)); then
    skipped+=("$name")
    return
  fi
  echo "-- $name"
  timeout --kill-after=10 "$((left < most ? left : most))" \
    "$python" -m "$module" --output="$out/unfinished/$name.json" "$@" || code=$?
  if ((code == 0)); then
    mv "$out/unfinished/$name.json" "$out/$name.json"
  else
    echo "error: $name: $( ((code == 124)) && echo 'took too long' || echo "exit code $code")" >&2
    failed+=("$name")
  fi
}

measure() { # NAME SECONDS CONFIG [--config.… …]
  local name="$1" needs="$2" config="$3"
  shift 3
  run "$name" "$needs" benchmarks.step --name="$name" --config="$config" "$@"
}

# Updates of 16 sequences instead of hundreds: accumulation repeats the same work.
short=(--config.train.global_batch_size=16)
few=(--steps=12 --warmup=2)
# Two runs whose losses are compared: 40 steps on text. With a shorter warm-up, AdamW is unstable.
learning=("${short[@]}" --tokens=text --steps=40 --config.optimizer.warmup_steps=30)

# The checks of the computation. With wrong values, the speed of a step is meaningless.
#
# Does the loss jump because of the parameters, or because of a wrong computation? The short warm-up provokes a jump.
run decide 120 benchmarks.gpu_decide --config=configs/1b.py "${short[@]}" --config.optimizer.warmup_steps=5
# The values of attention within documents, and the bits of repeated runs.
run attention 75 benchmarks.gpu_attention
# Two runs of 50 steps, and one that is killed and resumed, have equal bits. Each compiles its program.
JAX_ENABLE_COMPILATION_CACHE=false run deterministic 150 benchmarks.gpu_checks --config=configs/1b.py "${short[@]}" \
  --config.model.num_layers=8
# Each of 200 steps, of two micro-batches, is computed twice with equal bits.
run replay 130 benchmarks.gpu_replay --exact --config=configs/1b.py --config.train.deterministic=true \
  --config.train.global_batch_size=8 --config.train.per_device_batch_size=4

# The shipped step, with a profile and the compiled program. It compiles anew, to measure the time for it.
JAX_ENABLE_COMPILATION_CACHE=false measure 1b 75 configs/1b.py "${learning[@]}" --profile="$out/profile"
# The values and the time of the norm kernels, and the step with them.
run norm 60 benchmarks.gpu_norm
measure 1b_norm_kernels 75 configs/1b.py "${learning[@]}" --config.model.norm_kernel=pallas --beside="$out/1b.json"
# The cost of equal bits.
measure 1b_deterministic 75 configs/1b.py "${learning[@]}" --config.train.deterministic=true --beside="$out/1b.json"
# The values of the products of experts, which need tokamax.
has_tokamax=false
if "$python" -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("tokamax") is None)'; then
  has_tokamax=true
  run experts 40 benchmarks.gpu_experts
fi
measure 1b_fp8 150 configs/1b.py "${learning[@]}" --config.model.matmul_precision=fp8 --beside="$out/1b.json"
# A model with experts.
measure 8x1b_4layers 60 configs/moe.py:8x1b "${few[@]}" --config.model.num_layers=4 --config.train.global_batch_size=8 \
  --config.train.per_device_batch_size=4
# The memory bandwidth of decoding.
run decode_1b 60 benchmarks.decode --config=configs/1b.py
run decode_1b_int8 60 benchmarks.decode --config=configs/1b.py --cache=int8

# The comparison with PyTorch. Most of the time is that of `torch.compile`.
run peers 500 benchmarks.peers_gpu --sides=maxlm,torch
run peers_others 500 benchmarks.peers_gpu --sides="maxlm,transformers${NANOCHAT:+,nanochat}" \
  ${NANOCHAT:+--nanochat="$NANOCHAT"}
# Decoding beside Transformers with CUDA graphs, and with a host that starts each pass.
run decode_1b_peer 200 benchmarks.decode --config=configs/1b.py --peer
run decode_1b_host_loop 60 benchmarks.decode --config=configs/1b.py --host-loop

# Attention of Tokamax instead of cuDNN's.
if "$has_tokamax"; then
  measure 1b_tokamax 60 configs/1b.py "${few[@]}" "${short[@]}" --config.model.attention=tokamax
fi

# Fusions of slices with other kernels, which training turns off.
measure 1b_slice_fusion 60 configs/1b.py "${few[@]}" "${short[@]}" --xla=xla_gpu_enable_dynamic_slice_fusion=true
measure 1b_scan 40 configs/1b.py "${few[@]}" "${short[@]}" --config.model.scan_layers=true
measure 1b_scan_slice_fusion 40 configs/1b.py "${few[@]}" "${short[@]}" --config.model.scan_layers=true \
  --xla=xla_gpu_enable_dynamic_slice_fusion=true

# The other sizes.
measure neox 45 configs/neox.py:tuned_1gpu "${few[@]}" "${short[@]}"
measure xlarge 45 configs/mix.py:xlarge "${few[@]}" "${short[@]}"
measure d24 45 configs/depth.py:24-2025 "${few[@]}" "${short[@]}"
measure 7b_8layers 45 configs/code.py:7b "${few[@]}" --config.model.num_layers=8 --config.train.global_batch_size=8 \
  --config.train.per_device_batch_size=4

# The cost of Muon.
measure d24_adamw 45 configs/depth.py:24-2025 "${few[@]}" "${short[@]}" --config.optimizer.name=adamw \
  --config.optimizer.learning_rate=3e-4 --config.optimizer.adam_learning_rate=0 \
  --config.optimizer.muon_momentum_warmup_steps=0 --config.optimizer.embedding_learning_rate=0

# Rematerialization policies and micro-batches.
for policy in none dots dots_no_batch full; do
  measure "1b_remat_$policy" 60 configs/1b.py "${few[@]}" "${short[@]}" --config.model.remat_policy="$policy"
done
measure 1b_batch4 60 configs/1b.py "${few[@]}" "${short[@]}" --config.train.per_device_batch_size=4
measure 1b_batch16 60 configs/1b.py "${few[@]}" "${short[@]}" --config.train.per_device_batch_size=16
measure 1b_documents_visible 40 configs/1b.py "${few[@]}" "${short[@]}" --config.data.document_mask=false
# Delayed scaling, alone and with the head.
delayed=(--config.model.matmul_precision=fp8 --config.model.fp8_scaling=delayed)
measure 1b_fp8_delayed 150 configs/1b.py "${learning[@]}" "${delayed[@]}" --beside="$out/1b.json"
# The kernels that round to fp8, alone and with the norm kernels.
rounding=("${delayed[@]}" --config.model.fp8_kernel=pallas)
measure 1b_fp8_kernels 150 configs/1b.py "${learning[@]}" "${rounding[@]}" --beside="$out/1b_fp8_delayed.json"
measure 1b_fp8_all_kernels 150 configs/1b.py "${learning[@]}" "${rounding[@]}" --config.model.norm_kernel=pallas \
  --beside="$out/1b_fp8_delayed.json"
measure 1b_fp8_head 150 configs/1b.py "${learning[@]}" "${delayed[@]}" --config.model.fp8_head=true --beside="$out/1b.json"
measure xlarge_fp8 45 configs/mix.py:xlarge "${few[@]}" "${short[@]}" --config.model.matmul_precision=fp8
measure 7b_8layers_fp8 45 configs/code.py:7b "${few[@]}" --config.model.num_layers=8 --config.train.global_batch_size=8 \
  --config.train.per_device_batch_size=4 --config.model.matmul_precision=fp8

# Optimizer state in other dtypes and in host memory.
measure 1b_moments_bfloat16 40 configs/1b.py "${few[@]}" "${short[@]}" --config.optimizer.moment_dtype=bfloat16
measure 1b_moments_int8 40 configs/1b.py "${few[@]}" "${short[@]}" --config.optimizer.moment_dtype=int8
measure 1b_offload_optimizer 40 configs/1b.py "${few[@]}" "${short[@]}" --config.mesh.host_offload=optimizer
measure 1b_offload_all 40 configs/1b.py "${few[@]}" "${short[@]}" --config.mesh.host_offload=all
measure 1b_float16 40 configs/1b.py "${few[@]}" "${short[@]}" --config.model.dtype=float16
measure 1b_loss_chunk_8192 40 configs/1b.py "${few[@]}" "${short[@]}" --config.train.loss_chunk_tokens=8192

# XLA options: products by cuBLAS alone, no CUDA graphs, all tilings of Triton.
measure 1b_xla_no_triton 40 configs/1b.py "${few[@]}" "${short[@]}" --xla=xla_gpu_enable_triton_gemm=false
measure 1b_xla_no_graphs 40 configs/1b.py "${few[@]}" "${short[@]}" --xla=xla_gpu_enable_command_buffer=
measure 1b_xla_autotune_4 90 configs/1b.py "${few[@]}" "${short[@]}" --xla=xla_gpu_autotune_level=4 \
  --xla=xla_gpu_exhaustive_tiling_search=true
run peers_cudnn 500 benchmarks.peers_gpu --sides=maxlm,torch_cudnn

if ((${#skipped[@]})); then
  echo "skipped, as LIMIT=$limit seconds are too short: ${skipped[*]}"
fi
if ((${#failed[@]})); then
  echo "error: failed: ${failed[*]}" >&2
  exit 1
fi
