# What launch/tpu_vm.sh knows of the machines, and how it makes and deletes them; sourced by it, after commands.sh.
# shellcheck disable=SC2154 # the options are read there

# The line of gcloud's answer that says what is wrong.
fault() {
  grep -iE 'error|quota|capacity|exhausted' "$scratch/fault" | tail -n 1 | sed 's/^ERROR: *//' ||
    tail -n 1 "$scratch/fault"
}

# describe KIND FORMAT: a state, MISSING, or UNKNOWN with gcloud's answer kept for `fault`.
describe() {
  local answer
  if answer="$(gcloud compute tpus "$1" describe "$name" "${place[@]}" --format="value($2)" 2>"$scratch/fault")"; then
    echo "$answer"
  elif grep -qiE 'NOT_FOUND|not found' "$scratch/fault"; then
    echo MISSING
  else
    echo UNKNOWN
  fi
}

# What there is: READY, MISSING, GONE (taken away: only deleting is left), PENDING, STOPPED, UNKNOWN, REFUSED (its
# fault is kept).
state() {
  local answer
  if $queued; then
    answer="$(describe queued-resources state.state)"
    case "$answer" in
      ACTIVE) ;;
      FAILED)
        # Why, which decides whether another request would do better.
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
  answer="$(describe tpu-vm state)"
  case "$answer" in
    READY | MISSING | UNKNOWN) echo "$answer" ;;
    PREEMPTED | TERMINATED | SUSPENDED | SUSPENDING) echo GONE ;;
    STOPPED | STOPPING) echo STOPPED ;;
    *) echo PENDING ;;
  esac
}

# Exit code 0 made or there already, 75 no free machine, 1 another fault. Without quota the script ends.
create_once() {
  local code=0
  if $queued; then
    set -- queued-resources create "$name" "${place[@]}" "--node-id=$name" "--accelerator-type=$type" \
      "--runtime-version=$version"
  else
    set -- tpu-vm create "$name" "${place[@]}" "--accelerator-type=$type" "--version=$version"
  fi
  if $spot; then
    set -- "$@" --spot
  fi
  if $dry_run; then
    run gcloud compute tpus "$@"
    return
  fi
  say "creating $name: $type in $zone"
  gcloud compute tpus "$@" >"$scratch/fault" 2>&1 || code=$?
  [ "$code" -ne 0 ] || return 0
  judge_fault
}

# The exit code that a kept fault of creating stands for.
judge_fault() {
  local other
  # Quota first: its message has RESOURCE_EXHAUSTED in it too.
  if grep -qi 'quota' "$scratch/fault"; then
    other=--spot
    if $spot; then other='no --spot'; fi
    refuse "no quota for $type in $zone: $(fault); ask for more, or choose another --type, --zone or $other"
  elif grep -qiE 'no more capacity|(not|not have) enough|insufficient|stock|exhausted' "$scratch/fault"; then
    say "no free $type in $zone just now: $(fault)"
    return 75
  elif grep -qiE 'ALREADY_EXISTS|already exists' "$scratch/fault"; then
    return 0
  fi
  echo "error: $(fault)" >&2
  return 1
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
      say "$name is not there"
      return
      ;;
    UNKNOWN)
      echo "error: $(fault)" >&2
      return 1
      ;;
  esac
  if $queued; then
    # --force: its machines too.
    run gcloud compute tpus queued-resources delete "$name" "${place[@]}" --force
  else
    run gcloud compute tpus tpu-vm delete "$name" "${place[@]}"
  fi
}

# wait_ready: until the machines are READY; otherwise 75 they are gone, 1 cannot be told.
wait_ready() {
  local unknown=0
  while :; do
    case "$(state)" in
      READY) return 0 ;;
      MISSING | GONE) return 75 ;;
      REFUSED) judge_fault && return 75 || return $? ;;
      STOPPED) run gcloud compute tpus tpu-vm start "$name" "${place[@]}" ;;
      UNKNOWN)
        unknown=$((unknown + 1))
        if [ "$unknown" -ge 20 ]; then
          echo "error: $(fault)" >&2
          return 1
        fi
        ;;
    esac
    sleep "$poll"
  done
}

create() {
  local code=0
  if $dry_run; then
    if $queued; then
      run gcloud compute tpus queued-resources describe "$name" "${place[@]}" '--format=value(state.state)'
    else
      run gcloud compute tpus tpu-vm describe "$name" "${place[@]}" '--format=value(state)'
    fi
    create_once
    return
  fi
  case "$(state)" in
    MISSING) create_once || return $? ;;
    GONE | REFUSED)
      [ "$command" = up ] || refuse "$name was taken away or refused; launch/tpu_vm.sh delete it first, or use up"
      return 75
      ;;
    UNKNOWN)
      echo "error: $(fault)" >&2
      [ "$command" = up ] || return 1
      return 75
      ;;
    *) say "$name is there already" ;;
  esac
  wait_ready || code=$?
  [ "$code" -ne 0 ] || say "$name is ready"
  return "$code"
}
