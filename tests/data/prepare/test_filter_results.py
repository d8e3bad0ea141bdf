from __future__ import annotations

import numpy as np
import pytest

from maxlm.data.documents.document import Document
from maxlm.data.prepare.filter_results import DocumentFilter, DocumentHash, FilterDecision, FilterDecisions
from maxlm.errors import InputError


def document(name, text='Five words are in here.'):
    return Document(name, 's', text)


DOCUMENTS = [document(name) for name in 'abcde'] + [document('f', 'no end here\n' + 'This one line has an end.\n' * 6)]
CODES = [
    FilterDecision.KEPT,
    FilterDecision.FILTERED,
    FilterDecision.EXACT_DUPLICATE,
    FilterDecision.NEAR_DUPLICATE,
    FilterDecision.KEPT,
    FilterDecision.SHORTENED,
]


def verdicts_on(documents, codes):
    checksum = DocumentHash()
    for one in documents:
        checksum.add(one)
    array = np.array(codes, np.uint8)
    return FilterDecisions(array, checksum.value(), array == FilterDecision.SHORTENED, {2: 'a'})


def test_what_is_kept_goes_through():
    sieve = DocumentFilter('group', verdicts_on(DOCUMENTS, CODES), ('c4',))
    # The result does not depend on the batching of documents.
    kept = [*sieve.keep(DOCUMENTS[:3]), *sieve.keep(DOCUMENTS[3:])]
    sieve.finish()
    assert [one.name for one in kept] == ['a', 'e', 'f']
    assert kept[0] is DOCUMENTS[0]
    assert kept[2].text == '\n'.join(['This one line has an end.'] * 6)
    report = sieve.duplicates
    assert (report.documents, report.kept_documents) == (2, 0)
    assert report.removed['duplicate: exact'].examples[0].detail == 'a'
    assert report.removed['duplicate: near'].documents == 1


def test_without_verdicts_all_goes_through():
    sieve = DocumentFilter('group', None, ())
    assert sieve.keep(DOCUMENTS) == DOCUMENTS
    sieve.finish()


@pytest.mark.parametrize(
    'other',
    [
        DOCUMENTS[:-1],
        [*DOCUMENTS, document('g')],
        [document('x'), *DOCUMENTS[1:]],
        [document('a', 'longer than it was'), *DOCUMENTS[1:]],
        [*DOCUMENTS[:-1], document('f', 'Shorter.')],
    ],
)
def test_other_documents_are_noticed(other):
    sieve = DocumentFilter('x.txt', verdicts_on(DOCUMENTS, CODES), ('c4',))

    def all_of_it():
        sieve.keep(other)
        sieve.finish()

    with pytest.raises(InputError, match=r'x\.txt: changed while'):
        all_of_it()


def test_verdicts_are_written(tmp_path):
    verdicts = verdicts_on(DOCUMENTS, CODES)
    verdicts.save(tmp_path / 'v.json', 'mine')
    loaded = FilterDecisions.load(tmp_path / 'v.json', 'mine')
    assert loaded is not None
    assert (loaded.codes.tolist(), loaded.checksum, loaded.kept_names) == (CODES, verdicts.checksum, {2: 'a'})
    assert loaded.shortened.tolist() == [False] * 5 + [True]
    assert FilterDecisions.load(tmp_path / 'v.json', 'other') is None
    assert FilterDecisions.load(tmp_path / 'missing.json', 'mine') is None
    (tmp_path / 'v.json').write_text('{"identity": "mine"}')
    assert FilterDecisions.load(tmp_path / 'v.json', 'mine') is None


def test_tokens_are_counted_too():
    def of(tokens):
        checksum = DocumentHash()
        checksum.add(Document('n', 's', tokens=np.array(tokens, np.uint32)))
        return checksum.value()

    assert of([1, 2]) == of([3, 4]) != of([1, 2, 3])
