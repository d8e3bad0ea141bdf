"""The rules of the house: who may import whom, how long a file may be, and what an import may cost."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from maxlm.__main__ import VERBS
from tests.conftest import ROOT

PACKAGE = ROOT / 'maxlm'
FILES = sorted(PACKAGE.rglob('*.py'))
WINGS = (
    'storage',
    'data',
    'model',
    'training',
    'runtime',
    'planning',
    'inference',
    'huggingface',
    'monitoring',
    'reporting',
    'posttrain',
    'config',
    'doctoring',
    'evaluation',
    'serving',
)
# What a wing must not know.
FORBIDDEN = {
    **{wing: {*VERBS, '__main__'} for wing in WINGS},
    'storage': {*VERBS, '__main__', *WINGS[1:]},
    'data': {*VERBS, '__main__', 'model', 'training', 'inference'},
    'model': {*VERBS, '__main__', 'training', 'runtime', 'data', 'inference'},
    'training': {*VERBS, '__main__', 'runtime', 'data', 'inference'},
    'huggingface': {*VERBS, '__main__', 'inference'},
    # It must start at once, so it leaves JAX alone.
    'monitoring': {*VERBS, '__main__', 'model', 'training', 'planning', 'inference', 'huggingface'},
    # Only files of a run, never the run itself.
    'reporting': {*VERBS, '__main__', 'data', 'model', 'training', 'planning', 'inference', 'huggingface'},
}
# Formats are read and written without the libraries that they are from.
FOREIGN = {'torch', 'transformers', 'huggingface_hub'}
# The hub itself is asked here, for the revision of a data set.
ASKS_THE_HUB = 'data/readers/hub.py'
MAX_LINES = 400
NAMELESS = {'utils', 'helpers', 'common', 'misc'}


def imported(source):
    """Names of all modules that a source text imports, wherever in it; `from a import b` counts as a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'relative imports hide what is imported'
            names |= {node.module, *(f'{node.module}.{alias.name}' for alias in node.names)}
    return names


def breaches(wing, source):
    parts = (name.split('.') for name in imported(source))
    return {part[1] for part in parts if part[0] == 'maxlm' and len(part) > 1} & FORBIDDEN[wing]


def wing_of(path):
    return path.relative_to(PACKAGE).parts[0]


def test_every_folder_is_a_wing_with_rules():
    folders = {path.name for path in PACKAGE.iterdir() if path.is_dir() and list(path.rglob('*.py'))}
    assert folders <= set(WINGS), 'a new wing needs its rules here'
    assert folders == {wing_of(path) for path in FILES if path.parent != PACKAGE}


def test_contributing_lists_the_rules():
    rows = re.findall(r'^\| `(\w+)/` \|.*\| (.*)\|$', (ROOT / 'CONTRIBUTING.md').read_text(), re.MULTILINE)
    listed = {wing: set(re.findall(r'`(\w+)`', forbidden)) for wing, forbidden in rows}
    rules = {wing: FORBIDDEN[wing] - {*VERBS, '__main__'} for wing in WINGS}
    assert listed == rules | {'storage': set()}


@pytest.mark.parametrize('wing', WINGS)
def test_a_wing_imports_only_what_it_may(wing):
    files = [path for path in FILES if wing_of(path) == wing]
    assert files
    found = {str(path.relative_to(ROOT)): breaches(wing, path.read_text()) for path in files}
    assert {name: names for name, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ('wing', 'source', 'found'),
    [
        ('runtime', 'import maxlm.train', {'train'}),
        ('runtime', 'from maxlm import train', {'train'}),
        ('runtime', 'from maxlm.train import main', {'train'}),
        ('planning', 'def f():\n    from maxlm.prepare import main', {'prepare'}),
        ('config', 'import maxlm.generate as g', {'generate'}),
        ('inference', 'from maxlm import evaluate as e, errors', {'evaluate'}),
        ('data', 'from maxlm.model.decoder import Decoder', {'model'}),
        ('data', 'if 1:\n    import maxlm.training.step\n    import maxlm.inference', {'training', 'inference'}),
        ('model', 'from maxlm.training.sharding import TABLE', {'training'}),
        ('model', 'from maxlm import runtime, data', {'runtime', 'data'}),
        ('training', 'from maxlm.data.records import Dataset', {'data'}),
        ('training', 'import maxlm.runtime.console\nimport maxlm.inference.engine', {'runtime', 'inference'}),
        ('huggingface', 'from maxlm.inference.load import load_model', {'inference'}),
        ('posttrain', 'from maxlm.train import main', {'train'}),
        # What is allowed, and what only looks alike.
        ('huggingface', 'from maxlm.runtime import layers\nfrom maxlm.data import tokenizer', set()),
        ('runtime', 'from maxlm.training.state import TrainState', set()),
        ('training', 'from maxlm.model.decoder import Decoder\nimport jax.data', set()),
        ('data', 'import train\nfrom datasets import model', set()),
    ],
)
def test_a_breach_would_be_found(wing, source, found):
    assert breaches(wing, source) == found


def foreign(source):
    return {name.partition('.')[0] for name in imported(source)} & FOREIGN


def test_nothing_imports_the_libraries_of_the_formats():
    found = {path.relative_to(PACKAGE).as_posix(): foreign(path.read_text()) for path in FILES}
    assert {name: names for name, names in found.items() if names} == {ASKS_THE_HUB: {'huggingface_hub'}}
    assert foreign('def f():\n    import torch.nn\n    from transformers import x') == {'torch', 'transformers'}
    assert foreign('from maxlm.huggingface import torch_names') == set()


def too_long(texts):
    return [name for name, text in texts.items() if len(text.splitlines()) > MAX_LINES]


def test_no_file_is_too_long():
    assert too_long({str(path.relative_to(ROOT)): path.read_text() for path in FILES}) == []
    assert too_long({'short.py': 'x\n' * MAX_LINES, 'long.py': 'x\n' * (MAX_LINES + 1)}) == ['long.py']


def nameless(paths):
    return [path for path in paths if NAMELESS & {*path.parts[:-1], path.stem}]


def test_every_file_is_named_for_what_it_holds():
    assert nameless(path.relative_to(ROOT) for path in FILES) == []
    planted = [Path('maxlm/utils.py'), Path('maxlm/data/common.py'), Path('maxlm/misc/x.py'), Path('maxlm/commons.py')]
    assert nameless(planted) == planted[:3]


HEAVY = ('tensorflow', 'clu', 'torch', 'transformers', 'datasets', 'ray', 'rensa', 'gcsfs', 's3fs')
IMPORT_ALL = """
import importlib, sys
for name in {modules}:
    importlib.import_module(name)
print(*sorted(name for name in {heavy} if name in sys.modules))
"""


def heavy_imports(modules, heavy=HEAVY):
    program = IMPORT_ALL.format(modules=modules, heavy=heavy)
    result = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    return result.stdout.split()


def test_importing_any_of_it_does_not_import_tensorflow_or_torch():
    modules = ['.'.join(path.relative_to(ROOT).with_suffix('').parts) for path in FILES]
    modules = [name.removesuffix('.__init__') for name in modules]
    assert 'maxlm.train' in modules
    # Control, in the same process: what is imported is seen.
    assert heavy_imports(modules, (*HEAVY, 'jax')) == ['jax']
