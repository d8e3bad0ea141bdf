"""Tests that slow tests are detected by their measured durations."""

from tools.durations import Durations


def report(**seconds):
    tests = {f'tests/test_a.py::{name}': value for name, value in seconds.items()}
    return {'tests': tests, 'files': {'tests/test_a.py': {'seconds': sum(seconds.values())}}}


def test_a_test_that_is_slow_in_either_measurement_is_slow():
    full = Durations.of_report(report(first=3.0, second=0.1, third=0.1))
    fast = Durations.of_report(report(second=2.0, third=0.1))
    both = full.with_slow_of(fast)
    assert [both.is_slow(f'tests/test_a.py::{name}') for name in ('first', 'second', 'third')] == [True, True, False]
    assert not full.is_slow('tests/test_a.py::second')
    # The order of files follows the durations of all tests; new files come first.
    assert both.seconds_of_file('tests/test_a.py::third') == 3.2
    assert both.seconds_of_file('tests/test_b.py::first') == float('inf')
    assert both.is_measured('tests/test_a.py::third')
    assert not both.is_measured('tests/test_b.py::first')
