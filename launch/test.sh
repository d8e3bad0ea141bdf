#!/usr/bin/env bash
# Creates .venv, installs the development dependencies and runs the tests.
#
#   launch/test.sh                     lint, type check and all tests except the nightly ones, as in CI
#   launch/test.sh --fast              lint and the fast tier (tests below 0.5 s)
#   launch/test.sh --changed [REV]     lint and the tests that depend on changes since REV (default: main)
#   launch/test.sh --map               all tests; records which functions each test executes, for --changed
#   launch/test.sh --lint              ruff, mypy, codespell, hadolint, tools.check_prose and the documentation site only
#   launch/test.sh --nightly           long tests: golden curve, exhaustive tables, new fuzzing examples, published models
#   launch/test.sh --times             all tests; writes tests/durations.json and prints a table of durations
#   launch/test.sh --coverage          fast tier; fails if the coverage is below the limit in pyproject.toml
#   launch/test.sh PYTEST ARGUMENT …   selected tests, e.g. launch/test.sh tests/model -k causal
#
# MAXLM_LOCK=requirements.lock installs exactly the locked versions, as CI does.
# MAXLM_TEST_PROCESSES sets the number of workers (default: one more than cores, each with up to 3 GB of memory).
set -euo pipefail
cd "$(dirname "$0")/.."
. launch/venv.sh
maxlm_venv dev
# Bytecode files save the workers and child processes from compiling each module again.
unset PYTHONDONTWRITEBYTECODE

format() {
  ruff check .
  ruff format --check .
}

# mkdocs prints a notice about the future of its theme, which is not a finding. --quiet would hide warnings from --strict.
export NO_MKDOCS_2_WARNING=1

# beside COMMAND …: starts a check in the background. When it ends, it prints its output, and its name if it failed.
checks=()
beside() {
  {
    code=0
    output="$("$@" 2>&1)" || code=$?
    [ -z "$output" ] || printf '%s\n' "$output"
    [ "$code" = 0 ] || echo "failed: $*" >&2
    exit "$code"
  } &
  checks+=("$!")
}

# all_passed: waits for the checks, and fails if one failed.
all_passed() {
  local check code=0
  for check in "${checks[@]}"; do
    wait "$check" || code=1
  done
  return "$code"
}

# lint: starts all checks. mypy takes longest, on one core.
lint() {
  beside mypy
  beside ruff check .
  beside ruff format --check .
  beside codespell
  beside hadolint Dockerfile
  beside check-jsonschema --quiet --builtin-schema vendor.compose-spec compose.yaml compose.gpu.yaml
  beside python -m tools.check_prose
  beside mkdocs build --strict
}

# --nbmake runs the notebooks of examples/. --dist=loadfile sends each file to one worker, so that its tests share
# fixtures. conftest.py starts the longest files first. Tests wait for processes, emulators and timeouts a fifth of the
# time, so one worker more than cores shortens the session.
run_pytest() {
  local cores
  cores="$(python -c 'import os; print(os.cpu_count())')"
  python -m pytest --nbmake --numprocesses="${MAXLM_TEST_PROCESSES:-$((cores + 1))}" --dist=loadfile \
    --no-loadscope-reorder "$@"
}

case "${1:-}" in
  --fast)
    shift
    format
    run_pytest -m 'not slow and not nightly' "$@"
    ;;
  --lint)
    lint
    all_passed
    ;;
  --changed)
    format
    maxlm_gpu_compiler
    maxlm_browser
    tests="$(mktemp)"
    trap 'rm -f "$tests"' EXIT
    python -m tools.affected_tests "${2:-main}" >"$tests"
    if [ ! -s "$tests" ]; then
      echo "no test depends on what changed since ${2:-main}"
      exit 0
    fi
    run_pytest "@$tests"
    ;;
  --map)
    shift
    maxlm_gpu_compiler
    maxlm_browser
    run_pytest --record-map --timeout=600 "$@"
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
    # Without the slow tests, fast tests compile the shared programs, so their durations are measured separately.
    run_pytest -m 'not slow and not nightly' --time-report="$reports/fast" "$@" >/dev/null || code=$?
    python -m benchmarks.test_time "$reports/all" --fast "$reports/fast" --rows 0 --save
    exit "$code"
    ;;
  --coverage)
    shift
    # sys.monitoring needs Python 3.12 and makes coverage cheap.
    COVERAGE_CORE=sysmon run_pytest -m 'not slow and not nightly' --cov=maxlm --cov-report=term:skip-covered "$@"
    ;;
  *)
    maxlm_gpu_compiler
    maxlm_browser
    # The tests wait for processes and emulators part of the time, so the checks run beside them.
    lint
    code=0
    run_pytest --durations=10 "$@" || code=$?
    all_passed || code=1
    exit "$code"
    ;;
esac
