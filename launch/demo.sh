#!/usr/bin/env bash
# Trains a first model: creates .venv, tokenizes the Python standard library of this machine, trains configs/tiny.py,
# evaluates on held-out files and prints samples. Only Python packages are downloaded, for CUDA if there is an NVIDIA GPU.
#
#   launch/demo.sh [--steps N]     N: number of training steps (default: 350)
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

steps=350
while [ $# -gt 0 ]; do
  case "$1" in
    --steps)
      case "${2:-}" in '' | *[!0-9]*) echo "error: --steps=${2:-}: not a number; use e.g. 350" >&2; exit 2 ;; esac
      steps=$2
      shift 2
      ;;
    *) echo "error: unknown option $1; usage: launch/demo.sh [--steps N]" >&2; exit 2 ;;
  esac
done

cat <<END
This demo trains a language model with 4 million parameters on Python source code, in about 5 minutes:

  1  install the packages into .venv           1 to 2 min, longer if they must be downloaded
  2  tokenize the standard library, in data/   15 s
  3  train $steps steps, in runs/tiny/          $(((steps + 119) / 120)) min
  4  generate samples                          15 s
  5  evaluate on held-out files                10 s

The times are for 2 CPU cores without other load. Run the demo again to resume it.

END

# part N TEXT: prints the heading of a part with the time since the start.
part() {
  echo
  echo "== $1 of 5: $2 ($((SECONDS - started)) s since the start)"
}

part 1 'installation'
. launch/venv.sh
# nvidia-smi prints one line per GPU, and fails without a driver.
if gpus="$(nvidia-smi -L 2>/dev/null | grep '^GPU')"; then
  echo "found ${gpus%% (UUID*}: using the CUDA build of JAX"
  maxlm_venv cuda12
else
  echo 'found no NVIDIA GPU: using the CPU build of JAX'
  maxlm_venv
fi
# The end of this script lists the next steps.
export MAXLM_HINTS=0

part 2 'text → tokens → records, in data/'
stdlib="$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# Excludes installed packages, tests (many are deliberately not UTF-8) and tables of numbers.
python -m maxlm.prepare --input "$stdlib" --exclude site-packages dist-packages test tests encodings pydoc_data \
  --output data --tokenizer bpe:4096 --validation-fraction 0.05 --skip-bad-records

part 3 'training, in runs/tiny/'
trained=$SECONDS
python -m maxlm.train --config=configs/tiny.py --workdir=runs/tiny "--config.train.num_steps=$steps"
trained=$((SECONDS - trained))

part 4 'samples'
python -m maxlm.generate --checkpoint=runs/tiny --max-tokens=96 --temperature=0.3 --top-p=0.95 \
  --prompt=$'def read_file(path):\n' --prompt='import ' --prompt=$'class Queue:\n    """'

part 5 'summary'
sed -n 's/^.* INFO \(done: .*\)/\1/p' runs/tiny/run.log | tail -n 1
python -m maxlm.evaluate --checkpoint=runs/tiny
echo "wall time $((SECONDS - started)) s, of which training $trained s"

cat <<'END'

Next:
  Activate the environment              source .venv/bin/activate
  Open the report in a browser          python -m webbrowser runs/tiny/report.html
  Continue prompts in the terminal      maxlm generate --checkpoint=runs/tiny --interactive
  Complete text in the browser          maxlm serve --checkpoint=runs/tiny
  Prepare your own text                 maxlm prepare --input FOLDER --output data/mine
  Train on it                           maxlm train --config=tiny --workdir=runs/mine --config.data.path=data/mine
  Plan a larger run                     maxlm plan --config=configs/1b.py --target=h100:8 --estimate
END
