#!/usr/bin/env bash
# Makes .venv and runs everything that CI runs: lint, format, types, and all tests.
#
#   launch/test.sh [PYTEST ARGUMENT …]     e.g. launch/test.sh tests/model -k causal
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/venv.sh
maxlm_venv dev
maxlm_gpu_compiler
maxlm_browser
ruff check .
ruff format --check .
mypy
# Each process takes half of the files, one after the other, so that what the tests of a file share is made once.
exec python -m pytest --numprocesses="${MAXLM_TEST_PROCESSES:-2}" --dist=worksteal --durations=10 "$@"
