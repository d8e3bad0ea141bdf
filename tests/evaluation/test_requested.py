"""Tests the parsing of `--tasks`."""

import pytest

from maxlm.errors import InputError
from maxlm.evaluation.tasks.runner import ParsedTasks, parse_tasks


@pytest.mark.parametrize(
    ('text', 'found'),
    [
        ('arc_easy', ParsedTasks(('arc_easy',), (), False)),
        ('needle', ParsedTasks((), (), True)),
        ('a, b.yaml ,a', ParsedTasks(('a', 'b.yaml'), (), False)),
        (
            'humaneval:x.jsonl,mbpp:y/z.jsonl.gz',
            ParsedTasks((), (('humaneval', 'x.jsonl'), ('mbpp', 'y/z.jsonl.gz')), False),
        ),
        ('core:data/bundle,needle,a', ParsedTasks(('a',), (), True, 'data/bundle')),
        ('questions:a.jsonl,questions:b.jsonl', ParsedTasks((), (), False, questions=('a.jsonl', 'b.jsonl'))),
        # Without a file, the name refers to lm-eval's task.
        ('humaneval,needle', ParsedTasks(('humaneval',), (), True)),
    ],
)
def test_parts(text, found):
    assert parse_tasks(text) == found


@pytest.mark.parametrize('text', [',', 'a,', ' '])
def test_empty_parts(text):
    with pytest.raises(InputError, match='must be comma-separated names'):
        parse_tasks(text)


@pytest.mark.parametrize('text', ['core:a,core:b', 'core:'])
def test_a_single_bundle_is_required(text):
    with pytest.raises(InputError, match=f'--tasks={text}: give the directory or the URL of one bundle, core:BUNDLE'):
        parse_tasks(text)
    assert parse_tasks('core:a,core:a').core == 'a'
