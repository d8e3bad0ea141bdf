"""The programs of docs/python.md and the doctests of the API run."""

import doctest
import importlib
import re

import pytest

import maxlm
from tests.cli.runs.test_train import SMALL
from tests.conftest import ROOT

MODULES = sorted({*maxlm._EXPORTS.values()})
# The samples need a longer context than other tests.
SMALLER = {**SMALL, 'data.seq_len': 96, 'train.num_steps': 4, 'eval.interval': 4}
PAGE = (ROOT / 'docs/python.md').read_text()


def programs(page):
    return re.findall(r'^```python\n(.*?)^```', page, re.MULTILINE | re.DOTALL)


def test_the_documented_programs_run(dataset, tmp_path, monkeypatch, capsys):
    """One after another, as a reader would, with the real data set in place of data/mine and a smaller model."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'data').mkdir()
    (tmp_path / 'data/mine').symlink_to(dataset)
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts/a.txt').write_text('A text.\n' * 50)
    (tmp_path / 'texts/b.txt').write_text('Another text.\n' * 50)
    original = maxlm.Config.get.__func__

    def get(cls, name, overrides=None):
        given = {key: value for key, value in (overrides or {}).items() if key != 'train.num_tokens'}
        return original(cls, name, {**given, **SMALLER} if name == 'tiny' else given)

    monkeypatch.setattr(maxlm.Config, 'get', classmethod(get))
    assert len(programs(PAGE)) == 7
    assert programs((ROOT / 'README.md').read_text()) == programs(PAGE)[:1]
    namespace = {}
    for program in programs(PAGE):
        exec(program, namespace)
    shown = capsys.readouterr().out
    assert shown.count('finished') >= 1
    assert namespace['run'].outcome == 'finished'
    assert int(namespace['state'].step) == 4
    assert (tmp_path / 'first-hf/model.safetensors').exists()


@pytest.mark.parametrize('module', MODULES)
def test_doctests(module):
    result = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


def test_the_page_lists_all_names():
    table = PAGE[: PAGE.index('## Configs')]
    missing = [name for name in maxlm.__all__ if name != '__version__' and f'`{name}' not in table]
    assert [name for name in missing if f'{name}(' not in table] == []
