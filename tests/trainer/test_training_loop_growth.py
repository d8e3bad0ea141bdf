"""Tests that the number of host calls of a step is independent of the number of devices, except to shard batches."""

import json

import pytest

from benchmarks.growth_devices import main, run_on
from maxlm.errors import EXIT_DONE

STEPS = 10
# This many calls take less time than a step of one millisecond.
MOST_CALLS = 1500


def test_calls_of_a_step(dataset, tmp_path):
    output = tmp_path / 'figures.json'
    assert main([str(dataset), '8', str(output)]) == EXIT_DONE
    figures = json.loads(output.read_text())
    assert figures['devices'] == 8
    assert figures['rest_calls'] < MOST_CALLS
    assert figures['placing_calls'] > 8
    assert min(figures['sent_bytes'], figures['memory_bytes'], figures['instructions']) > 0


@pytest.fixture(scope='module')
def figures(dataset):
    return {devices: run_on(devices, dataset, STEPS) for devices in (1, 8)}


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_calls_of_a_step_do_not_grow_with_devices(figures):
    one, eight = figures[1], figures[8]
    assert (one['devices'], eight['devices']) == (1, 8)
    assert eight['rest_calls'] <= 1.05 * one['rest_calls']
    assert one['rest_calls'] < MOST_CALLS


@pytest.mark.nightly
@pytest.mark.multiprocess
def test_the_program_does_not_grow_with_devices(figures):
    assert figures[8]['instructions'] < 1.2 * figures[1]['instructions']
    # Negative control: the programs run on one device and on eight.
    assert figures[1]['sent_bytes'] == 0 < figures[8]['sent_bytes']
    assert figures[8]['memory_bytes'] < figures[1]['memory_bytes'] / 2
