#!/usr/bin/env bash
# Trains on the GPUs of this node. To train on several nodes, start it on each node.
#
#   launch/gpu_node.sh [OPTION…] -- ARGUMENTS OF maxlm train
#
#   --nodes N --node-rank R    number of nodes, and rank of this node (0 to N-1)
#   --coordinator HOST:PORT    a free port of node 0 that all nodes can reach; required with several nodes
#   --min-nodes M              elastic run: after a node is lost, the run continues with M nodes or more, and a node that
#                              starts this command joins. --nodes is the maximum. --node-rank and --coordinator are not
#                              used. The nodes find each other in the workdir
#   --address HOST --host-timeout SECONDS   options of maxlm supervise for elastic runs
#   --per-gpu                  one process per GPU instead of one process per node
#   --gpus G                   number of GPUs to use (default: all)
#   --platform cpu --devices D   a trial without GPUs: D virtual devices per process; with --per-gpu, --gpus is the
#                              number of processes on this node
#   --logs DIR                 log directory of all processes except the first (default: WORKDIR/logs, or logs if
#                              WORKDIR is in a bucket)
#   --max-failures K --backoff SECONDS   options of maxlm supervise, which restarts the node
#   --once                     no restarts, for schedulers that restart jobs themselves
#   --monitor                  show the dashboard of maxlm monitor on this terminal. Output of the run goes to node.log in
#                              the log directory. After q, the script waits for the run; Ctrl-C then stops it
#   --detach                   start a run that continues without this terminal, and return. Output goes to WORKDIR/logs;
#                              `maxlm supervise --stop WORKDIR` saves and stops it
#   --grace SECONDS            time between SIGTERM and SIGKILL for this node's processes after one failed (default 30)
#   --dry-run                  print the commands without running them
#
# MAXLM_NUM_PROCESSES, MAXLM_PROCESS_ID and MAXLM_COORDINATOR are the defaults of --nodes, --node-rank and --coordinator.
set -euo pipefail
launch="$(cd "$(dirname "$0")" && pwd)"
. "$launch/commands.sh"

nodes="${MAXLM_NUM_PROCESSES:-1}"
node_rank="${MAXLM_PROCESS_ID:-0}"
coordinator="${MAXLM_COORDINATOR:-}"
min_nodes=
per_gpu=false
gpus=
platform=gpu
devices=
logs=
once=false
grace=30
monitor=false
detach=false
dry_run=false
restart_options=()
# Arguments for the processes that this script starts.
given=()
for word in "$@"; do
  [ "$word" = --monitor ] || [ "$word" = --detach ] || given+=("$word")
done
split_equals "$@"
set -- ${words[@]+"${words[@]}"}
while [ $# -gt 0 ]; do
  case "${1//_/-}" in
    --nodes) need_value "$1" "$@" && nodes="$2" && shift ;;
    --node-rank) need_value "$1" "$@" && node_rank="$2" && shift ;;
    --coordinator) need_value "$1" "$@" && coordinator="$2" && shift ;;
    --min-nodes) need_value "$1" "$@" && min_nodes="$2" && shift ;;
    --per-gpu) per_gpu=true ;;
    --gpus) need_value "$1" "$@" && gpus="$2" && shift ;;
    --platform) need_value "$1" "$@" && platform="$2" && shift ;;
    --devices) need_value "$1" "$@" && devices="$2" && shift ;;
    --logs) need_value "$1" "$@" && logs="$2" && shift ;;
    --max-failures | --backoff | --address | --host-timeout) need_value "$1" "$@" && restart_options+=("$1" "$2") && shift ;;
    --once) once=true ;;
    --grace) need_value "$1" "$@" && grace="$2" && shift ;;
    --monitor) monitor=true ;;
    --detach) detach=true ;;
    --dry-run) dry_run=true ;;
    --) shift && break ;;
    *) refuse "unknown option $1; arguments of maxlm train come after --" ;;
  esac
  shift
done
if [ -n "$min_nodes" ] && $once; then
  # maxlm supervise has set the variables of the current generation of the elastic run.
  nodes="${MAXLM_NUM_PROCESSES:-$nodes}"
  node_rank="${MAXLM_PROCESS_ID:-$node_rank}"
  coordinator="${MAXLM_COORDINATOR:-$coordinator}"
elif [ -n "$min_nodes" ]; then
  need_number --min-nodes "$min_nodes"
  node_rank=0
  coordinator=
fi
need_number --nodes "$nodes"
need_number --node-rank "$node_rank"
need_number --grace "$grace"
[ "$nodes" -ge 1 ] || refuse "--nodes=$nodes: give 1 or more"
[ "$node_rank" -lt "$nodes" ] || refuse "--node-rank=$node_rank: with --nodes $nodes give 0 to $((nodes - 1))"
workdir="$(find_workdir "$@")"
[ -n "$workdir" ] || refuse '--workdir is missing; arguments of maxlm train come after --'
case "$coordinator" in
  '') [ "$nodes" -eq 1 ] || { [ -n "$min_nodes" ] && ! $once; } || refuse "--coordinator is missing: with --nodes $nodes give HOST:PORT of node 0" ;;
  ?*:[0-9]*) need_number 'the port of --coordinator' "${coordinator##*:}" ;;
  *) refuse "--coordinator=$coordinator: give HOST:PORT" ;;
esac
case "$platform" in
  gpu) [ -z "$devices" ] || refuse '--devices is for --platform cpu; choose GPUs with --gpus' ;;
  cpu)
    devices="${devices:-1}"
    need_number --devices "$devices"
    ;;
  *) refuse "--platform=$platform: give gpu or cpu" ;;
esac

if $detach; then
  if $once; then refuse '--detach does not work with --once, because maxlm supervise detaches the run'; fi
  if $monitor; then refuse '--detach does not work with --monitor; run maxlm monitor WORKDIR afterwards'; fi
fi

# count_gpus: prints the number of GPUs that this node uses.
count_gpus() {
  if [ -n "$gpus" ]; then
    echo "$gpus"
  elif [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
    echo "$CUDA_VISIBLE_DEVICES" | tr ',' '\n' | grep -c .
  else
    # nvidia-smi prints one line per GPU; lines of MIG slices are indented.
    nvidia-smi -L 2>/dev/null | grep -c '^GPU' || refuse 'no GPU found by nvidia-smi; give --gpus'
  fi
}

processes=1
if $per_gpu; then
  [ "$platform" = gpu ] || [ -n "$gpus" ] || refuse '--per-gpu with --platform cpu needs --gpus, the number of processes'
  gpus="$(count_gpus)"
  need_number --gpus "$gpus"
  processes="$gpus"
fi
[ -z "$gpus" ] || need_number --gpus "$gpus"
[ -z "$gpus" ] || [ "$gpus" -ge 1 ] || refuse "--gpus=$gpus: give 1 or more"

# set_default NAME VALUE: exports a variable that the user has not set.
set_default() {
  if [ -z "${!1+set}" ]; then
    export "$1=$2"
  fi
}

export_settings() {
  if [ "$platform" = cpu ]; then
    export JAX_PLATFORMS=cpu
    # Gloo is JAX's implementation of collectives between CPU processes.
    set_default JAX_CPU_COLLECTIVES_IMPLEMENTATION gloo
    # If a flag occurs twice, XLA uses the last one.
    export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_force_host_platform_device_count=$devices"
    return
  fi
  # JAX preallocates 75 % of the memory by default. The remaining 8 % are for NCCL and CUDA.
  set_default XLA_PYTHON_CLIENT_MEM_FRACTION .92
  # Kernels start in XLA's order, so that no collective is queued behind the computation that should overlap with it.
  set_default CUDA_DEVICE_MAX_CONNECTIONS 1
  # Overlaps collectives with computation. XLA disables this by default.
  case "${XLA_FLAGS:-}" in
    *xla_gpu_enable_latency_hiding_scheduler*) ;;
    *) export XLA_FLAGS="${XLA_FLAGS:+$XLA_FLAGS }--xla_gpu_enable_latency_hiding_scheduler=true" ;;
  esac
  # NCCL then prints the cause of a failure; otherwise it only reports "unhandled system error".
  set_default NCCL_DEBUG WARN
  if [ "$nodes" -gt 1 ]; then
    # 4 µs · 2²² = 17 s for each of 7 attempts, so that a short InfiniBand outage does not end the run.
    set_default NCCL_IB_TIMEOUT 22
  fi
  # NCCL_PROTO and NCCL_ALGO stay unset: NCCL chooses them for the machine, and LL128 corrupts data on machines that do
  # not support it.
  if [ -n "$gpus" ] && ! $per_gpu; then
    if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then
      CUDA_VISIBLE_DEVICES="$(echo "$CUDA_VISIBLE_DEVICES" | cut -d , -f "1-$gpus")"
    else
      CUDA_VISIBLE_DEVICES="$(seq -s , 0 $((gpus - 1)))"
    fi
    export CUDA_VISIBLE_DEVICES
  fi
}

# join_variables LOCAL_PROCESS: prints the variables with which maxlm connects the processes; nothing for one process.
join_variables() {
  [ $((nodes * processes)) -gt 1 ] || return 0
  echo "MAXLM_COORDINATOR=${coordinator:-127.0.0.1:8476}"
  echo "MAXLM_NUM_PROCESSES=$((nodes * processes))"
  echo "MAXLM_PROCESS_ID=$((node_rank * processes + $1))"
  # Indices into CUDA_VISIBLE_DEVICES. Virtual CPU devices always belong to their process.
  if $per_gpu && [ "$platform" = gpu ]; then
    echo "MAXLM_LOCAL_DEVICES=$1"
  fi
}

# start LOCAL_PROCESS ARGUMENT…: replaces this shell with the training process.
start() {
  local name number="$1"
  shift
  unset MAXLM_COORDINATOR MAXLM_NUM_PROCESSES MAXLM_PROCESS_ID MAXLM_LOCAL_DEVICES
  for name in $(join_variables "$number"); do
    export "${name?}"
  done
  exec "${PYTHON:-python}" -m maxlm.train "$@"
}

# log_of NAME: prints the path of a log file and creates its directory.
log_of() {
  local folder="$logs"
  if [ -z "$folder" ]; then
    case "$workdir" in
      *://*) folder=logs ;;
      *) folder="$workdir/logs" ;;
    esac
  fi
  mkdir -p "$folder"
  echo "$folder/$1.log"
}

# say MESSAGE: prints a message. The terminal may be closed.
say() {
  echo "gpu_node: $*" >&2 || true
}

# lose_terminal: discards further output, because writes to a closed terminal would end this script.
# shellcheck disable=SC2329 # called by the traps
lose_terminal() {
  exec >/dev/null 2>&1
}

# watch_run: starts this script without --monitor in the background and shows the dashboard of its run.
watch_run() {
  local code=0 log
  log="$(log_of node)"
  # With its own process group, the run does not receive Ctrl-C from the terminal.
  set -m
  bash "$launch/gpu_node.sh" "${given[@]}" </dev/null >>"$log" 2>&1 &
  set +m
  pids=("$!")
  trap 'kill -s TERM "${pids[0]}" 2>/dev/null || true' TERM
  trap 'lose_terminal; kill -s TERM "${pids[0]}" 2>/dev/null || true' HUP
  "${PYTHON:-python}" -m maxlm.monitor "$workdir" || true
  trap 'kill -s TERM "${pids[0]}" 2>/dev/null || true' INT TERM
  say "waiting for the run; Ctrl-C stops it. Its output is in $log"
  while kill -0 "${pids[0]}" 2>/dev/null; do
    wait "${pids[0]}" || code=$?
  done
  wait "${pids[0]}" 2>/dev/null || code=$?
  [ "$code" -eq 0 ] || tail -n 3 "$log" >&2
  exit "$code"
}

if $detach; then
  restart_options+=(--detach)
fi
if [ -n "$min_nodes" ] && ! $once; then
  if [ "$platform" = cpu ]; then
    per_host=$((devices * processes))
  else
    per_host="$(count_gpus)"
  fi
  restart_options+=(--hosts "$nodes" --min-hosts "$min_nodes" --devices-per-host "$per_host")
fi
# Options of this script precede the first --, so --once comes first.
restarts=("${PYTHON:-python}" -m maxlm.supervise ${restart_options[@]+"${restart_options[@]}"} -- bash "$launch/gpu_node.sh"
  --once ${given[@]+"${given[@]}"})

if $dry_run; then
  export_settings
  # Only variables that this script sets, because the environment may contain secrets.
  for name in JAX_PLATFORMS JAX_CPU_COLLECTIVES_IMPLEMENTATION XLA_FLAGS XLA_PYTHON_CLIENT_MEM_FRACTION \
    CUDA_DEVICE_MAX_CONNECTIONS CUDA_VISIBLE_DEVICES NCCL_DEBUG NCCL_IB_TIMEOUT; do
    [ -z "${!name:-}" ] || echo "would set: $name=${!name}"
  done
  if [ -n "$min_nodes" ]; then
    run "${restarts[@]}"
    exit 0
  fi
  for ((number = 0; number < processes; number++)); do
    # shellcheck disable=SC2046 # each variable must become one word
    run env $(join_variables "$number") "${PYTHON:-python}" -m maxlm.train "$@"
  done
  exit 0
fi

if $monitor; then
  [ -t 1 ] || refuse '--monitor needs a terminal; run maxlm monitor WORKDIR in another one'
  watch_run
fi
if ! $once; then
  exec "${restarts[@]}"
fi
export_settings
[ "$processes" -gt 1 ] || start 0 "$@"

pids=()
signal=
# receive SIGNAL: forwards the first signal to all processes.
# shellcheck disable=SC2329 # called by the traps
receive() {
  local pid
  [ -z "$signal" ] || return 0
  signal="$1"
  # SIGINT and SIGHUP are forwarded as SIGTERM too; see maxlm/supervise.py.
  for pid in ${pids[@]+"${pids[@]}"}; do
    kill -s TERM "$pid" 2>/dev/null || true
  done
}
trap 'receive TERM' TERM
trap 'receive INT' INT
trap 'lose_terminal; receive HUP' HUP
for ((number = 0; number < processes; number++)); do
  if [ "$number" -eq 0 ]; then
    (start 0 "$@") &
  else
    (start "$number" "$@") >>"$(log_of "process-$((node_rank * processes + number))")" 2>&1 &
  fi
  pids+=("$!")
done
if [ -n "$signal" ]; then
  # The signal arrived while processes were starting.
  for pid in "${pids[@]}"; do
    kill -s TERM "$pid" 2>/dev/null || true
  done
fi

codes=()
running=$processes
first=0
ending=
killed=false
# collect: records the exit codes of finished processes; $first keeps the first nonzero code.
collect() {
  local number code
  for ((number = 0; number < processes; number++)); do
    if [ -z "${codes[$number]:-}" ] && ! kill -0 "${pids[$number]}" 2>/dev/null; then
      code=0
      wait "${pids[$number]}" 2>/dev/null || code=$?
      codes[number]=$code
      running=$((running - 1))
      if [ "$code" -ne 0 ]; then
        say "process $((node_rank * processes + number)) ended with exit code $code"
        [ "$first" -ne 0 ] || first=$code
      fi
    fi
  done
}
end_others() {
  local number
  for ((number = 0; number < processes; number++)); do
    [ -n "${codes[$number]:-}" ] || kill -s "$1" "${pids[$number]}" 2>/dev/null || true
  done
}
while :; do
  collect
  [ "$running" -gt 0 ] || break
  # After a forwarded signal all processes are saving; the sender of the signal limits the time for that.
  if [ "$first" -ne 0 ] && [ -z "$signal" ]; then
    if [ -z "$ending" ]; then
      ending=$((SECONDS + grace))
      end_others TERM
    elif [ "$SECONDS" -ge "$ending" ] && ! $killed; then
      killed=true
      say "still running $grace s after SIGTERM: killed"
      end_others KILL
    fi
  fi
  # bash 3.2 has no `wait -n`.
  sleep 0.2 || true
done

# Bad input (2) has priority, because a restart would not help, and then a device that computes wrong results (74),
# because the node has to be replaced. If a signal killed one process and the others exited with 75, the node can
# restart.
if [ "$first" -ge 128 ] && [[ " ${codes[*]} " == *' 75 '* ]]; then
  first=75
fi
for code in 74 2; do
  if [[ " ${codes[*]} " == *" $code "* ]]; then
    first=$code
  fi
done
exit "$first"
