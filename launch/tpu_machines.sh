# Creates, queries and deletes the machines of launch/tpu_vm.sh, which sources this file after commands.sh.
# shellcheck disable=SC2154 # the options are read there

# slices: prints the names that Cloud TPU gives to the slices.
slices() {
  if [ "$node_count" -eq 1 ]; then
    echo "$name"
  else
    seq -f "$name-%.0f" 0 $((node_count - 1))
  fi
}

# describe KIND NAME FORMAT: prints a state, MISSING, or UNKNOWN. For UNKNOWN, gcloud's output is kept for `fault`.
describe() {
  local answer
  if answer="$(gcloud compute tpus "$1" describe "$2" "${place[@]}" --format="value($3)" 2>"$scratch/fault")"; then
    echo "$answer"
  elif grep -qiE 'NOT_FOUND|not found' "$scratch/fault"; then
    echo MISSING
  else
    echo UNKNOWN
  fi
}

# state: prints the state of the machines: READY, MISSING, GONE (preempted or expired; they can only be deleted), PENDING,
# STOPPED, UNKNOWN, or REFUSED (the output is kept for `fault`). With several slices it is the state of the first slice
# that is not READY.
state() {
  local answer slice
  if $queued; then
    answer="$(describe queued-resources "$name" state.state)"
    case "$answer" in
      ACTIVE) ;;
      FAILED)
        # The cause determines whether another request can succeed.
        gcloud compute tpus queued-resources describe "$name" "${place[@]}" --format='value(state)' \
          >"$scratch/fault" 2>&1 || true
        echo REFUSED
        return
        ;;
      SUSPENDING | SUSPENDED) echo GONE && return ;;
      MISSING | UNKNOWN) echo "$answer" && return ;;
      *) echo PENDING && return ;;
    esac
  fi
  for slice in $(slices); do
    answer="$(describe tpu-vm "$slice" state)"
    case "$answer" in
      READY) ;;
      # An active request does not create lost machines again.
      MISSING) if $queued; then echo GONE; else echo MISSING; fi && return ;;
      UNKNOWN) echo UNKNOWN && return ;;
      PREEMPTED | TERMINATED | SUSPENDED | SUSPENDING) echo GONE && return ;;
      STOPPED | STOPPING) echo STOPPED && return ;;
      *) echo PENDING && return ;;
    esac
  done
  echo READY
}

# create_once: exit code 0 if the machines were created or exist, 75 if none is available, 1 for other failures. The
# script exits if there is no quota.
create_once() {
  local code=0 create=(gcloud compute tpus) nodes=("--node-id=$name")
  # Only the alpha version of gcloud has --provisioning-model and --max-run-duration.
  [ "$capacity" != --flex-start ] || create=(gcloud alpha compute tpus)
  [ "$node_count" -eq 1 ] || nodes=("--node-count=$node_count" "--node-prefix=$name")
  if $queued; then
    create+=(queued-resources create "$name" "${place[@]}" "${nodes[@]}" "--accelerator-type=$type" \
      "--runtime-version=$version")
  else
    create+=(tpu-vm create "$name" "${place[@]}" "--accelerator-type=$type" "--version=$version")
  fi
  create+=(${request[@]+"${request[@]}"})
  if $dry_run; then
    run "${create[@]}"
    return
  fi
  log "creating $name: $type in $zone"
  "${create[@]}" >"$scratch/fault" 2>&1 || code=$?
  [ "$code" -ne 0 ] || return 0
  classify_fault
}

delete() {
  local found
  if $dry_run; then
    found=READY
  else
    found="$(state)"
  fi
  case "$found" in
    MISSING)
      log "$name does not exist"
      return
      ;;
    UNKNOWN)
      echo "error: $(fault)" >&2
      return 1
      ;;
  esac
  if $queued; then
    # --force also deletes its machines.
    run gcloud compute tpus queued-resources delete "$name" "${place[@]}" --force
  else
    run gcloud compute tpus tpu-vm delete "$name" "${place[@]}"
  fi
}

show_state() {
  if $queued; then
    run gcloud compute tpus queued-resources describe "$name" "${place[@]}" '--format=value(state.state)'
  else
    run gcloud compute tpus tpu-vm describe "$name" "${place[@]}" '--format=value(state)'
  fi
}

start_again() {
  local slice
  for slice in $(slices); do
    run gcloud compute tpus tpu-vm start "$slice" "${place[@]}" || true
  done
}
