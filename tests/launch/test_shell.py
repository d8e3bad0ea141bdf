"""Tests all of launch/: shellcheck passes, old shells can run the scripts, and no command can show a secret."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

from tests.conftest import ROOT

SCRIPTS = sorted(
    path for path in (ROOT / 'launch').rglob('*') if path.suffix in ('.sh', '.sbatch') and '.venv' not in path.parts
)
RUN_BY_HAND = {
    path for path in SCRIPTS if path.name not in ('venv.sh', 'commands.sh', 'tpu_machines.sh', 'tpu_training.sh')
}
# Not available in bash 3.2, which macOS has.
TOO_NEW = r'declare -[AgnI]|local -n|\bmapfile\b|\breadarray\b|\bwait -n\b|\$\{\w+(,,|\^\^|@[QEPA])|\|&|&>>|\bcoproc\b'
# Commands that print the environment, or each command as it runs.
SHOWING = r'set -[a-z]*x|set -o xtrace|^\s*(printenv|env|export -p|declare -p|set)\s*($|[|>;])'


def shellcheck(*paths, cwd=ROOT):
    program = shutil.which('shellcheck', path=Path(sys.executable).parent) or shutil.which('shellcheck')
    assert program, 'shellcheck comes with the extra dev'
    sources = [f'--source-path={folder}' for folder in ('SCRIPTDIR', 'launch', '.')]
    command = [program, '--shell=bash', '--external-sources', '--format=gcc', *sources, *map(str, paths)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True).stdout


def test_shellcheck(tmp_path):
    assert len(SCRIPTS) >= 10
    assert shellcheck(*SCRIPTS) == ''
    planted = tmp_path / 'planted.sh'
    planted.write_text('#!/usr/bin/env bash\nrm -r $1/*\n')
    assert 'SC2086' in shellcheck(planted)


def found(pattern, text):
    return [line for line in text.splitlines() if re.search(pattern, line) and not line.lstrip().startswith('#')]


def test_no_newer_bash():
    assert {path.name: found(TOO_NEW, path.read_text()) for path in SCRIPTS if found(TOO_NEW, path.read_text())} == {}
    planted = 'declare -A table\nwait -n\necho "${name,,}"\nmapfile -t lines\n# wait -n would do\necho x\n'
    assert len(found(TOO_NEW, planted)) == 4


def test_no_script_prints_the_environment():
    assert {path.name: found(SHOWING, path.read_text()) for path in SCRIPTS if found(SHOWING, path.read_text())} == {}
    planted = 'set -x\nset -eux\nenv\nprintenv | sort\nexport -p\nenv A=1 program\nset -euo pipefail\n'
    assert len(found(SHOWING, planted)) == 5


def test_script_headers():
    for path in RUN_BY_HAND:
        text = path.read_text()
        assert text.startswith('#!/usr/bin/env bash\n#'), path
        assert '\nset -euo pipefail\n' in text, path
        # sbatch reads its script; all other scripts are executed.
        assert path.suffix == '.sbatch' or path.stat().st_mode & 0o111 == 0o111, path
