"""Provides the fake programs and a small repository as fixtures."""

import shutil

import pytest

from tests.conftest import ROOT
from tests.launch.programs import SECRET, Programs


@pytest.fixture
def programs(tmp_path):
    return Programs(tmp_path / 'stand_ins')


@pytest.fixture
def tree(tmp_path):
    """Returns a small copy of the repository, with files that must not be copied to workers."""
    root = tmp_path / 'repository'
    (root / 'configs').mkdir(parents=True)
    for name in ('pyproject.toml', 'configs/tiny.py'):
        shutil.copy(ROOT / name, root / name)
    (root / 'launch').mkdir()
    for path in (ROOT / 'launch').glob('*.sh'):
        shutil.copy(path, root / 'launch')
    for name in ('.env', '.git/config', '.venv/token', 'runs/a/run.log', 'data/x', 'maxlm/__pycache__/x.pyc'):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(SECRET)
    return root
