# Creates machines, installs maxlm on them and trains: the commands of launch/tpu_vm.sh and launch/tpu_compute.sh, which
# source this file after commands.sh. Each of them defines these functions for its API:
#
#   state         prints READY, MISSING, GONE, PENDING, STOPPED, UNKNOWN or REFUSED
#   show_state    runs the command of `state` that comes first, for --dry-run
#   create_once   requests the machines once; exit code 75 if none is available
#   start_again   starts machines that are STOPPED
#   delete        deletes the machines
#   connect SSH-OR-SCP WORKER ARGUMENT…   connects to worker 0, or to `all`
# shellcheck disable=SC2034,SC2154 # the scripts use these variables, and read further options

script="$(basename "$0" .sh)"
log() { echo "$script: $*"; }

# begin COMMAND "$@": checks the command, sets the options to their defaults and copies the others into $words.
begin() {
  command="${1:-}"
  case "$command" in
    create | install | run | logs | stop | delete | up) shift ;;
    *) refuse "unknown command ${command:-(none)}; one of create, install, run, logs, stop, delete, up" ;;
  esac
  name=
  zone=
  project=
  type=
  run_duration=
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
}

# choose_capacity OPTION: sets $capacity, once.
choose_capacity() {
  [ -z "$capacity" ] || refuse "$capacity $1: choose one of --spot, --reserved and --flex-start"
  capacity="${1//_/-}"
  taken=1
}

# read_option OPTION [VALUE]…: reads an option that both scripts have. Sets $taken to the number of its words.
read_option() {
  taken=2
  case "${1//_/-}" in
    --config.*=*) overrides+=("$1") && taken=1 ;;
    --name) need_value "$1" "$@" && name="$2" ;;
    --zone) need_value "$1" "$@" && zone="$2" ;;
    --project) need_value "$1" "$@" && project="$2" ;;
    --type) need_value "$1" "$@" && type="$2" ;;
    --config) need_value "$1" "$@" && config="$2" ;;
    --workdir) need_value "$1" "$@" && workdir="$2" ;;
    --extra) need_value "$1" "$@" && extra="$2" ;;
    --poll) need_value "$1" "$@" && poll="$2" ;;
    --backoff) need_value "$1" "$@" && pause="$2" ;;
    --spot | --flex-start) choose_capacity "$1" ;;
    --max-run-duration) need_value "$1" "$@" && run_duration="$2" ;;
    --internal-ips) internal_ips=true && taken=1 ;;
    --dry-run) dry_run=true && taken=1 ;;
    *) refuse "unknown option $1; see the head of launch/$script.sh" ;;
  esac
}

# check_options: checks the options that both scripts have, and sets the arguments of gcloud for the location.
check_options() {
  [ -n "$name" ] || refuse '--name is missing: a name for the machines'
  [ -n "$zone" ] || refuse '--zone is missing: where there are TPUs of the type, such as us-central2-b'
  need_number --poll "$poll"
  need_number --backoff "$pause"
  case "$command" in
    create | up)
      if [ "$capacity" = --flex-start ]; then
        [ -n "$run_duration" ] || refuse '--max-run-duration is missing: how long --flex-start machines exist, such as 12h'
      elif [ -n "$run_duration" ]; then
        refuse "--max-run-duration=$run_duration: only for --flex-start"
      fi
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
}

# fault: prints the line of gcloud's output that names the cause of the failure.
fault() {
  grep -iE 'error|quota|capacity|exhausted' "$scratch/fault" | tail -n 1 | sed 's/^ERROR: *//' ||
    tail -n 1 "$scratch/fault"
}

# classify_fault: returns the exit code for a failed creation whose output was kept for `fault`.
classify_fault() {
  local other
  # Quota is tested first, because its message also contains RESOURCE_EXHAUSTED.
  if grep -qi 'quota' "$scratch/fault"; then
    other=--spot
    [ "$capacity" != --spot ] || other='no --spot'
    refuse "no quota for $type in $zone: $(fault); request more, or choose another --type, --zone or $other"
  elif grep -qiE 'no more capacity|(not|not have) enough|insufficient|stock|exhausted' "$scratch/fault"; then
    log "no free $type in $zone: $(fault)"
    return 75
  elif grep -qiE 'ALREADY_EXISTS|already exists' "$scratch/fault"; then
    return 0
  fi
  echo "error: $(fault)" >&2
  return 1
}

# wait_ready: waits until the machines are READY. Exit code 75 if they were deleted or preempted, 1 if the state stays
# unknown.
wait_ready() {
  local unknown=0
  while :; do
    case "$(state)" in
      READY) return 0 ;;
      MISSING | GONE) return 75 ;;
      REFUSED) classify_fault && return 75 || return $? ;;
      STOPPED)
        start_again
        ;;
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
    show_state
    create_once
    return
  fi
  case "$(state)" in
    MISSING) create_once || return $? ;;
    GONE | REFUSED)
      [ "$command" = up ] || refuse "$name was preempted or refused; delete it with launch/$script.sh delete, or use up"
      return 75
      ;;
    UNKNOWN)
      echo "error: $(fault)" >&2
      [ "$command" = up ] || return 1
      return 75
      ;;
    *) log "$name already exists" ;;
  esac
  wait_ready || code=$?
  [ "$code" -ne 0 ] || log "$name is ready"
  return "$code"
}

# remote WORKER COMMAND: runs a command on worker 0, or on `all`.
remote() {
  connect ssh "$1" "$name" "--command=$2"
}

# list_files: prints the files of the repository, except .env and files that git ignores: data, runs, environments.
list_files() {
  (
    cd "$root" || exit
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
            log "$name still exists and costs money; delete it with launch/$script.sh delete"
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

# dispatch: runs the command.
dispatch() {
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
}
