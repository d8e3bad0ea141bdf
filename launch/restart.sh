#!/usr/bin/env bash
# Runs a command, and starts it again until it is done, as long as its run gets ahead.
#
#   launch/restart.sh [--max-failures K] [--backoff SECONDS] [--dry-run] -- COMMAND…
#
# Exit code 0 of the command: done. 2, bad input: the same would come again, so it stops. 75, preempted: starts again
# at once. Any other: starts again after a pause, first SECONDS (10), then twice as long each time, 300 at most. After
# K (3) ends in a row between which no newer checkpoint has come into the --workdir of the command it gives up: with the
# code of the command, or 1 instead of 75, which would only tell whoever started it to do so again.
# SIGTERM and SIGINT are handed on, once, as SIGTERM; it then waits for the command and ends with its exit code.
set -euo pipefail
launch="$(cd "$(dirname "$0")" && pwd)"
. "$launch/commands.sh"
. "$launch/progress.sh"

max_failures=3
pause=10
dry_run=false
while [ $# -gt 0 ]; do
  case "${1//_/-}" in
    --*=*)
      # --backoff=S is --backoff S.
      set -- "${1%%=*}" "$@"
      set -- "$1" "${2#*=}" "${@:3}"
      continue
      ;;
    --max-failures) need_value "$1" "$@" && max_failures="$2" && shift ;;
    --backoff) need_value "$1" "$@" && pause="$2" && shift ;;
    --dry-run) dry_run=true ;;
    --) shift && break ;;
    *) refuse "unknown option $1; usage: launch/restart.sh [--max-failures K] [--backoff SECONDS] -- COMMAND…" ;;
  esac
  shift
done
[ $# -gt 0 ] || refuse 'no command; usage: launch/restart.sh [--max-failures K] [--backoff SECONDS] -- COMMAND…'
need_number --max-failures "$max_failures"
need_number --backoff "$pause"
[ "$max_failures" -ge 1 ] || refuse "--max-failures=$max_failures: give 1 or more"
if $dry_run; then
  run "$@"
  exit 0
fi

say() { echo "restart: $*" >&2; }

child=
signal=
interrupted=
receive() {
  interrupted=true
  [ -z "$signal" ] || return 0
  signal="$1"
  # SIGINT goes on as SIGTERM. Ctrl-C reaches the command from the terminal too, and a second SIGINT would break off the
  # save that the first has asked for; and a command in the background ignores SIGINT until it says otherwise.
  [ -z "$child" ] || kill -s TERM "$child" 2>/dev/null || true
}
trap 'receive TERM' TERM
trap 'receive INT' INT

# Waits for $child whatever signals come meanwhile; its exit code is in $code.
await_child() {
  local status
  code=0
  wait "$child" 2>/dev/null || code=$?
  while [ -n "$interrupted" ]; do
    interrupted=
    status=0
    wait "$child" 2>/dev/null || status=$?
    # 127: nothing is left to wait for; the code before was the child's own.
    [ "$status" -eq 127 ] || code=$status
  done
}

workdir="$(find_workdir "$@")"
[ -n "$workdir" ] || workdir="$(default_workdir "$@")"
before="$(newest_step "$workdir")"
failures=0
first_pause=$pause
while :; do
  [ -z "$signal" ] || exit 75
  "$@" <&0 &
  child=$!
  # A signal may have come between the two lines above.
  [ -z "$signal" ] || kill -s TERM "$child" 2>/dev/null || true
  await_child
  child=
  [ "$code" -ne 0 ] || exit 0
  if [ "$code" -eq 2 ]; then
    say 'bad input (exit code 2): not started again'
    exit 2
  fi
  if [ -n "$signal" ]; then
    say "told to stop by SIG$signal; the command ended with exit code $code"
    exit "$code"
  fi

  newest="$(newest_step "$workdir")"
  if [ "$newest" -gt "$before" ]; then
    failures=0
    pause=$first_pause
    before=$newest
  else
    failures=$((failures + 1))
  fi
  if [ "$failures" -ge "$max_failures" ]; then
    place="${workdir:+ in $workdir/checkpoints}"
    say "exit code $code; given up after $failures in a row without a new checkpoint$place"
    [ "$code" -ne 75 ] || exit 1
    exit "$code"
  fi
  if [ "$code" -eq 75 ]; then
    say "preempted (exit code 75) at step $newest: starting again"
  else
    say "exit code $code at step $newest, $failures of $max_failures without a new checkpoint: again in $pause s"
    sleep "$pause" &
    child=$!
    # As above.
    [ -z "$signal" ] || kill -s TERM "$child" 2>/dev/null || true
    await_child
    child=
    pause=$((pause * 2 > 300 ? 300 : pause * 2))
  fi
done
