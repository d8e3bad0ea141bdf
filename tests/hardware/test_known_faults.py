"""Tests which versions of libraries have known faults."""

import pytest

from maxlm.hardware.known_faults import EMPTY_DOCUMENTS, FAULTS, Libraries, describe, installed_libraries, known_faults

EAGER, CONCATENATIONS = FAULTS


@pytest.mark.parametrize(
    ('libraries', 'expected'),
    [
        (Libraries((0, 10, 2), 12, (9, 25, 0)), [CONCATENATIONS]),
        (Libraries((0, 10, 2), 13, (9, 24, 9)), [CONCATENATIONS, EMPTY_DOCUMENTS]),
        (Libraries((0, 11, 0), 13, (9, 26)), [EAGER, CONCATENATIONS]),
        (Libraries((0, 11, 1), 13, (9, 26)), [EAGER]),
        (Libraries((0, 11, 1), 12, ()), []),
        (Libraries((0, 11, 2), 13, (10, 0)), []),
    ],
)
def test_faults_of_versions(libraries, expected):
    assert known_faults(libraries, has_document_lists=True) == expected
    without = [fault for fault in expected if fault is not EMPTY_DOCUMENTS]
    assert known_faults(libraries, has_document_lists=False) == without


def test_every_fault_names_its_source_and_a_remedy():
    for fault in (*FAULTS, EMPTY_DOCUMENTS):
        assert fault.source.startswith('https://github.com/')
        assert describe(fault).endswith(f'; {fault.remedy}')


def test_installed_versions(monkeypatch):
    # The tests run without a GPU.
    found = installed_libraries('9.25.1')
    assert found.jaxlib >= (0, 10)
    assert found == (found.jaxlib, 0, (9, 25, 1))
    monkeypatch.setattr('importlib.metadata.version', lambda name: {'jaxlib': '0.11.0.dev2'}.get(name, '0.11.1'))
    assert installed_libraries('') == ((0, 11, 0), 13, ())
