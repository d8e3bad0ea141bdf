"""Several findings of one check become one."""

import pytest

from maxlm.diagnostics.result import CheckStatus, failure, ok, skipped, together, warning


def test_the_worst_comes_first_and_decides():
    found = together([ok('fine'), warning('odd', 'mend it'), failure('broken', 'replace it'), skipped('unknown')])
    assert (found.status, found.found, found.remedy) == (CheckStatus.FAILURE, 'broken; odd', 'replace it; mend it')


def test_good_ones_are_told_if_all_are():
    assert together([ok('a'), ok('b')]) == ok('a; b')


def test_the_same_remedy_is_told_once():
    assert together([warning('a', 'mend it'), warning('b', 'mend it')]).remedy == 'mend it'


def test_nothing_is_no_finding():
    with pytest.raises(ValueError, match='found nothing'):
        together([])
