"""Functions of the user: import from the working directory and errors in one line."""

import sys

import pytest

from maxlm.config.user_function import is_function_name, load_function, module_checksum
from maxlm.errors import InputError
from tests.user_modules import write_module

BODY = """
LIMIT = 3
def score(response, prompt):
    return 1.0
def swapped(response):
    return 1.0
class Scorer:
    def __call__(self, response, prompt):
        return 2.0
scorer = Scorer()
"""


def load(name):
    return load_function(name, kind='reward', arguments=('response', 'prompt'))


def test_a_function_in_the_working_directory_is_imported(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, BODY)
    # The console script does not have the working directory in sys.path.
    monkeypatch.setattr(sys, 'path', [one for one in sys.path if one])
    assert load(f'{name}:score')('x', {}) == 1.0
    assert load(f'{name}:scorer')('x', {}) == 2.0
    assert load('math:pow')(2, 3) == 8
    # Negative control: the directory is searched last.
    assert sys.path[-1] == str(tmp_path)


def test_the_checksum_depends_on_the_file(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, BODY)
    load(f'{name}:score')
    before = module_checksum(f'{name}:score')
    assert len(before) == 64
    (tmp_path / f'{name}.py').write_text(f'{BODY}# edited')
    assert module_checksum(f'{name}:score') != before
    # A module of the interpreter has no file.
    load('_operator:add')
    assert module_checksum('_operator:add') == ''


@pytest.mark.parametrize(
    ('name', 'expected'),
    [
        ('a:b', True),
        ('a.b_2.c:d', True),
        ('a', False),
        ('a.b', False),
        ('a:b.c', False),
        (':b', False),
        ('a/b:c', False),
    ],
)
def test_function_names(name, expected):
    assert is_function_name(name) is expected


@pytest.mark.parametrize(
    ('body', 'attribute', 'message'),
    [
        (BODY, 'scroe', r"\.py has no 'scroe'; did you mean 'score'\?"),
        (BODY, 'zzz', "has no 'zzz'; define it"),
        (BODY, 'LIMIT', "'LIMIT' is a int; it must be a function"),
        (BODY, 'swapped', r'swapped\(response\) must accept the arguments \(response, prompt\)'),
        ('import no_such_module_of_mine', 'f', "imports 'no_such_module_of_mine', which is not installed"),
        ('raise ValueError("two\\nlines")', 'f', r'failed with ValueError: two lines at .*\.py:1; fix the module'),
        ('raise SystemExit(3)', 'f', 'failed with SystemExit: 3'),
        ('def f(:', 'f', 'failed with SyntaxError'),
    ],
)
def test_errors_are_one_line(tmp_path, monkeypatch, body, attribute, message):
    name = write_module(tmp_path, monkeypatch, body)
    with pytest.raises(InputError, match=message) as info:
        load(f'{name}:{attribute}')
    assert str(info.value).startswith(f'reward {name}:{attribute}: ')
    assert '\n' not in str(info.value)


def test_a_missing_module_names_the_searched_places(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for missing in ('no_such_module', 'no_such_package.rewards'):
        with pytest.raises(InputError, match=f"no module '{missing.partition('.')[0]}' in {tmp_path}, PYTHONPATH"):
            load(f'{missing}:f')
