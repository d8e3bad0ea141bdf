"""The workdir of a run without --workdir, by the rule of the package and that of the launch scripts."""

import subprocess

import pytest

from maxlm.config.default_workdir import default_workdir
from tests.conftest import ROOT

CASES = [
    ('configs/1b.py', 'runs/1b'),
    ('configs/depth.py:24', 'runs/depth-24'),
    ('configs/code.py:7b-long', 'runs/code-7b-long'),
    ('/elsewhere/my.config.py:a/b c', 'runs/my.config-a_b_c'),
    # The run that wrote it stays as it is.
    ('runs/tiny/config.json', 'runs/tiny-2'),
    ('mine.json', 'runs/mine'),
]


@pytest.mark.parametrize(('spec', 'workdir'), CASES)
def test_the_config_names_the_workdir(spec, workdir):
    assert default_workdir(spec) == workdir


def test_the_config_of_the_present_directory(tmp_path, monkeypatch):
    (tmp_path / 'first').mkdir()
    monkeypatch.chdir(tmp_path / 'first')
    assert default_workdir('config.json') == 'runs/first-2'


@pytest.mark.multiprocess
def test_launch_scripts_have_the_same_rule(tmp_path):
    (tmp_path / 'runs' / 'tiny').mkdir(parents=True)
    lines = ''.join(f"default_workdir --x=1 --config='{spec}'\n" for spec, _ in CASES)
    script = f'set -euo pipefail\n. {ROOT}/launch/commands.sh\n{lines}default_workdir --x=1\n'
    done = subprocess.run(['bash', '-c', script], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [workdir for _, workdir in CASES]
