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


def decisions_for(documents, codes):
    checksum = DocumentHash()
    for entry in documents:
        checksum.add(entry)
    array = np.array(codes, np.uint8)
    return FilterDecisions(array, checksum.value(), array == FilterDecision.SHORTENED, {2: 'a'})


def test_kept_documents_pass():
    document_filter = DocumentFilter('group', decisions_for(DOCUMENTS, CODES), ('c4',))
    # The result does not depend on the batching of documents.
    kept = [*document_filter.keep(DOCUMENTS[:3]), *document_filter.keep(DOCUMENTS[3:])]
    document_filter.finish()
    assert [entry.name for entry in kept] == ['a', 'e', 'f']
    assert kept[0] is DOCUMENTS[0]
    assert kept[2].text == '\n'.join(['This one line has an end.'] * 6)
    report = document_filter.duplicates
    assert (report.documents, report.kept_documents) == (2, 0)
    assert report.removed['duplicate: exact'].examples[0].detail == 'a'
    assert report.removed['duplicate: near'].documents == 1


def test_without_decisions_all_documents_pass():
    document_filter = DocumentFilter('group', None, ())
    assert document_filter.keep(DOCUMENTS) == DOCUMENTS
    document_filter.finish()


@pytest.mark.parametrize(
    'documents',
    [
        DOCUMENTS[:-1],
        [*DOCUMENTS, document('g')],
        [document('x'), *DOCUMENTS[1:]],
        [document('a', 'longer than it was'), *DOCUMENTS[1:]],
        [*DOCUMENTS[:-1], document('f', 'Shorter.')],
    ],
)
def test_changed_documents_are_detected(documents):
    document_filter = DocumentFilter('x.txt', decisions_for(DOCUMENTS, CODES), ('c4',))

    def filter_all():
        document_filter.keep(documents)
        document_filter.finish()

    with pytest.raises(InputError, match=r'x\.txt: changed while'):
        filter_all()


def test_decisions_are_saved_and_loaded(tmp_path):
    decisions = decisions_for(DOCUMENTS, CODES)
    decisions.save(tmp_path / 'decisions.json', 'mine')
    loaded = FilterDecisions.load(tmp_path / 'decisions.json', 'mine')
    assert loaded is not None
    assert (loaded.codes.tolist(), loaded.checksum, loaded.kept_names) == (CODES, decisions.checksum, {2: 'a'})
    assert loaded.shortened.tolist() == [False] * 5 + [True]
    assert FilterDecisions.load(tmp_path / 'decisions.json', 'other') is None
    assert FilterDecisions.load(tmp_path / 'missing.json', 'mine') is None
    (tmp_path / 'decisions.json').write_text('{"identity": "mine"}')
    assert FilterDecisions.load(tmp_path / 'decisions.json', 'mine') is None


def test_the_checksum_depends_on_the_number_of_tokens():
    def checksum_of(tokens):
        checksum = DocumentHash()
        checksum.add(Document('n', 's', tokens=np.array(tokens, np.uint32)))
        return checksum.value()

    assert checksum_of([1, 2]) == checksum_of([3, 4]) != checksum_of([1, 2, 3])
