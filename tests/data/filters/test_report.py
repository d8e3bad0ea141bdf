import numpy as np
import pytest

from maxlm.data.documents.document import Document
from maxlm.data.filters.base import FilterResult
from maxlm.data.filters.report import MAX_EXCERPT, NEAR_DUPLICATE, CleaningReport


def removal(number):
    return FilterResult(f'filter: rule {number % 3}', f'{number}; bound 3')


def documents(num):
    """Returns documents of which every fifth is kept and every tenth is trimmed."""
    for number in range(num):
        document = Document(f'{number:03}.txt', 'in', f'text é {number}')
        if number % 5:
            yield document, removal(number)
        else:
            yield document, document if number % 10 else Document(document.name, 'in', 'text')


def report_of(pairs):
    report = CleaningReport()
    for document, result in pairs:
        report.count(document, result)
    return report


def test_counts_and_examples():
    report = report_of(documents(20))
    assert (report.documents, report.kept_documents, report.shortened_documents) == (20, 4, 2)
    # `text é 0` has 9 bytes of UTF-8; from number 10 on, texts have 10 bytes.
    assert (report.bytes, report.kept_bytes) == (10 * 9 + 10 * 10, 4 + 9 + 4 + 10)
    assert sum(removed.documents for removed in report.removed.values()) == 16
    first = report.removed['filter: rule 1']
    assert (first.documents, first.bytes) == (6, 9 * 3 + 10 * 3)
    assert [example.name for example in first.examples] == ['001.txt', '004.txt', '007.txt']
    assert first.examples[0].excerpt == 'text é 1'
    assert first.examples[0].detail == '1; bound 3'


@pytest.mark.parametrize('cuts', [(0, 0), (1, 2), (4, 17), (10, 30), (29, 30)])
def test_partial_reports_merge_in_any_grouping(cuts):
    pairs = list(documents(30))
    complete = report_of(pairs)
    a, b, c = (report_of(pairs[start:stop]) for start, stop in zip((0, *cuts), (*cuts, 30), strict=True))
    assert a.merge(b).merge(c) == a.merge(b.merge(c)) == complete
    assert a.merge(b).merge(c).to_json() == complete.to_json()
    assert CleaningReport().merge(complete) == complete == complete.merge(CleaningReport())
    assert complete == report_of(pairs), 'merging must not change its arguments'


def test_examples_are_the_first_in_the_order_of_the_parts():
    pairs = list(documents(30))
    front, back = report_of(pairs[:15]), report_of(pairs[15:])
    assert front.merge(back) != back.merge(front)


def test_json_round_trip():
    report = report_of(documents(20))
    assert CleaningReport.from_json(report.to_json()) == report
    assert CleaningReport.from_json(report.to_json()) != report_of(documents(21))
    with pytest.raises((KeyError, TypeError, ValueError)):
        CleaningReport.from_json('{"documents": 3}')


def test_excerpts_are_one_short_line():
    report = CleaningReport()
    report.count(Document('x', 'in', ' \n' * 5000 + 'a \n b\t' + 'c' * 500), FilterResult('f: r', 'd\n' * 500))
    report.count(Document('y', 'in', tokens=np.arange(1000, dtype=np.uint32)), FilterResult('f: r', ''))
    text, tokens = report.removed['f: r'].examples
    assert text.excerpt.startswith('a b ccc')
    assert text.excerpt.endswith('c…')
    assert tokens.excerpt.startswith('1,000 tokens: 0 1 2 3')
    assert [len(text.excerpt), len(tokens.excerpt), len(text.detail)] == [MAX_EXCERPT] * 3
    assert '\n' not in text.detail
    assert report.bytes == report.removed['f: r'].bytes == 10_000 + 506 + 4000


def test_lines_for_the_console():
    report = report_of(documents(20))
    report.count(Document('copy.txt', 'in', 'text é 1'), FilterResult(NEAR_DUPLICATE, '001.txt'))
    assert report.to_lines() == [
        'cleaning: 4 of 21 documents kept, 27 of 199 bytes; 2 of the kept documents are shortened',
        '  filter: rule 1          6  28.6%  001.txt (1; bound 3)',
        '  filter: rule 0          5  23.8%  003.txt (3; bound 3)',
        '  filter: rule 2          5  23.8%  002.txt (2; bound 3)',
        '  duplicate: near         1   4.8%  copy.txt (001.txt)',
    ]
    assert CleaningReport().to_lines() == ['cleaning: 0 of 0 documents kept, 0 of 0 bytes']
