#!/usr/bin/env bash
# The worker's side of launch/tpu_vm.sh: installs, and runs training so that it outlives the connection.
#
#   launch/worker.sh install EXTRAS CHECKSUM   an environment in .venv; the checksum says later that it is there
#   launch/worker.sh installed EXTRAS CHECKSUM  exit code 0 if it is
#   launch/worker.sh start -- COMMAND…         under maxlm.supervise, in the background; nothing if one is running
#   launch/worker.sh follow                    the log, until the command has ended
#   launch/worker.sh status                    one of: none, running, stopped, exit CODE, died
#   launch/worker.sh stop                      SIGTERM: saves and ends
#
# The log is logs/run.log beside this directory.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/commands.sh
files=logs/run

# A process number alone may be another's by now, after a reboot.
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
  # When the connection is lost the next line ends tail.
  while running && kill -0 "$tail" 2>/dev/null; do sleep 1; done
  # Time for its last lines.
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
