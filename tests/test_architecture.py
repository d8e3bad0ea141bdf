"""Architecture: layers of the package, their libraries, sizes of files and packages, and import costs."""

import ast
import importlib
import itertools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from maxlm.cli.commands import COMMANDS
from tests.conftest import ROOT

PACKAGE = ROOT / 'maxlm'
FILES = sorted(PACKAGE.rglob('*.py'))
MAX_LINES = 400
MAX_MODULES = 15
# Files and packages directly in `maxlm/`.
MAX_ENTRIES = 32
NAMELESS = {'utils', 'helpers', 'common', 'misc'}
HEAVY = ('tensorflow', 'clu', 'torch', 'transformers', 'datasets', 'ray', 'rensa', 'gcsfs', 's3fs')
# Directories of tests of other parts of the project.
OTHER_TESTS = {
    (name,) for name in ('benchmarks', 'buckets', 'configs', 'conformance', 'examples', 'golden', 'launch', 'tools')
}
CONTENTS = re.compile(r'^\| `([\w.]+)` \| ([^|]+) \|$', re.MULTILINE)
IMPORTS = re.compile(r'^\| `([\w.]+)` \| ([^|]*) \| ([^|]*) \|$', re.MULTILINE)


class Layer:
    """A package, its libraries and the packages that it never imports, from the tables in CONTRIBUTING.md."""

    def __init__(self, name, contents, libraries, forbidden):
        self.name, self.contents = name, contents
        self.libraries = set(re.findall(r'`(\w+)`', libraries))
        self.forbidden = set(re.findall(r'`([\w.]+)`', forbidden))


def read_layers():
    """Returns the layers in the order of the first table. Packages without a row in the second import no library."""
    text = (ROOT / 'CONTRIBUTING.md').read_text()
    allowed = {package: rest for package, *rest in IMPORTS.findall(text)}
    layers = [Layer(package, contents, *allowed.pop(package, ('', ''))) for package, contents in CONTENTS.findall(text)]
    assert not allowed, f'packages without contents: {list(allowed)}'
    return layers


LAYERS = read_layers()
RANK = {layer.name: rank for rank, layer in enumerate(LAYERS)}


def module_of(path):
    return '.'.join(path.relative_to(PACKAGE).with_suffix('').parts)


MODULES = {module_of(path): path for path in FILES if path.stem != '__init__'}


def package_of(module):
    """Returns the package of a module, or the module itself if it is directly in `maxlm`."""
    return module.rpartition('.')[0] or module


def imports(source):
    """Returns (module or package of maxlm without `maxlm.`, names) and the libraries that a source text imports."""
    ours, libraries = set(), set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, 'relative imports are not allowed'
            names = [node.module, *(f'{node.module}.{alias.name}' for alias in node.names)]
        for name in names:
            top, _, rest = name.partition('.')
            if top == 'maxlm':
                ours.add(rest)
            elif top not in sys.stdlib_module_names:
                libraries.add(top)
    return ours, libraries


def upward(package, source):
    """Returns the packages above `package`, or forbidden to it, and the `maxlm.COMMAND` that a source text imports."""
    ours, _ = imports(source)
    used = {package_of(name) if name in MODULES else name for name in ours} & {*RANK, *COMMANDS, '__main__'}
    used -= {package}
    forbidden = LAYERS[RANK[package]].forbidden
    return {
        name
        for name in used
        if RANK.get(name, len(LAYERS)) > RANK[package]
        or any(f'{name}.'.startswith(f'{prefix}.') for prefix in forbidden)
    }


def test_descriptions_of_layers_equal_the_docstrings_of_packages():
    # `data` only contains other packages.
    packages = {package_of(name) for name in MODULES if '.' in name}
    described = {name: (PACKAGE / name.replace('.', '/') / '__init__.py').read_text() for name in packages}
    contents = {layer.name: f'"""{layer.contents}"""\n' for layer in LAYERS if layer.name not in MODULES}
    assert contents == described
    assert {name for name in MODULES if '.' not in name} == {'__main__', *RANK} - {*contents}


@pytest.mark.parametrize('package', RANK)
def test_a_package_imports_only_lower_layers_and_its_libraries(package):
    files = {name: path for name, path in MODULES.items() if package_of(name) == package}
    found = {name: upward(package, path.read_text()) for name, path in files.items()}
    assert {name: above for name, above in found.items() if above} == {}
    used = set().union(*(imports(path.read_text())[1] for path in files.values()))
    assert used == LAYERS[RANK[package]].libraries


@pytest.mark.parametrize(
    ('package', 'source', 'found'),
    [
        ('runtime', 'import maxlm.train', {'train'}),
        ('runtime', 'from maxlm import train', {'train'}),
        ('planning', 'def f():\n    from maxlm.cli.setup.prepare import main', {'cli.setup'}),
        # Another name of `maxlm.cli.runs.train`, for users.
        ('cli.runs', 'import maxlm.train', {'train'}),
        ('data.loader', 'from maxlm.model.decoder import Decoder', {'model'}),
        ('data.formats', 'if 1:\n    import maxlm.training.step', {'training'}),
        ('model', 'from maxlm.parallel import layout\nfrom maxlm.data.loader import windows', {'data.loader'}),
        ('training', 'from maxlm.data.dataset.records import DatasetManifest', {'data.dataset'}),
        ('monitoring', 'from maxlm.model.decoder import Decoder', {'model'}),
        # Imports that are allowed, or only have a similar name.
        ('inference', 'from maxlm.checkpoint import streaming', set()),
        ('training', 'from maxlm.model.decoder import Decoder\nimport jax.data', set()),
        ('data.loader', 'import train\nfrom datasets import model', set()),
    ],
)
def test_an_upward_import_would_be_found(package, source, found):
    assert upward(package, source) == found


def cycles(edges):
    """Returns the modules that reach themselves through `edges`: module → modules."""
    reached = {name: set(targets) for name, targets in edges.items()}
    for middle in reached:
        for name in reached:
            if middle in reached[name]:
                reached[name] |= reached[middle]
    return sorted(name for name, targets in reached.items() if name in targets)


def test_no_import_cycle():
    edges = {name: imports(path.read_text())[0] & {*MODULES} for name, path in MODULES.items()}
    assert cycles(edges) == []
    assert cycles({'a': {'b'}, 'b': {'c'}, 'c': {'b'}}) == ['b', 'c']


def too_long(texts):
    return [name for name, text in texts.items() if len(text.splitlines()) > MAX_LINES]


def test_no_file_is_too_long():
    assert too_long({str(path.relative_to(ROOT)): path.read_text() for path in FILES}) == []
    assert too_long({'short.py': 'x\n' * MAX_LINES, 'long.py': 'x\n' * (MAX_LINES + 1)}) == ['long.py']


def test_no_package_has_too_many_modules():
    sizes = {package: sum(package_of(name) == package for name in MODULES) for package in RANK}
    assert {package: size for package, size in sizes.items() if size > MAX_MODULES} == {}


def test_the_root_has_few_entries():
    entries = [path for path in PACKAGE.iterdir() if path.name != '__pycache__']
    assert len(entries) <= MAX_ENTRIES, sorted(path.name for path in entries)


def repeated_classes(texts):
    # A class that extends one of the same name (`class Config(schema.Config)`) has the same meaning.
    found = [re.findall(r'^class ([A-Z]\w*)(?!\w|\(\w+\.\1\))', text, re.MULTILINE) for text in texts]
    names = Counter(itertools.chain.from_iterable(found))
    return sorted(name for name, count in names.items() if count > 1)


def test_a_class_name_has_one_meaning():
    assert repeated_classes(path.read_text() for path in FILES) == []
    assert repeated_classes(['class Same:', 'class Same(other.Same):']) == []
    assert repeated_classes(['class Same:', 'class Same(Other):', 'class _Own:', 'class _Own:']) == ['Same']


def nameless(paths):
    return [path for path in paths if NAMELESS & {*path.parts[:-1], path.stem}]


def test_no_file_has_a_generic_name():
    assert nameless(path.relative_to(ROOT) for path in FILES) == []
    planted = [Path('maxlm/utils.py'), Path('maxlm/data/common.py'), Path('maxlm/misc/x.py'), Path('maxlm/commons.py')]
    assert nameless(planted) == planted[:3]


def test_the_tests_mirror_the_package():
    packages = {path.parent.relative_to(PACKAGE) for path in FILES if path.stem == '__init__'}
    tests = {path.parent.relative_to(ROOT / 'tests') for path in (ROOT / 'tests').rglob('test_*.py')}
    assert {path for path in tests if path.parts[:1] not in OTHER_TESTS} <= packages


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


def test_no_module_imports_tensorflow_or_torch():
    modules = [f'maxlm.{name}' for name in MODULES]
    assert 'maxlm.cli.runs.train' in modules
    # Negative control in the same process: imports are detected.
    assert heavy_imports(modules, (*HEAVY, 'jax')) == ['jax']


def test_processes_of_grammars_do_not_import_jax():
    # Each grammar in use has a process.
    assert heavy_imports(['maxlm.inference.engine.grammar_worker'], (*HEAVY, 'jax')) == []


def test_each_check_of_the_doctor_exists():
    from maxlm.diagnostics.checks.all_checks import CHECKS

    for check in CHECKS:
        module, _, function = check.function_path.partition(':')
        assert callable(getattr(importlib.import_module(f'maxlm.diagnostics.checks.{module}'), function))
