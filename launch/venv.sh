# Functions that create or update .venv and put it on PATH; sourced by the other scripts.
# PYTHON names the interpreter to use (default: the first of python3, python3.12, python3.11 that is 3.11 or newer).
# MAXLM_LOCK names a file of pinned versions with hashes; pip then accepts no other versions.

maxlm_find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  echo "error: maxlm needs Python 3.11 or newer; found none (${PYTHON:-python3, python3.12, python3.11})" >&2
  return 2
}

# maxlm_install_progress LOG: shows the progress of the pip process that writes LOG until the script ends or is killed: a
# bar on a terminal, otherwise a line every 10 s.
maxlm_install_progress() {
  local start=$SECONDS last=0 seconds total packages text width=30 filled
  local bar='##############################' space='..............................'
  # $$ is the script. This process ignores Ctrl-C, as all background processes of scripts do.
  while sleep 1 && kill -0 $$ 2>/dev/null; do
    seconds=$((SECONDS - start))
    total=$(sed -n 's/^Installing collected packages: //p' "$1" | tr ',' '\n' | wc -l)
    if [ "$total" -gt 0 ]; then
      packages=$(find .venv/lib -maxdepth 3 -name '*.dist-info' | wc -l)
      [ "$packages" -le "$total" ] || packages=$total
      filled=$((width * packages / total))
      text="installing [${bar:0:filled}${space:filled}] $((packages)) of $((total)) packages, $seconds s"
    else
      text="resolving and downloading: $(grep -c '^Collecting ' "$1") packages, $seconds s"
    fi
    if [ -t 1 ]; then
      printf '\r  %-78s' "$text"
    elif [ $((seconds - last)) -ge 10 ]; then
      last=$seconds
      echo "  $text"
    fi
  done
}

# maxlm_install ARGUMENT …: runs `pip install` with its output in .venv/install.log, and prints the end of it on failure.
maxlm_install() {
  local log=.venv/install.log progress code=0
  : >"$log"
  maxlm_install_progress "$log" &
  progress=$!
  .venv/bin/python -m pip install --disable-pip-version-check --progress-bar off "$@" >"$log" 2>&1 || code=$?
  kill "$progress" 2>/dev/null || true
  wait "$progress" 2>/dev/null || true
  if [ -t 1 ]; then printf '\r%-80s\r' ''; fi
  [ "$code" = 0 ] || tail -n 20 "$log" >&2
  return "$code"
}

maxlm_venv() {
  local extras="${1:-}" python wanted
  if [ ! -x .venv/bin/python ]; then
    python="$(maxlm_find_python)" || return 2
    "$python" -m venv .venv
  fi
  # Packages are installed only if pyproject.toml, the lock file or the extras have changed.
  wanted="$extras $(cat pyproject.toml ${MAXLM_LOCK:+"$MAXLM_LOCK"} | cksum)"
  if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
    echo "installing maxlm${extras:+[$extras]} into .venv (1 to 3 minutes with cached packages) …"
    if [ -n "${MAXLM_LOCK:-}" ]; then
      # The lock file also contains the build backend, so pip need not resolve or download anything else.
      maxlm_install --no-deps --require-hashes -r "$MAXLM_LOCK" || return
      maxlm_install --no-deps --no-build-isolation --editable . || return
      .venv/bin/python -m pip check || return
    else
      maxlm_install --editable ".${extras:+[$extras]}" || return
    fi
    echo "$wanted" >.venv/installed
  fi
  PATH="$PWD/.venv/bin:$PATH"
  export PATH
}

# maxlm_gpu_compiler: installs JAX's compiler for NVIDIA GPUs without the runtime libraries, and sets MAXLM_GPU_COMPILER
# if this machine supports it. It has a separate directory, because in .venv JAX would search for a GPU at every start.
maxlm_gpu_compiler() {
  local folder="$PWD/.venv/gpu-compiler" version
  [ "$(uname -sm)" = 'Linux x86_64' ] || return 0
  version="$(python -c 'import jaxlib; print(jaxlib.__version__)')"
  if [ "$(cat "$folder/installed" 2>/dev/null)" != "$version" ]; then
    echo 'installing the compiler for GPUs into .venv/gpu-compiler …'
    rm -rf "$folder"
    python -m pip install --quiet --disable-pip-version-check --no-compile --no-deps --target "$folder" \
      "jax-cuda12-plugin==$version" "jax-cuda12-pjrt==$version" 'nvidia-cuda-nvcc-cu12>=12.6' || return
    echo "$version" >"$folder/installed"
  fi
  export MAXLM_GPU_COMPILER="$folder"
}

# maxlm_browser: sets MAXLM_BROWSER to a Chromium in which the tests open pages, and installs one if run as root.
maxlm_browser() {
  local candidate
  for candidate in "${MAXLM_BROWSER:-}" chromium-headless-shell chromium chromium-browser google-chrome; do
    if [ -n "$candidate" ] && MAXLM_BROWSER="$(command -v "$candidate")"; then
      export MAXLM_BROWSER
      return 0
    fi
  done
  unset MAXLM_BROWSER
  if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo 'no Chromium: the tests of pages will fail; install chromium-headless-shell, or set MAXLM_BROWSER' >&2
    return 0
  fi
  echo 'installing chromium-headless-shell …'
  if apt-get -qq update && apt-get -qq install -y --no-install-recommends chromium-headless-shell fonts-dejavu-core >/dev/null; then
    MAXLM_BROWSER="$(command -v chromium-headless-shell)" && export MAXLM_BROWSER
  fi
}
