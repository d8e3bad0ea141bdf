"""Tests the check of the English of docstrings, comments and pages."""

import ast

import pytest

from tools.check_prose import MAX_WORDS, errors_without_remedy, findings, main

LONG = ' '.join(['word'] * (MAX_WORDS + 1))


@pytest.mark.parametrize(
    ('name', 'text', 'line'),
    [
        ('a.py', '"""Whether it runs."""\n', 1),
        ('a.py', 'x = 1\n# The judge of it.\n', 2),
        ('a.py', f'def f():\n    """Returns.\n\n    {LONG}.\n    """\n', 2),
        # A comment of several lines is one text.
        ('a.py', f'x = 1  # {LONG[:20]}\n# {LONG[:20]}\n# {LONG[20:]}\n', 2),
        ('a.md', '# Title\n\nIt is told here.\n', 3),
    ],
)
def test_findings_have_their_line(tmp_path, name, text, line):
    path = tmp_path / name
    path.write_text(text)
    (found,) = findings(path)
    assert found.startswith(f'{path}:{line}: ')
    assert main([str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ('name', 'text'),
    [
        ('a.py', '"""Returns what `told` holds.\n\nAn example:\n\n    told = 1\n"""\nlife = "told"\n'),
        ('a.py', f'x = 1  # {LONG[:20]}\n# {LONG[21:]}\n\n# {LONG[:20]}\n'),
        ('a.md', f'```\ntold\n```\n| told |\n\nOne. {LONG[: 5 * MAX_WORDS - 1]}. Two.\n'),
    ],
)
def test_code_and_short_sentences_pass(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path)]) == 0


@pytest.mark.parametrize(
    'statement',
    [
        "raise InputError(f'{path}: not found')",
        "raise ValueError('x=1 runs out of the range of one set')",
        "raise InputError('both are set; the file is in use')",
        "raise InputError(f'{path}: {os_message(error)}')",
        "raise InputError('damaged' if path else 'empty')",
        # The error of a library need not have a remedy, and a remark in parentheses is only a detail.
        "try:\n    f()\nexcept OSError as error:\n    raise InputError(f'{path}: {error}')",
        "try:\n    f()\nexcept ValueError as error:\n    raise InputError(f'not JSON ({error})')",
        "try:\n    f()\nexcept (InputError, OSError) as error:\n    raise InputError(f'{path}: {error}')",
    ],
)
def test_errors_without_remedy(tmp_path, statement):
    path = tmp_path / 'maxlm' / 'a.py'
    path.parent.mkdir()
    path.write_text(statement)
    (found,) = findings(path)
    assert found.startswith(f'{path}:{statement.count(chr(10)) + 1}: the error ')
    # Only the package has messages for users.
    other = tmp_path / 'a.py'
    other.write_text(statement)
    assert not list(findings(other))


@pytest.mark.parametrize(
    'statement',
    [
        "raise InputError(f'{path}: not found; choose another path')",
        "raise InputError(f'x={x}: must be at least 1')",
        "raise InputError(f'no split {split}; available: {splits}')",
        "raise InputError(f'{key} does not exist; {nearest(key, keys)}')",
        "raise InputError('x is set, or remove it' if x else 'y is missing')",
        # Composed elsewhere.
        'raise InputError(message)',
        # Not for users.
        "raise RuntimeError('broken')",
        "try:\n    f()\nexcept (InputError, ValueError) as error:\n    raise InputError(f'{path}: {error}')",
    ],
)
def test_errors_with_remedy(statement):
    assert not list(errors_without_remedy(ast.parse(statement)))
