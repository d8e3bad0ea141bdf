"""Documents with phrases of evaluation texts are removed; others are kept."""

import json

import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult
from maxlm.data.filters.decontaminate import decontaminate
from maxlm.data.filters.filters_by_name import describe_filters, make_cleaner
from maxlm.errors import InputError
from tests.evaluation.core_bundles import write_bundle

LONG = 'a train leaves the city of Bonn at noon and arrives in Rome after nine hours of travel'
WORDS = LONG.split()
SHORT = 'The capital of France on the Seine is Paris'


@pytest.fixture
def path(tmp_path):
    lines = [{'question': LONG, 'answers': [{'text': SHORT}, 'Rome']}, {'n': 3}]
    (tmp_path / 'texts').mkdir()
    (tmp_path / 'texts/a.jsonl').write_text('\n'.join(map(json.dumps, lines)))
    (tmp_path / 'texts/b.txt').write_text('one two three\n\nfour five six seven eight nine ten eleven\n')
    return tmp_path / 'texts'


def result(path, text):
    return decontaminate(f'decontaminate:{path}')(Document('x', '', text))


def test_documents_with_phrases_are_removed(path):
    phrase = ' '.join(WORDS[3:16])
    for text in (phrase, phrase.upper().replace(' ', ',\n'), f'We said: {phrase}! And left.', f'x {SHORT} y'):
        removed = result(path, text)
        assert isinstance(removed, FilterResult)
    assert removed.reason == 'decontaminate: 9 words of an evaluation text'
    assert removed.detail == SHORT.lower()
    assert isinstance(result(path, 'four five six, seven eight nine ten eleven twelve'), FilterResult)


def test_other_documents_are_kept(path):
    others = [
        '',
        ' '.join(WORDS[3:15]),
        ' '.join(reversed(WORDS)),
        SHORT.removesuffix(' Paris'),
        'one two three',
        # The words of a phrase, with one more between them.
        ' '.join([*WORDS[:8], 'not', *WORDS[8:]]),
    ]
    for text in others:
        assert result(path, text) == Document('x', '', text)


def test_the_examples_of_a_bundle_are_found(tmp_path):
    bundle = write_bundle(tmp_path / 'bundle')
    file = bundle / 'eval_data/part/choice.jsonl'
    # The separator U+2028 is text within JSON.
    row = {'query': f'Read.\u2028{LONG}', 'choices': [SHORT, 'Rome'], 'gold': 0}
    file.write_text(f'{file.read_text()}\n{json.dumps(row, ensure_ascii=False)}')
    for text in (' '.join(WORDS[2:15]), SHORT):
        assert isinstance(result(bundle, f'We said: {text}.'), FilterResult)
    # Control: the labels of tasks and their random baselines are not evaluation texts.
    assert isinstance(result(bundle, (bundle / 'core.yaml').read_text()), Document)


def test_the_description_depends_on_the_texts(path):
    name = f'decontaminate:{path}'
    before = describe_filters([name])
    assert str(path) not in before[0]
    assert make_cleaner(['gopher_quality', name])
    (path / 'b.txt').write_text('changed')
    assert describe_filters([name]) != before


@pytest.mark.parametrize(
    ('content', 'words'),
    [(None, 'No such file'), ('{', 'a.jsonl'), ('{"x": "too short"}', 'no text has 8 words'), (b'\xff', 'UTF-8')],
)
def test_bad_texts_are_named(tmp_path, content, words):
    file = tmp_path / 'a.jsonl'
    if content is not None:
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(InputError, match=words):
        decontaminate(f'decontaminate:{file}')


def test_other_paths_are_rejected(path, tmp_path):
    (tmp_path / 'empty').mkdir()
    for name, words in (
        ('gs://bucket/texts.jsonl', 'gs://bucket/texts.jsonl.*give a local file'),
        (f'{tmp_path}/a.parquet', 'must be a .jsonl'),
        (f'{tmp_path}/empty', 'the directory has no .jsonl'),
    ):
        with pytest.raises(InputError, match=words):
            decontaminate(f'decontaminate:{name}')
    assert decontaminate(f'decontaminate:file://{path}')
