#!/usr/bin/env bash
# Runs on the workers of launch/tpu_vm.sh and launch/tpu_compute.sh: installs maxlm, and starts training so that it
# survives a lost connection.
#
#   launch/worker.sh install EXTRAS CHECKSUM    install into .venv and record the extras and the checksum
#   launch/worker.sh installed EXTRAS CHECKSUM  exit with 0 if these extras and checksum are installed
#   launch/worker.sh start -- COMMAND…          run under maxlm supervise in the background, unless one is running
#   launch/worker.sh follow                     print the log until the command ends
#   launch/worker.sh status                     print one of: none, running, stopped, exit CODE, died
#   launch/worker.sh stop                       send SIGTERM; training saves and exits
#
# The log is logs/run.log in the root of the repository.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/commands.sh
files=logs/run

# running: checks the command line too, because another process may have the same ID after a reboot.
running() {
  [ -f "$files.pid" ] && [ ! -f "$files.exit" ] &&
    ps -p "$(cat "$files.pid")" -o args= 2>/dev/null | grep -qE 'maxlm\.supervise|worker\.sh'
}

status() {
  if running; then
    echo running
  elif [ -f "$files.stopped" ]; then
    echo stopped
  elif [ -f "$files.exit" ]; then
    echo "exit $(cat "$files.exit")"
  elif [ -f "$files.pid" ]; then
    echo died
  else
    echo none
  fi
}

install() {
  local extras="$1" checksum="$2"
  . launch/venv.sh
  # The images of TPU machines have Python 3.10.
  if [ ! -x .venv/bin/python ] && ! maxlm_find_python >/dev/null 2>&1; then
    python3 -m pip install --quiet --user uv
    python3 -m uv venv --quiet --seed --python 3.12 .venv
  fi
  maxlm_venv "$extras"
  echo "$extras $checksum" >.installed
}

supervise() {
  local code=0
  .venv/bin/python -m maxlm.supervise -- "$@" &
  echo "$!" >"$files.pid"
  wait "$!" || code=$?
  echo "$code" >"$files.exit"
}

start() {
  if running; then
    echo 'already running'
    return
  fi
  mkdir -p logs
  rm -f "$files.pid" "$files.exit" "$files.stopped"
  nohup bash launch/worker.sh supervise "$@" >>"$files.log" 2>&1 </dev/null &
  until [ -s "$files.pid" ]; do sleep 0.1; done
  echo "started; the log is $PWD/$files.log"
}

follow() {
  local tail
  [ -f "$files.log" ] || refuse "nothing has been started: no $PWD/$files.log"
  tail -n 100 -f "$files.log" &
  tail=$!
  # After a lost connection, the next line of the log ends `tail`, which ends this loop.
  while running && kill -0 "$tail" 2>/dev/null; do sleep 1; done
  # Leaves `tail` time for the last lines.
  sleep 1
  kill "$tail" 2>/dev/null || true
}

stop() {
  if ! running; then
    echo 'not running'
    return
  fi
  touch "$files.stopped"
  kill -s TERM "$(cat "$files.pid")"
  while running; do sleep 1; done
  echo 'stopped'
}

command="${1:-}"
[ $# -eq 0 ] || shift
[ "${1:-}" != -- ] || shift
case "$command" in
  install)
    [ $# -eq 2 ] || refuse 'usage: launch/worker.sh install EXTRAS CHECKSUM'
    install "$@"
    ;;
  installed)
    [ $# -eq 2 ] || refuse 'usage: launch/worker.sh installed EXTRAS CHECKSUM'
    [ "$(cat .installed 2>/dev/null)" = "$1 $2" ]
    ;;
  start | supervise)
    [ $# -gt 0 ] || refuse "usage: launch/worker.sh $command -- COMMAND…"
    "$command" "$@"
    ;;
  follow | status | stop) "$command" ;;
  *) refuse "unknown command ${command:-(none)}; one of install, installed, start, follow, status, stop" ;;
esac
