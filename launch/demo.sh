#!/usr/bin/env bash
# Trains a first model: creates .venv, tokenizes the Python standard library of this machine, trains configs/tiny.py,
# evaluates on held-out files and prints samples. Only Python packages are downloaded.
#
#   launch/demo.sh [--steps N]     N: number of training steps (default: that of the config)
set -euo pipefail
cd "$(dirname "$0")/.."
started=$SECONDS

steps=()
while [ $# -gt 0 ]; do
  case "$1" in
    --steps)
      [ $# -ge 2 ] || { echo "error: --steps needs a number" >&2; exit 2; }
      steps=("--config.train.num_steps=$2")
      shift 2
      ;;
    *) echo "error: unknown option $1; usage: launch/demo.sh [--steps N]" >&2; exit 2 ;;
  esac
done

. launch/venv.sh
maxlm_venv

echo "== 1 of 4: text → tokens → records, in data/"
stdlib="$(python -c 'import sysconfig; print(sysconfig.get_path("stdlib"))')"
# Excludes installed packages, tests (many are deliberately not UTF-8) and tables of numbers.
python -m maxlm.prepare --input "$stdlib" --exclude site-packages dist-packages test tests encodings pydoc_data \
  --output data --tokenizer bpe:4096 --validation-fraction 0.05 --skip-bad-records

echo "== 2 of 4: training, in runs/tiny/"
trained=$SECONDS
python -m maxlm.train --config=configs/tiny.py --workdir=runs/tiny ${steps[@]+"${steps[@]}"}
trained=$((SECONDS - trained))

echo "== 3 of 4: samples"
python -m maxlm.generate --checkpoint=runs/tiny --max-tokens=96 --temperature=0.7 --top-p=0.95 \
  --prompt=$'def read_file(path):\n' --prompt='import ' --prompt=$'class Queue:\n    """'

echo "== 4 of 4: summary"
sed -n 's/^.* INFO \(done: .*\)/\1/p' runs/tiny/run.log | tail -n 1
python -m maxlm.evaluate --checkpoint=runs/tiny
echo "wall time $((SECONDS - started)) s, of which training $trained s"
echo "report: runs/tiny/report.html (open it in a browser)"
echo "curves: runs/tiny/metrics.jsonl, or .venv/bin/tensorboard --logdir=runs/tiny/tensorboard"
