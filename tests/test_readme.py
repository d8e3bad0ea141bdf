"""README and docs are true: files are there, commands parse, keys exist."""

import importlib
import re
import shlex

import pytest

from maxlm.config.load import load, split_overrides
from maxlm.errors import ArgumentParser, InputError
from tests.conftest import ROOT

README = (ROOT / 'README.md').read_text()
DOCS = '\n'.join([README, *(path.read_text() for path in sorted((ROOT / 'docs').glob('*.md')))])
BLOCKS = re.findall(r'^```\n(.*?)^```', DOCS, re.MULTILINE | re.DOTALL)


def commands():
    """The commands of the code blocks and of the running text that start with a word of ours."""
    lines = [line for block in BLOCKS for line in block.replace('\\\n', ' ').splitlines()]
    lines += re.findall(r'`((?:python -m|bash|\./launch)[^`]*)`', DOCS)
    return [shlex.split(line, comments=True) for line in lines if re.match(r'(python -m|bash|\./launch)', line)]


class _ParsedError(Exception):
    """Ends a verb after its command line was read."""


def test_commands_parse(monkeypatch):
    def parse_only(self, argv):
        original(self, argv)
        raise _ParsedError

    original = ArgumentParser.parse_args
    monkeypatch.setattr(ArgumentParser, 'parse_args', parse_only)
    monkeypatch.chdir(ROOT)
    seen = set()
    for words in commands():
        if words[0] in ('bash', './launch/demo.sh', './launch/test.sh'):
            assert (ROOT / words[-1]).is_file(), words
            continue
        module = words[2]
        if module in ('maxlm.VERB',) or any(word.endswith('…') for word in words[3:]):
            continue
        seen.add(module)
        argv = words[3:]
        imported = importlib.import_module(module)
        if hasattr(imported, '__path__'):
            # What `python -m` runs of a package.
            imported = importlib.import_module(f'{module}.__main__')
        with pytest.raises(_ParsedError):
            imported.main(argv)
        overrides, rest = split_overrides(argv)
        configs = [word.removeprefix('--config=') for word in rest if word.startswith('--config=')]
        for config in configs:
            # The config.json of a run is what earlier commands of the README make.
            load('configs/tiny.py' if config.endswith('.json') else config, overrides)
    verbs = {'train', 'evaluate', 'generate', 'hf', 'prepare', 'fetch', 'plan', 'checkpoints', 'supervise'}
    verbs |= {'doctor', 'monitor', 'report', 'grpo'}
    assert seen >= {f'maxlm.{verb}' for verb in verbs} | {'benchmarks.step'}
    # Control: an option that is not there does not pass.
    with pytest.raises(InputError, match='temprature'):
        importlib.import_module('maxlm.generate').main(['--checkpoint=x', '--prompt=y', '--temprature=1'])


def test_files_that_are_named_are_there():
    names = set(re.findall(r'\]\(([^)]+)\)', README)) | set(
        re.findall(r'`((?:configs|launch|benchmarks)/[\w./]+)`', README)
    )
    assert len(names) >= 5
    missing = {name for name in names if not (ROOT / name).exists()}
    assert missing == set()
    tree = next(block for block in BLOCKS if block.startswith('configs/'))
    for folder in re.findall(r'^  (\w+)/', tree, re.MULTILINE):
        assert (ROOT / 'maxlm' / folder).is_dir(), folder
    # Every room of the package stands in the tree.
    rooms = {path.name for path in (ROOT / 'maxlm').iterdir() if path.is_dir() and path.name != '__pycache__'}
    assert rooms == set(re.findall(r'^  (\w+)/', tree, re.MULTILINE))


def exists(key):
    try:
        load(str(ROOT / 'configs/tiny.py'), [f'{key}=§'])
    except InputError as error:
        return 'does not exist' not in str(error)
    # A key for text takes any.
    return True


def test_keys_that_are_named_exist():
    named = set(re.findall(r'`((?:model|data|train|eval|optimizer|mesh|checkpoint)\.(?!safetensors)[a-z_]+)`', DOCS))
    assert len(named) >= 5
    assert {key for key in named if not exists(key)} == set()
    assert not exists('train.epochs')
