#!/usr/bin/env bash
# Installs a wheel or a source distribution in a new virtual environment in an empty directory, then prepares a data set,
# trains and generates with it.
#
#   launch/smoke_package.sh dist/maxlm-*.whl
#   launch/smoke_package.sh dist/maxlm-*.tar.gz
#
# PYTHON names the interpreter to use (default: python3). pip chooses the newest versions of the dependencies, as for a
# new user.
set -euo pipefail

[ $# = 1 ] && [ -f "$1" ] || { echo 'error: no package given; usage: launch/smoke_package.sh FILE.whl|FILE.tar.gz' >&2; exit 2; }
package="$(realpath "$1")"
folder="$(mktemp -d)"
trap 'rm -rf "$folder"' EXIT
cd "$folder"
unset PYTHONPATH

"${PYTHON:-python3}" -m venv venv
export PATH="$folder/venv/bin:$PATH"
python -m pip install --disable-pip-version-check --quiet "$package"
python -m pip check

maxlm configs
maxlm completion bash >maxlm.bash
seq 20000 >numbers.txt
maxlm prepare --input numbers.txt --output data/numbers --tokenizer bytes
maxlm train --config=tiny --workdir=runs/smoke --config.data.path=data/numbers --config.train.num_steps=4 \
  --config.train.global_batch_size=2 --config.model.num_layers=2 2>errors || { cat errors >&2; exit 1; }
# The command that training names: maxlm generate … --prompt=Hello.
command="$(sed -n 's/^Next: //p' errors)"
echo "$command"
bash -c "$command --max-tokens=4" >answer
grep -q '^Hello' answer
grep -q maxlm maxlm.bash
test -s runs/smoke/report.html
echo "$(basename "$package") works: $(python -c 'import maxlm; print(maxlm.__version__, maxlm.__file__)')"
