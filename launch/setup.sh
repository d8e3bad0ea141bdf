#!/usr/bin/env bash
# Installs maxlm into .venv, with the extras that this machine and a run need, and checks the machine: CPU, GPUs or TPUs.
#
#   launch/setup.sh [OPTION OF maxlm doctor …]
#
# With --config and --workdir, the extras of the run (buckets, W&B, experts) are installed too, and the checks include two
# steps of the training. Needs Python 3.11 or newer; without it, pip installs uv, which gets one. Exit codes: 0 all checks
# passed or warned; 1 a check or the installation failed; 2 bad input.
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/commands.sh
. launch/venv.sh

# new_environment: creates .venv with a Python that uv gets, because that of the system is missing or too old.
new_environment() {
  local uv
  uv="$(command -v uv || true)"
  if [ -z "$uv" ]; then
    python3 -m pip install --quiet --user uv || refuse 'no Python 3.11 or newer, and pip cannot install uv; install either'
    uv='python3 -m uv'
  fi
  # shellcheck disable=SC2086 # the words of a command
  $uv venv --quiet --seed --python 3.12 .venv
}

if [ ! -x .venv/bin/python ] && ! maxlm_find_python >/dev/null 2>&1; then
  new_environment
fi
if [ -f .venv/installed ]; then
  PATH="$PWD/.venv/bin:$PATH"
else
  maxlm_venv
fi
extras="$(maxlm doctor --extras "$@")"
maxlm_venv "$extras"
maxlm doctor "$@"
echo "Use it in this shell: . .venv/bin/activate"
