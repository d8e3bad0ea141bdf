"""Tests that several findings of a check are merged into one result."""

import pytest

from maxlm.diagnostics.result import CheckStatus, combine, failure, ok, skipped, warning


def test_the_worst_comes_first_and_decides():
    found = combine([ok('fine'), warning('odd', 'fix it'), failure('broken', 'replace it'), skipped('unknown')])
    assert (found.status, found.message, found.remedy) == (CheckStatus.FAILURE, 'broken; odd', 'replace it; fix it')


def test_successes_are_reported_if_all_succeed():
    assert combine([ok('a'), ok('b')]) == ok('a; b')


def test_the_same_remedy_is_reported_once():
    assert combine([warning('a', 'fix it'), warning('b', 'fix it')]).remedy == 'fix it'


def test_an_empty_list_is_an_error():
    with pytest.raises(ValueError, match='at least one result'):
        combine([])
