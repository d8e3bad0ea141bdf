#!/usr/bin/env bash
# Makes .venv, installs what the tests need and runs them.
#
#   launch/test.sh                     lint, types and all tests except the nightly ones: what CI runs
#   launch/test.sh --fast              lint and the tests below 0.5 s: the inner loop
#   launch/test.sh --changed [REV]     lint and the tests that depend on what changed since REV (default: main)
#   launch/test.sh --lint              ruff and mypy alone
#   launch/test.sh --nightly           the long tests: full golden curve, exhaustive tables, fuzzing with new examples
#   launch/test.sh --times             all tests; measures them, writes tests/durations.json and prints a table
#   launch/test.sh --coverage          the tests below 0.5 s; fails below the floor in pyproject.toml
#   launch/test.sh PYTEST ARGUMENT …   a part, e.g. launch/test.sh tests/model -k causal
#
# MAXLM_LOCK=requirements.lock installs exactly the locked versions, as CI does.
# MAXLM_TEST_PROCESSES sets the number of workers (default: one per core).
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/venv.sh
maxlm_venv dev
# The workers and the processes that tests start compile each module once, not every time.
unset PYTHONDONTWRITEBYTECODE

format() {
  ruff check .
  ruff format --check .
}

lint() {
  format
  mypy
}

# Whole files go to one worker, so that what the tests of a file share is made once; conftest.py puts the longest first.
run_pytest() {
  python -m pytest --numprocesses="${MAXLM_TEST_PROCESSES:-auto}" --dist=loadfile --no-loadscope-reorder "$@"
}

case "${1:-}" in
  --fast)
    shift
    format
    run_pytest -m 'not slow and not nightly' "$@"
    ;;
  --lint)
    lint
    ;;
  --changed)
    format
    maxlm_gpu_compiler
    maxlm_browser
    files="$(python -m tools.affected_tests "${2:-main}")"
    if [ -z "$files" ]; then
      echo "no test depends on what changed since ${2:-main}"
      exit 0
    fi
    # shellcheck disable=SC2086  # one word for each file
    run_pytest $files
    ;;
  --nightly)
    shift
    maxlm_gpu_compiler
    maxlm_browser
    # Tests that use Hypothesis run in both tiers; the profile is in tests/conftest.py.
    run_pytest -m 'nightly or hypothesis' --hypothesis-profile=nightly --timeout=900 "$@"
    ;;
  --times)
    shift
    maxlm_gpu_compiler
    maxlm_browser
    reports="$(mktemp -d)"
    trap 'rm -rf "$reports"' EXIT
    code=0
    run_pytest --time-report="$reports/all" "$@" || code=$?
    python -m benchmarks.test_time "$reports/all" --save
    # Without the slow tests, others compile the programs that they share.
    run_pytest -m 'not slow and not nightly' --time-report="$reports/fast" "$@" >/dev/null || code=$?
    python -m benchmarks.test_time "$reports/all" --fast "$reports/fast" --rows 0 --save
    exit "$code"
    ;;
  --coverage)
    shift
    # Needs Python 3.12, where it costs little.
    COVERAGE_CORE=sysmon run_pytest -m 'not slow and not nightly' --cov=maxlm --cov-report=term:skip-covered "$@"
    ;;
  *)
    maxlm_gpu_compiler
    maxlm_browser
    lint
    run_pytest --durations=10 "$@"
    ;;
esac
