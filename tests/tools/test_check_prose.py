"""Tests the check of the English of docstrings, comments and pages."""

import pytest

from tools.check_prose import MAX_WORDS, findings, main

LONG = ' '.join(['word'] * (MAX_WORDS + 1))


@pytest.mark.parametrize(
    ('name', 'text', 'line'),
    [
        ('a.py', '"""Whether it runs."""\n', 1),
        ('a.py', 'x = 1\n# The judge of it.\n', 2),
        ('a.py', f'def f():\n    """Returns.\n\n    {LONG}.\n    """\n', 2),
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
        ('a.md', f'```\ntold\n```\n| told |\n\nOne. {LONG[: 5 * MAX_WORDS - 1]}. Two.\n'),
    ],
)
def test_code_and_short_sentences_pass(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    assert main([str(tmp_path)]) == 0
