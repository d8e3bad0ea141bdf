"""Libraries that commands import before they run: each would take up to seconds in every process."""

import subprocess
import sys

import pytest

from maxlm.cli.commands import COMMANDS
from tests.conftest import ROOT

# Libraries that every command may import, and those of some commands. ml_collections imports absl and yaml.
ALLOWED = {'maxlm'}
CONFIG = {'absl', 'ml_collections', 'yaml'}
TERMINAL = {'colorama', 'tenacity', 'tornado', 'tqdm'}
OF_VERBS = {
    'doctor': CONFIG,
    **{verb: {'tqdm'} for verb in ('train', 'grpo')},
    'recipe': {*TERMINAL, 'etils'},
    'supervise': {*CONFIG, *TERMINAL, 'etils'},
    'completion': {'shtab'},
    'monitor': {*TERMINAL, 'plotext', 'rich'},
    'report': {*CONFIG, *TERMINAL, 'jinja2', 'markupsafe'},
    'prepare': {'array_record', 'jinja2', 'markupsafe', 'numpy', 'tokenizers'},
}
# Libraries that a run needs before its first step.
OF_RUNS = {'array_record', 'flax', 'grain', 'jax', 'ml_collections', 'numpy', 'optax', 'orbax', 'tokenizers'}
# Libraries that only some runs need, or that a run needs later.
HEAVY = {
    'aiobotocore',
    'aiohttp',
    'boto3',
    'botocore',
    'clu',
    'datasets',
    'fsspec',
    'gcsfs',
    'huggingface_hub',
    'matplotlib',
    'pandas',
    'pyarrow',
    'ray',
    'rensa',
    's3fs',
    'scipy',
    'sklearn',
    'tensorboard',
    'tensorflow',
    'tensorflow_datasets',
    'tiktoken',
    'torch',
    'transformers',
}
PROGRAM = """
import importlib, sys
before = {{*sys.modules}}
module = importlib.import_module({module!r})
for argv in {calls}:
    try:
        module.main(argv)
    except SystemExit:
        print()
    except importlib.import_module('maxlm.errors').InputError:
        pass
names = {{name.partition('.')[0] for name in {{*sys.modules}} - before}} - {{*sys.stdlib_module_names}}
print(*(name for name in names if not name.startswith('_')))
"""


def imported(module, calls=()):
    """Returns the libraries that a process imports with a module and with calls of its main function."""
    program = PROGRAM.format(module=module, calls=list(calls))
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    return {*done.stdout.splitlines()[-1].split()}


@pytest.mark.parametrize('verb', COMMANDS)
def test_help_and_invalid_arguments_import_few_libraries(verb):
    found = imported(f'maxlm.{verb}', [['--help'], ['--nonsense']])
    # Cython registers the module of its runtime.
    assert found - {'cython_runtime'} <= ALLOWED | OF_VERBS.get(verb, set())


def test_the_libraries_of_a_run():
    assert imported('maxlm.train') - {'cython_runtime'} <= ALLOWED | OF_VERBS['train']
    # Control in another process: the implementation imports libraries, and none that only some runs need.
    found = imported('maxlm.cli.execution.train')
    assert found >= OF_RUNS
    assert found & HEAVY == set()
