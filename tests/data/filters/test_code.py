import ast
import warnings

import pytest

from maxlm.data.filters.code import GENERATED_MARKERS, code

LINE = 'x = 1'


def test_ordinary_code_is_kept(apply_filter):
    assert apply_filter(code, 'def f(x):\n    """Docs."""\n    return x + 1\n', 'f.py') is None
    assert apply_filter(code, 'int main() { return 0; }\n', 'main.c') is None


@pytest.mark.parametrize(
    ('reason', 'kept', 'removed'),
    [
        ('longest line', '\n'.join(['x' * 1000, *[LINE] * 50]), '\n'.join(['x' * 1001, *[LINE] * 50])),
        ('mean line length', '\n'.join(['x' * 100, 'x' * 99, 'x' * 101]), '\n'.join(['x' * 100, 'x' * 100, 'x' * 101])),
        ('alphanumeric share', 'x---' * 10, 'x---' * 10 + '-'),
        # The limit applies to non-ASCII letters too.
        ('alphanumeric share', 'é———' * 10, 'é———' * 10 + '—'),
    ],
)
def test_each_rule_at_its_bound(apply_filter, reason, kept, removed):
    assert apply_filter(code, kept, 'x.c') is None
    assert apply_filter(code, removed, 'x.c') == f'code: {reason}'


@pytest.mark.parametrize('marker', GENERATED_MARKERS)
def test_generated_code_is_detected_in_the_first_five_lines(apply_filter, marker):
    head = f'// Code: {marker.upper()} by a tool.'
    assert apply_filter(code, f'{LINE}\n{head}\n{LINE}', 'x.c') == 'code: generated'
    assert apply_filter(code, '\n'.join([*[LINE] * 4, head]), 'x.c') == 'code: generated'
    assert apply_filter(code, '\n'.join([*[LINE] * 5, head]), 'x.c') is None


NOT = 'not ' * 200


@pytest.mark.parametrize(
    'text',
    [
        'def f(:',
        "print 'Python 2'",
        'x = 1\n  y = 2',
        # Some versions of the parser raise other errors than SyntaxError.
        'text = "a\0b"',
        'text = "\ud800"',
        'x = (\n' + f'{NOT}\n' * 50 + 'y)',
        '\n'.join(['(' * 500, ')' * 500]),
        '\n'.join(' ' * depth + 'if x:' for depth in range(150)) + '\n' + ' ' * 150 + 'pass',
    ],
)
def test_python_must_parse(apply_filter, text):
    text = 'words = words\n' * 500 + text
    assert apply_filter(code, text, 'x.py') == 'code: Python syntax'
    assert apply_filter(code, text, 'x.c') is None


def test_deeply_nested_python_is_kept(apply_filter):
    # The decision must not depend on the depth of the call stack.
    text = 'x = (\n' + 'one +\n' * 20_000 + 'one)\n'
    with pytest.raises(RecursionError):
        ast.parse(text)
    assert apply_filter(code, text, 'x.py') is None


@pytest.mark.parametrize(
    ('name', 'metadata', 'is_python'),
    [
        ('a/x.py', {}, True),
        ('x.PYI', {}, True),
        ('x.jsonl:7', {}, False),
        ('x.py:7', {}, True),
        ('x.jsonl:7', {'path': 'src/x.py'}, True),
        ('x.jsonl:7', {'max_stars_repo_path': 'src/x.py'}, True),
        ('x.jsonl:7', {'lang': 'Python'}, True),
        ('x.jsonl:7', {'language': 'Java', 'path': 3}, False),
        ('x.c', {}, False),
    ],
)
def test_detection_of_python_files(apply_filter, name, metadata, is_python):
    assert apply_filter(code, 'this is no python\n', name, **metadata) == ('code: Python syntax' if is_python else None)


def test_parsing_raises_no_warnings(apply_filter):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert apply_filter(code, "import re\nx = re.compile('\\d') if x is 'a' else None\n", 'x.py') is None


def test_a_byte_order_mark_is_not_a_syntax_error(apply_filter):
    assert apply_filter(code, '\ufeffx = 1\n', 'x.py') is None
