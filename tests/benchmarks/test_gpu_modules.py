"""Tests that the modules of gpu.sh need no other packages than those that it names."""

import os
import re
import subprocess
import sys

import pytest

from tests.benchmarks.only_packages import hide_others
from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess
# flax requires orbax-checkpoint.
BARE = ('jax', 'flax', 'optax')
# The comparison with PyTorch also needs torch and transformers.
MODULES = sorted(set(re.findall(r'benchmarks\.(\w+)', (ROOT / 'benchmarks/gpu.sh').read_text())) - {'peers_gpu'})


@pytest.mark.parametrize(
    ('packages', 'modules', 'missing'),
    [((*BARE, 'ml_collections'), MODULES, None), (BARE, ['step'], 'ml_collections')],
)
def test_imports_on_a_bare_machine(tmp_path, packages, modules, missing):
    hidden = hide_others(tmp_path / 'site', packages)
    assert {'grain', 'clu', 'tensorflow', 'array_record', 'tokenizers'} <= hidden
    environment = {**os.environ, 'PYTHONPATH': str(tmp_path / 'site')}
    program = ''.join(f'import benchmarks.{module}\n' for module in modules)
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert (done.returncode == 0) == (missing is None), done.stderr
    if missing:
        assert f'No module named {missing!r}' in done.stderr
