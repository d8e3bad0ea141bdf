#!/usr/bin/env bash
# Trains on a TPU machine of Compute Engine: one machine with all chips of its slice. Has the commands of
# launch/tpu_vm.sh, which uses the Cloud TPU API and also creates slices of several machines.
#
#   launch/tpu_compute.sh create | install | run | logs | stop | delete | up [OPTION…]
#
#   --name N --zone Z [--project P]   name and location of the machine
#   --type T                          v6e-1, v6e-4, v6e-8, v5p-8 or a machine type, such as tpu7x-standard-4t
#   --spot                            cheaper machine that may be preempted at any time
#   --reserved R                      machine of the reservation R
#   --flex-start --max-run-duration D   machine that is requested for 2 hours and deleted after D, such as 12h
#   --image-family F                  image of the machine (default: Ubuntu with the TPU driver for the type)
#   --disk-gb N                       size of the boot disk (default: 200; that of Compute Engine is too small)
#   --service-account A --internal-ips --network N --subnetwork S
#   --config C --workdir W --config.KEY=VALUE --extra tpu,gcs --poll SECONDS --backoff SECONDS --dry-run
#                                     as for launch/tpu_vm.sh
#
# Exit codes of gcloud failures: 2 no quota, 75 no machine available (create; up waits), 1 other failures.
#
# As of November 2026. Commands: https://docs.cloud.google.com/compute/docs/tpus/create-tpu-vm-instance and
# https://docs.cloud.google.com/tpu/docs/spot-compute; machine types: https://docs.cloud.google.com/compute/docs/tpus/tpu-machines
# (TPU7x, v6e and v5p); why: https://docs.cloud.google.com/compute/docs/tpus/tpu-resources-in-compute-engine.
set -euo pipefail
launch="$(cd "$(dirname "$0")" && pwd)"
root="$(dirname "$launch")"
. "$launch/commands.sh"
. "$launch/tpu_training.sh"

begin "$@"
image=
disk_gb=200
set -- ${words[@]+"${words[@]}"}
while [ $# -gt 0 ]; do
  taken=2
  case "${1//_/-}" in
    --reserved)
      need_value "$1" "$@" && choose_capacity "$1"
      request+=(--provisioning-model=RESERVATION_BOUND --reservation-affinity=specific "--reservation=$2")
      taken=2
      ;;
    --image-family) need_value "$1" "$@" && image="$2" ;;
    --disk-gb) need_value "$1" "$@" && disk_gb="$2" ;;
    --service-account | --network) need_value "$1" "$@" && request+=("${1//_/-}=$2") ;;
    --subnetwork) need_value "$1" "$@" && request+=("--subnet=$2") ;;
    *) read_option "$@" ;;
  esac
  shift "$taken"
done
check_options
need_number --disk-gb "$disk_gb"
case "$capacity" in
  # A preempted machine can only be deleted.
  --spot) request+=(--provisioning-model=SPOT --instance-termination-action=DELETE) ;;
  --flex-start)
    request+=(--provisioning-model=FLEX_START --request-valid-for-duration=2h "--max-run-duration=$run_duration"
      --instance-termination-action=DELETE)
    ;;
esac
tunnel=()
if $internal_ips; then
  request+=(--no-address)
  tunnel=(--tunnel-through-iap)
fi
case "$command" in
  create | up)
    case "$type" in
      '') refuse '--type is missing: v6e-1, v6e-4, v6e-8, v5p-8 or a machine type' ;;
      v6e-1 | v6e-4 | v6e-8) machine="ct6e-standard-${type#v6e-}t" ;;
      v5p-8) machine=ct5p-hightpu-4t ;;
      v6e-* | v5p-*) refuse "--type=$type: has several machines; use launch/tpu_vm.sh, or launch/k8s/apply.sh tpu" ;;
      v[2-5]* | ct5lp-*) refuse "--type=$type: not on Compute Engine; use launch/tpu_vm.sh, or launch/k8s/apply.sh tpu" ;;
      *) machine="$type" ;;
    esac
    case "$machine" in
      ct6e-* | ct5p-*) : "${image:=ubuntu-accel-2204-amd64-tpu-v5e-v5p-v6e}" ;;
      tpu7x-*) : "${image:=ubuntu-accel-2404-amd64-tpu-tpu7x}" ;;
      *) [ -n "$image" ] || refuse "--type=$type: not a type that has a default --image-family; give one" ;;
    esac
    ;;
esac

# state: prints the state of the machine; see launch/tpu_training.sh. Preempted machines are deleted, so they are MISSING.
state() {
  local answer
  if answer="$(gcloud compute instances describe "$name" "${place[@]}" '--format=value(status)' 2>"$scratch/fault")"; then
    case "$answer" in
      RUNNING) echo READY ;;
      TERMINATED) if [ -n "$capacity" ]; then echo GONE; else echo STOPPED; fi ;;
      STOPPING | SUSPENDING | SUSPENDED) echo GONE ;;
      *) echo PENDING ;;
    esac
  elif grep -qiE 'not found' "$scratch/fault"; then
    echo MISSING
  else
    echo UNKNOWN
  fi
}

show_state() {
  run gcloud compute instances describe "$name" "${place[@]}" '--format=value(status)'
}

start_again() {
  run gcloud compute instances start "$name" "${place[@]}" || true
}

# create_once: exit code 0 if the machine was created or exists, 75 if none is available, 1 for other failures.
create_once() {
  local create=(gcloud compute instances create "$name" "${place[@]}" "--machine-type=$machine"
    "--image-family=$image" --image-project=ubuntu-os-accelerator-images --maintenance-policy=TERMINATE
    "--boot-disk-size=${disk_gb}GB" --scopes=cloud-platform ${request[@]+"${request[@]}"})
  if $dry_run; then
    run "${create[@]}"
    return
  fi
  log "creating $name: $machine in $zone"
  ! "${create[@]}" >"$scratch/fault" 2>&1 || return 0
  classify_fault
}

delete() {
  if ! $dry_run && [ "$(state)" = MISSING ]; then
    log "$name does not exist"
    return
  fi
  run gcloud compute instances delete "$name" "${place[@]}"
}

# connect SSH-OR-SCP WORKER ARGUMENT…: connects to the only machine.
connect() {
  local verb="$1"
  shift 2
  run gcloud compute "$verb" "$@" "${place[@]}" ${tunnel[@]+"${tunnel[@]}"}
}

dispatch
