#!/usr/bin/env bash
# Trains on Cloud TPU VMs: a single machine or all workers of a slice.
#
#   launch/tpu_vm.sh create | install | run | logs | stop | delete | up [OPTION…]
#
#   create    create the machines, if they do not exist
#   install   copy this repository and install its packages, if they have changed
#   run       start training on all workers, if it is not running
#   logs      follow the log of worker 0 until training ends
#   stop      send SIGTERM to training, which saves and exits
#   delete    delete the machines; files that exist only on them are lost
#   up        check the config and the data, then create, install, run and logs. If the machines are preempted, delete
#             them and repeat, until training finishes (exit code 0), rejects its input (2), fails permanently (its
#             code) or is stopped (75)
#
#   --name N --zone Z [--project P]   name and location of the machines
#   --type T                          v4-32, v5e-16, v5p-8, v6e-64 …: for create and up
#   --version V                       image of the machines (default: the JAX image for the type)
#   --spot                            cheaper machines that may be preempted at any time
#   --reserved                        machines of a reservation of the project
#   --queued                          use Cloud TPU's queued resources instead of repeating the request
#   --flex-start --max-run-duration D   queued machines that Cloud TPU deletes after D, such as 12h; at most 7d
#   --node-count N                    N queued slices of the type, which train together (multislice)
#   --service-account A               service account of the machines
#   --internal-ips                    no public addresses; connects through Identity-Aware Proxy
#   --network N --subnetwork S        VPC network and subnetwork of the machines
#   --config C --workdir W            for run and up; W is a persistent directory that all workers can reach
#   --config.KEY=VALUE                passed to maxlm train; can be repeated
#   --extra tpu,gcs                   extras of maxlm to install
#   --poll SECONDS --backoff SECONDS  time between queries (30), and between attempts (60, doubled up to 900)
#   --dry-run                         print the commands without running them
#
# Pass --queued, --flex-start, --node-count and --internal-ips to all commands, because they determine the requests.
# --flex-start and --node-count imply --queued.
#
# Exit codes of gcloud failures: 2 no quota, 75 no machine available (create; up waits), 1 other failures.
set -euo pipefail
launch="$(cd "$(dirname "$0")" && pwd)"
root="$(dirname "$launch")"
. "$launch/commands.sh"

command="${1:-}"
case "$command" in
  create | install | run | logs | stop | delete | up) shift ;;
  *) refuse "unknown command ${command:-(none)}; one of create, install, run, logs, stop, delete, up" ;;
esac
name=
zone=
project=
type=
version=
queued=false
run_duration=
node_count=1
internal_ips=false
capacity=
request=()
config=
workdir=
overrides=()
extra=tpu,gcs
poll=30
pause=60
dry_run=false
split_equals "$@"
set -- ${words[@]+"${words[@]}"}
while [ $# -gt 0 ]; do
  case "${1//_/-}" in
    --config.*=*) overrides+=("$1") ;;
    --name) need_value "$1" "$@" && name="$2" && shift ;;
    --zone) need_value "$1" "$@" && zone="$2" && shift ;;
    --project) need_value "$1" "$@" && project="$2" && shift ;;
    --type) need_value "$1" "$@" && type="$2" && shift ;;
    --version) need_value "$1" "$@" && version="$2" && shift ;;
    --config) need_value "$1" "$@" && config="$2" && shift ;;
    --workdir) need_value "$1" "$@" && workdir="$2" && shift ;;
    --extra) need_value "$1" "$@" && extra="$2" && shift ;;
    --poll) need_value "$1" "$@" && poll="$2" && shift ;;
    --backoff) need_value "$1" "$@" && pause="$2" && shift ;;
    --spot | --reserved | --flex-start)
      [ -z "$capacity" ] || refuse "$capacity $1: choose one of --spot, --reserved and --flex-start"
      capacity="${1//_/-}"
      ;;
    --queued) queued=true ;;
    --max-run-duration) need_value "$1" "$@" && run_duration="$2" && shift ;;
    --node-count) need_value "$1" "$@" && node_count="$2" && shift ;;
    --service-account | --network | --subnetwork)
      need_value "$1" "$@" && request+=("${1//_/-}=$2") && shift
      ;;
    --internal-ips) internal_ips=true ;;
    --dry-run) dry_run=true ;;
    *) refuse "unknown option $1; see the head of launch/tpu_vm.sh" ;;
  esac
  shift
done
[ -n "$name" ] || refuse '--name is missing: a name for the machines'
[ -n "$zone" ] || refuse '--zone is missing: where there are TPUs of the type, such as us-central2-b'
need_number --poll "$poll"
need_number --backoff "$pause"
need_number --node-count "$node_count"
[ "$node_count" -ge 1 ] || refuse "--node-count=$node_count: give 1 or more"
[ -z "$capacity" ] || [ "$capacity" = --flex-start ] || request+=("$capacity")
if [ "$capacity" = --flex-start ]; then
  queued=true
  request+=(--provisioning-model=flex-start "--max-run-duration=$run_duration")
fi
if $internal_ips; then
  request+=(--internal-ips)
fi
[ "$node_count" -eq 1 ] || queued=true
case "$command" in
  create | up)
    if [ "$capacity" = --flex-start ]; then
      [ -n "$run_duration" ] || refuse '--max-run-duration is missing: how long --flex-start machines exist, such as 12h'
    elif [ -n "$run_duration" ]; then
      refuse "--max-run-duration=$run_duration: only for --flex-start"
    fi
    case "$type" in
      '') refuse '--type is missing: v4-32, v5e-16, v5p-8, v6e-64 …' ;;
      v2-* | v3-* | v4-*) : "${version:=tpu-ubuntu2204-base}" ;;
      v5e-* | v5litepod-*)
        type="v5litepod-${type#*-}"
        : "${version:=v2-alpha-tpuv5-lite}"
        ;;
      v5p-*) : "${version:=v2-alpha-tpuv5}" ;;
      v6e-*) : "${version:=v2-alpha-tpuv6e}" ;;
      v7x-* | tpu7x-*) refuse "--type=$type: only GKE has TPU7x; use launch/k8s/apply.sh tpu --accelerator tpu7x" ;;
      *) [ -n "$version" ] || refuse "--type=$type: not a type that has a default --version; give one" ;;
    esac
    case "$node_count:$type" in
      1:*) ;;
      *:v2-* | *:v3-*) refuse "--type=$type --node-count=$node_count: several slices need v4 or later" ;;
    esac
    ;;
esac
case "$command" in
  run | up)
    [ -n "$config" ] || refuse '--config is missing: a config of maxlm train'
    [ -n "$workdir" ] || refuse '--workdir is missing: where the run is kept, such as gs://BUCKET/RUN, or /mnt/runs/RUN on a shared disk'
    case "$workdir" in
      gs://* | /*) ;;
      *) echo "warning: --workdir=$workdir is a directory of each worker's own, and goes when the machines go" >&2 ;;
    esac
    ;;
esac

place=("--zone=$zone")
[ -z "$project" ] || place+=("--project=$project")
place+=(--quiet)
scratch="$(mktemp -d)"
trap 'rm -rf "$scratch"' EXIT

log() { echo "tpu_vm: $*"; }
. "$launch/tpu_machines.sh"

# The arguments of `gcloud … ssh` and `scp` that depend on the machines.
kind=tpu-vm
[ "$node_count" -eq 1 ] || kind='queued-resources'
tpus=(gcloud compute tpus)
tunnel=()
if $internal_ips; then
  # In the released version of gcloud, only queued-resources has this flag.
  tpus=(gcloud alpha compute tpus)
  tunnel=(--tunnel-through-iap)
fi

# connect SSH-OR-SCP WORKER ARGUMENT…: connects to worker 0 of slice 0, or to `all` workers.
connect() {
  local verb="$1" workers=("--worker=$2")
  [ "$node_count" -eq 1 ] || workers+=("--node=$2")
  shift 2
  run "${tpus[@]}" "$kind" "$verb" "$@" "${place[@]}" "${workers[@]}" ${tunnel[@]+"${tunnel[@]}"}
}

# remote WORKER COMMAND: runs a command on worker 0, or on `all`.
remote() {
  connect ssh "$1" "$name" "--command=$2"
}

# list_files: prints the files of the repository, except .env and files that git ignores: data, runs, environments.
list_files() {
  (
    cd "$root"
    if git rev-parse --is-inside-work-tree >/dev/null 2>&1; then
      git ls-files --cached --others --exclude-standard
    else
      find . \( -name .git -o -name .venv -o -path ./runs -o -path ./data -o -name __pycache__ -o -name '.*_cache' \
        -o -name '*.egg-info' \) -prune -o -type f -print
    fi | while IFS= read -r file; do
      [ ! -f "$file" ] || echo "$file"
    done | grep -vE '(^|/)\.env$' | LC_ALL=C sort -u
  )
}

install() {
  local checksum package="$scratch/maxlm.tar.gz" installed
  list_files >"$scratch/files"
  checksum="$(cd "$root" && tr '\n' '\0' <"$scratch/files" | xargs -0 cksum | cksum | cut -d ' ' -f 1)"
  installed="cd maxlm 2>/dev/null && bash launch/worker.sh installed $(quoted "$extra") $checksum"
  if $dry_run; then
    remote all "$installed"
  elif remote all "$installed" >/dev/null 2>&1; then
    log 'already installed'
    return
  fi
  run env COPYFILE_DISABLE=1 tar -czf "$package" -C "$root" -T "$scratch/files"
  connect scp all "$package" "$name:maxlm.tar.gz"
  # Files that were deleted from the repository must not remain on the workers.
  remote all "set -e; mkdir -p maxlm; cd maxlm; find . -mindepth 1 -maxdepth 1 ! -name .venv ! -name logs ! -name runs \
! -name data -exec rm -rf {} +; tar -xzf ../maxlm.tar.gz; bash launch/worker.sh install $(quoted "$extra") $checksum"
}

start() {
  remote all "cd maxlm && bash launch/worker.sh start -- $(quoted .venv/bin/python -m maxlm.train \
    "--config=$config" "--workdir=$workdir" ${overrides[@]+"${overrides[@]}"})"
}

follow() {
  remote 0 'cd maxlm && bash launch/worker.sh follow'
}

# outcome: prints the combined status of training on all workers: running, died, unknown, or an exit code.
outcome() {
  local lines
  lines="$(remote all 'cd maxlm && bash launch/worker.sh status' 2>/dev/null |
    grep -xE 'none|running|stopped|died|exit [0-9]+')" || lines=unknown
  said() { printf '%s\n' "$lines" | grep -qxE "$1"; }
  if said unknown || said running; then
    printf '%s\n' "$lines" | grep -xE 'unknown|running' | head -n 1
  elif said 'exit 2'; then
    # A single worker may report bad input; the other workers then lose a peer.
    echo 2
  elif said 'exit 74'; then
    # A device of one worker computes wrong results. The other workers exit with other codes.
    echo 74
  elif said stopped; then
    echo 75
  elif said 'died|none'; then
    echo died
  else
    # A failure has priority over 0.
    printf '%s\n' "$lines" | sed 's/^exit //' | sort -n | tail -n 1
  fi
}

# back_off: waits; the delay doubles until training has started.
back_off() {
  log "retrying in $wait_for s"
  sleep "$wait_for"
  wait_for=$((wait_for * 2 > 900 ? 900 : wait_for * 2))
}

# failed_again MESSAGE: exits after five consecutive failures of existing machines, or of queries about machines.
failed_again() {
  failed=$((failed + 1))
  if [ "$failed" -ge 5 ]; then
    echo "error: $1, $failed times in a row" >&2
    exit 1
  fi
  back_off
}

up() {
  local code result began failed=0
  wait_for="$pause"
  while :; do
    case "$(state)" in
      GONE)
        log "$name was preempted or has expired: deleting its remains, then creating it again"
        delete || back_off
        continue
        ;;
      REFUSED)
        # If there is no quota, classify_fault exits, because another request would fail too.
        classify_fault || true
        delete || true
        back_off
        continue
        ;;
      UNKNOWN)
        failed_again "$(fault)"
        continue
        ;;
    esac
    code=0
    create || code=$?
    case "$code" in
      0) ;;
      75)
        back_off
        continue
        ;;
      *) exit "$code" ;;
    esac

    if install && start; then
      wait_for="$pause"
      while :; do
        began=$SECONDS
        follow || true
        [ $((SECONDS - began)) -lt 600 ] || failed=0
        result="$(outcome)"
        case "$result" in
          running) sleep "$poll" ;;
          unknown | died) break ;;
          *)
            log "training has ended with exit code $result"
            log "$name still exists and costs money; delete it with launch/tpu_vm.sh delete"
            exit "$result"
            ;;
        esac
      done
    fi
    if [ "$(state)" = READY ]; then
      failed_again "$name is there, but installing, starting or following training failed"
    fi
  done
}

case "$command" in
  create | install | delete) "$command" ;;
  run) start ;;
  logs) follow ;;
  stop) remote all 'cd maxlm && bash launch/worker.sh stop' ;;
  up)
    check_inputs "$root" "--config=$config" "--workdir=$workdir" ${overrides[@]+"${overrides[@]}"}
    if $dry_run; then
      create
      install
      start
      follow
      remote all 'cd maxlm && bash launch/worker.sh status'
      echo 'if the machines were preempted, before the steps above are repeated:'
      delete
    else
      up
    fi
    ;;
esac
