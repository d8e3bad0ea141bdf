"""Tests that several findings of a check are merged into one result."""

import pytest

from maxlm.diagnostics.result import CheckStatus, combine, failure, ok, skipped, warning


def test_the_worst_comes_first_and_decides():
    found = combine([ok('fine'), warning('odd', 'mend it'), failure('broken', 'replace it'), skipped('unknown')])
    assert (found.status, found.message, found.remedy) == (CheckStatus.FAILURE, 'broken; odd', 'replace it; mend it')


def test_good_ones_are_told_if_all_are():
    assert combine([ok('a'), ok('b')]) == ok('a; b')


def test_the_same_remedy_is_told_once():
    assert combine([warning('a', 'mend it'), warning('b', 'mend it')]).remedy == 'mend it'


def test_nothing_is_no_finding():
    with pytest.raises(ValueError, match='at least one result'):
        combine([])
