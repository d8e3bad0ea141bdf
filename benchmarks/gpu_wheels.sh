#!/usr/bin/env bash
# Defines `use_wheels`, which makes the wheels in the directory WHEELS importable; does nothing without WHEELS.
# The caller sets `python`, the interpreter.
use_wheels() {
  if [ -z "${WHEELS:-}" ]; then
    return
  fi
  local site
  site="$(mktemp -d)"
  # shellcheck disable=SC2154
  "$python" -m pip install --quiet --no-index --no-deps --no-compile --target "$site" "$WHEELS"/*.whl || exit 2
  export PYTHONPATH="$site${PYTHONPATH:+:$PYTHONPATH}"
}
