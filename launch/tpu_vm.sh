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
. "$launch/tpu_training.sh"

begin "$@"
version=
queued=false
node_count=1
set -- ${words[@]+"${words[@]}"}
while [ $# -gt 0 ]; do
  taken=2
  case "${1//_/-}" in
    --version) need_value "$1" "$@" && version="$2" ;;
    --reserved) choose_capacity "$1" ;;
    --queued) queued=true && taken=1 ;;
    --node-count) need_value "$1" "$@" && node_count="$2" ;;
    --service-account | --network | --subnetwork) need_value "$1" "$@" && request+=("${1//_/-}=$2") ;;
    *) read_option "$@" ;;
  esac
  shift "$taken"
done
check_options
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
    case "$type" in
      '') refuse '--type is missing: v4-32, v5e-16, v5p-8, v6e-64 …' ;;
      v2-* | v3-* | v4-*) : "${version:=tpu-ubuntu2204-base}" ;;
      v5e-* | v5litepod-*)
        type="v5litepod-${type#*-}"
        : "${version:=v2-alpha-tpuv5-lite}"
        ;;
      v5p-*) : "${version:=v2-alpha-tpuv5}" ;;
      v6e-*) : "${version:=v2-alpha-tpuv6e}" ;;
      v7x-* | tpu7x-*) refuse "--type=$type: the Cloud TPU API has no TPU7x; use launch/tpu_compute.sh or launch/k8s/apply.sh tpu" ;;
      *) [ -n "$version" ] || refuse "--type=$type: not a type that has a default --version; give one" ;;
    esac
    case "$node_count:$type" in
      1:*) ;;
      *:v2-* | *:v3-*) refuse "--type=$type --node-count=$node_count: several slices need v4 or later" ;;
    esac
    ;;
esac

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

dispatch
