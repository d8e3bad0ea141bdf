"""The loop's own work in a step: as many calls on eight devices as on one, but for placing the batch."""

import pytest

from benchmarks.growth_devices import run_on

STEPS = 10

pytestmark = pytest.mark.multiprocess


@pytest.fixture(scope='module')
def figures(dataset):
    return {devices: run_on(devices, dataset, STEPS) for devices in (1, 8)}


def test_calls_of_a_step_do_not_grow_with_devices(figures):
    one, eight = figures[1], figures[8]
    assert (one['devices'], eight['devices']) == (1, 8)
    assert eight['rest_calls'] <= 1.05 * one['rest_calls']
    # So few that a step of a millisecond would hide them.
    assert one['rest_calls'] < 1500


def test_the_program_does_not_grow_with_devices(figures):
    assert figures[8]['instructions'] < 1.2 * figures[1]['instructions']
    # Control: the programs are of one device and of eight.
    assert figures[1]['sent_bytes'] == 0 < figures[8]['sent_bytes']
    assert figures[8]['memory_bytes'] < figures[1]['memory_bytes'] / 2
