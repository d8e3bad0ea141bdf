import numpy as np
import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult, drop_if
from maxlm.data.filters.filters_by_name import FILTERS, describe_filters, make_cleaner
from maxlm.errors import InputError
from tests.user_modules import write_module

PAGE = """\
The river rises in the hills to the north of the town and runs to the sea.
Its water is clear in spring, when the snow in the hills has gone.
Mills were built along its banks in the last century, and two of them still work.
Visitors who have an hour to spare can walk from the bridge to the old harbour.
"Nobody should be in a hurry here," said one of the millers whom we asked."""


def document(text, name='x.txt'):
    return Document(name, 'in', text, metadata={'language': 'en'})


def test_a_good_page_passes_all_filters_unchanged():
    good = document(PAGE)
    assert make_cleaner(list(FILTERS))(good) is good


def test_each_filter_gets_the_output_of_the_previous_filter():
    menu = '\n'.join(f'Menu {number}' for number in range(100))
    sentences = 'This line is a sentence.\nThat one is a sentence too.\nHere is one more of them.'
    page = document(f'{sentences}\n{menu}')
    assert make_cleaner(['fineweb'])(page) == FilterResult('fineweb: ended lines', '0.029; bound 0.12')
    assert make_cleaner(['c4'])(page) == document(sentences)
    assert make_cleaner(['c4', 'fineweb'])(page) == FilterResult('fineweb: short lines', '1; bound 0.67')
    assert make_cleaner(['fineweb', 'c4'])(page) == make_cleaner(['fineweb'])(page)


def test_no_filter_keeps_everything():
    for kept in (document(''), Document('x', 'in', tokens=np.array([1], np.uint32))):
        assert make_cleaner([])(kept) is kept


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        (['gopher_qualty'], "filter 'gopher_qualty' does not exist; did you mean 'gopher_quality'?"),
        (
            ['?'],
            "filter '?' does not exist; use package.module:function, decontaminate:PATH or one of gopher_quality, "
            'gopher_repetition, c4, fineweb, code',
        ),
        (['c4', 'code', 'c4'], "filter 'c4' is given twice; give it once"),
    ],
)
def test_invalid_names_are_rejected(names, message):
    with pytest.raises(InputError) as info:
        make_cleaner(names)
    assert str(info.value) == message


def test_a_filter_of_the_user_receives_text_and_metadata(tmp_path, monkeypatch):
    body = 'def keep(document):\n    return document.metadata["language"] == "en" and "river" in document.text'
    name = f'{write_module(tmp_path, monkeypatch, body)}:keep'
    good = document(PAGE)
    clean = make_cleaner(['c4', name])
    assert clean(good) is good
    assert clean(document(PAGE.replace('river', 'road'))) == FilterResult(f'{name}: removed', 'returned False')


@pytest.mark.parametrize(
    ('body', 'message'),
    [
        ('return document.title', "raised AttributeError: 'Document' object has no attribute 'title' at .*py:2; fix"),
        ('pass', "must return True or False; it returned 'None'"),
        ('return 1', "must return True or False; it returned '1'"),
    ],
)
def test_a_failing_filter_of_the_user_names_the_document(tmp_path, monkeypatch, body, message):
    name = f'{write_module(tmp_path, monkeypatch, f"def keep(document):{chr(10)}    {body}")}:keep'
    with pytest.raises(InputError, match=rf'^x\.txt: the filter {name} {message}'):
        make_cleaner([name])(document(PAGE))


def test_the_description_contains_a_checksum_of_the_module(tmp_path, monkeypatch):
    name = write_module(tmp_path, monkeypatch, 'def keep(document):\n    return True')
    make_cleaner([f'{name}:keep'])
    before = describe_filters(['c4', f'{name}:keep'])
    assert before[0] == 'c4'
    assert before[1].startswith(f'{name}:keep with checksum ')
    (tmp_path / f'{name}.py').write_text('def keep(document):\n    return False')
    assert describe_filters(['c4', f'{name}:keep'])[1] != before[1]


def test_tokens_cannot_be_filtered():
    with pytest.raises(InputError, match=r'x\.bin:3 is already tokenized: c4, code can filter only text'):
        make_cleaner(['c4', 'code'])(Document('x.bin:3', 'in', tokens=np.array([1], np.uint32)))


@pytest.mark.parametrize(
    ('value', 'bound', 'detail'),
    [(49, 50, '49; bound 50'), (100_001, 100_000, '100,001; bound 100,000'), (2.98765, 3, '2.988; bound 3')],
)
def test_a_removal_reports_the_value_and_the_bound(value, bound, detail):
    assert drop_if(True, 'f: r', value, bound) == FilterResult('f: r', detail)
    assert drop_if(False, 'f: r', value, bound) is None
