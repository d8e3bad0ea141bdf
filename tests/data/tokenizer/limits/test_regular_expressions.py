"""Tests that slow regular expressions are rejected in bounded time, and that fast ones are not."""

import pytest

from maxlm.data.tokenizer.limits import regular_expressions
from maxlm.data.tokenizer.limits.regular_expressions import apply_regex, check_regex
from maxlm.errors import InputError
from maxlm.sandbox.limited_process import ProcessLimits

SLOW = [
    '(a+)+b',
    '(a|a)*b',
    'a*a*a*a*b',
    '(x+x+)+y',
    '([a-zA-Z]+)*$',
    r'(\w+\s?)*$',
    r'(\p{L}+)+\d',
    r'^(\d+)*$',
    '((a{1,1000}){1,1000}){1,1000}b',
    '((((a*)*)*)*)*b',
    '(0|00)+x',
    r'(\h+)+g',
    '(q+)+r|.',
    '(.+)+\0',
    r'(?:\x{4E8C}|\x{4E8C}\x{4E8C})+X',
    r'(?:\u03c3|\u03c3\u03c3)+X',
    r'(?:\x42|\x42\x42)+\x21',
]
FAST = [
    r'\p{N}{1,3}',
    r'[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+',
    ' {2,}',
    r' ?[^(\s|[.,!?…。，、।۔،])]+',
    r'(?:\r?\n)+',
    '',
    '|'.join(f'a{i}' for i in range(2500)),
]


@pytest.mark.parametrize('regex', SLOW)
def test_slow_expressions_are_rejected(regex):
    with pytest.raises(InputError, match='its regular expression') as info:
        check_regex(regex)
    assert '\n' not in str(info.value)


@pytest.mark.parametrize('regex', FAST)
def test_fast_expressions_are_accepted(regex):
    check_regex(regex)


def test_expressions_beyond_the_limit_of_time_are_rejected(monkeypatch):
    regex = r'(?=(\d{3})+(?!\d))(?#other)'
    monkeypatch.setattr(regular_expressions, '_LIMITS', ProcessLimits(cpu_seconds=0.02))
    with pytest.raises(InputError, match=r'takes more than 0\.02 s of CPU time; use another tokenizer'):
        check_regex(regex)
    monkeypatch.undo()
    # Errors are not cached.
    check_regex(regex)


def test_known_expressions_start_no_process(monkeypatch):
    llama = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r'\s*[\r\n]+|\s+(?!\S)|\s+'
    )
    monkeypatch.setattr(regular_expressions, 'limited_process', None)
    check_regex(llama)
    assert apply_regex(llama.encode()) == b''
    # Control: other expressions are applied in a process.
    with pytest.raises(TypeError):
        check_regex(llama + ' ')
