import numpy as np
import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult, drop_if
from maxlm.data.filters.registry import FILTERS, make_cleaner
from maxlm.errors import InputError

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
        (['?'], "filter '?' does not exist; use one of gopher_quality, gopher_repetition, c4, fineweb, code"),
        (['c4', 'code', 'c4'], "filter 'c4' is given twice; give it once"),
    ],
)
def test_invalid_names_are_rejected(names, message):
    with pytest.raises(InputError) as info:
        make_cleaner(names)
    assert str(info.value) == message


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
