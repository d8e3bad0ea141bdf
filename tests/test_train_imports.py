"""Modules that starting a run must not import, because each would take up to seconds in every process."""

import subprocess
import sys

from tests.conftest import ROOT

HEAVY = (
    'tensorflow',
    'tensorboard',
    'clu',
    'torch',
    'transformers',
    'tensorflow_datasets',
    'datasets',
    'huggingface_hub',
    'matplotlib',
    'scipy',
    'sklearn',
    'pandas',
    'pyarrow',
    'tiktoken',
    'rensa',
    'ray',
    'fsspec',
    'gcsfs',
    's3fs',
    'google.cloud.storage',
    'google.auth',
    'aiohttp',
    'boto3',
    'botocore',
    'aiobotocore',
)


def imported_by(statement, names):
    program = f'import sys\n{statement}\nprint(*[name for name in {names} if name in sys.modules])'
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_starting_a_run_imports_nothing_heavy():
    # Negative control in the same process: imports are detected.
    assert imported_by('import maxlm.train', (*HEAVY, 'jax', 'grain')) == ['jax', 'grain']
