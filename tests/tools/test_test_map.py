"""Tests the map from functions to the tests that execute them."""

import os
import subprocess
import sys

import pytest
from coverage import CoverageData

from tests.conftest import ROOT
from tests.executed_functions import make_map
from tools.affected_tests import selected
from tools.test_map import MODULE, TestMap, content_hash, function_hashes

SOURCE = '''"""Rates."""

LIMIT = 3


def first(x):
    def inner():
        return x

    return inner()


class Rate:
    unit = 's'

    def second(self):
        return LIMIT
'''
FIRST, SECOND = 'tests/test_a.py::test_first', 'tests/test_a.py::test_second[1 2]'


@pytest.fixture
def root(tmp_path):
    for name, text in {'maxlm/rate.py': SOURCE, 'tests/test_a.py': '', 'tests/test_b.py': 'import maxlm.rate'}.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    return tmp_path


@pytest.fixture
def recorded(root):
    executed = {'maxlm/rate.py': {MODULE: [], 'first': [0], 'Rate.second': [1]}}
    hashes = {'maxlm/rate.py': function_hashes(SOURCE)}
    return TestMap([FIRST, SECOND], executed, hashes, {'tests/test_a.py': content_hash(root / 'tests/test_a.py')})


@pytest.mark.parametrize(
    ('before', 'after', 'wanted'),
    [
        ('return x', 'return 2 * x', {FIRST}),
        ('return LIMIT', 'return 4', {SECOND}),
        ('def second(self)', 'def second(self, y=1)', {SECOND}),
        # Constants, attributes and new functions may affect everything in the module.
        ('LIMIT = 3', 'LIMIT = 4', {FIRST, SECOND}),
        ("unit = 's'", "unit = 'h'", {FIRST, SECOND}),
        ('class Rate:', 'class Rate(dict):', {FIRST, SECOND}),
        ("unit = 's'", 'def __len__(self):\n        return 0', {FIRST, SECOND}),
        # Comments and line breaks affect nothing.
        ('LIMIT = 3\n', 'LIMIT = 3  # per hour\n\n', set()),
    ],
)
def test_tests_of_changed_functions_are_selected(root, recorded, before, after, wanted):
    assert recorded.selected(root, ['maxlm/rate.py']) == set()
    assert SOURCE.count(before) == 1
    (root / 'maxlm/rate.py').write_text(SOURCE.replace(before, after))
    assert recorded.selected(root, ['maxlm/rate.py']) == wanted
    # Only files that have changed since the revision are compared.
    assert recorded.selected(root, ['maxlm/other.py']) == set()


def test_tests_of_deleted_files_are_selected(root, recorded):
    (root / 'maxlm/rate.py').unlink()
    assert recorded.selected(root, ['maxlm/rate.py']) == {FIRST, SECOND}


def test_a_changed_test_file_is_selected_instead_of_its_tests(root, recorded):
    (root / 'maxlm/rate.py').write_text(SOURCE.replace('return x', 'return 2 * x'))
    (root / 'tests/test_a.py').write_text('def test_other(): ...')
    assert recorded.selected(root, ['maxlm/rate.py']) == {'tests/test_a.py'}
    assert selected(root, ['maxlm/rate.py', 'tests/test_a.py'], recorded) == ['tests/test_a.py']


def test_imports_decide_about_files_that_are_not_in_the_map(root, recorded):
    (root / 'maxlm/rate.py').write_text(SOURCE.replace('return x', 'return 2 * x'))
    assert selected(root, ['maxlm/rate.py'], recorded) == [FIRST]
    assert selected(root, ['maxlm/rate.py'], None) == ['tests/test_b.py']
    (root / 'tests/test_architecture.py').write_text('')
    assert selected(root, ['maxlm/rate.py'], recorded) == [FIRST, 'tests/test_architecture.py']


def test_a_map_is_saved(tmp_path, recorded):
    assert TestMap.load(tmp_path / 'folder/map') is None
    recorded.save(tmp_path / 'folder/map')
    assert TestMap.load(tmp_path / 'folder/map') == recorded


def test_lines_belong_to_tests_and_to_all_users_of_a_fixture():
    file = ROOT / 'maxlm/formatting.py'
    one, two = 'tests/test_formatting.py::one', 'tests/test_formatting.py::two'
    fixture, session = 'fixture tests/test_formatting.py::base', 'fixture ::dataset'
    source = file.read_text().splitlines()
    body = next(number for number, line in enumerate(source, 1) if line.startswith('    return'))
    name = next(line for line in reversed(source[:body]) if line.startswith('def ')).split('(')[0].removeprefix('def ')

    def tests_of(context):
        data = CoverageData(no_disk=True)
        data.set_context(context)
        data.add_lines({str(file): {body}, str(file.with_suffix('.html')): {1}})
        found = make_map(data, {one: [fixture, session], two: [fixture], 'tests/test_log.py::three': [session]})
        assert set(found.executed) == {'maxlm/formatting.py'}
        return [found.tests[index] for index in found.executed['maxlm/formatting.py'][name]]

    assert tests_of(one) == tests_of(f'{one} (call)') == [one]
    assert tests_of(fixture) == tests_of(f'{one} (setup)') == [one, two]
    assert tests_of(session) == [one, 'tests/test_log.py::three']
    assert tests_of('') == tests_of('tests/test_deleted.py::four') == []


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_child_processes_are_recorded(tmp_path):
    environment = {**os.environ, 'MAXLM_TEST_CACHE': str(tmp_path)}
    command = [
        sys.executable,
        '-m',
        'pytest',
        '--record-map',
        'tests/test_train_exit.py',
        'tests/runtime/test_heartbeat.py',
    ]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    found = TestMap.load(tmp_path / 'test-map.json.gz')

    def tests_of(file, function):
        return {found.tests[index].partition('[')[0] for index in found.executed[file][function]}

    # A process that forks, and processes of the fork server.
    assert tests_of('maxlm/train.py', 'start') == {
        'tests/test_train_exit.py::test_late_preemption_notice_keeps_the_exit_code'
    }
    assert tests_of('maxlm/runtime/heartbeat.py', 'disconnect') == {
        'tests/runtime/test_heartbeat.py::test_process_lost_during_shutdown_keeps_the_exit_code'
    }
