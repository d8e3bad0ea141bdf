"""Tests that docs/hardware.md and its result file have the present plans, and the measured losses."""

import json
import logging

import pytest

from benchmarks.hardware import LOSSES, PLANS, PRESETS, RESULTS, TARGETS, loss_table, plan_preset, plan_tables, replaced
from tests.conftest import ROOT


@pytest.fixture(scope='module')
def result():
    return json.loads((ROOT / RESULTS / 'hardware_plans.json').read_text())


@pytest.fixture
def planned(result):
    """Returns a function (preset) → its plans now, and those in the file."""
    stored = {row['preset']: row for row in result['plans']}
    assert list(stored) == list(PRESETS)

    def planned(name):
        return json.loads(json.dumps(plan_preset(name))), stored[name]

    return planned


@pytest.mark.parametrize(
    'name',
    [
        name if name in ('mix:small', 'neox:tuned_10gb') else pytest.param(name, marks=pytest.mark.nightly)
        for name in PRESETS
    ],
)
def test_plans_equal_those_of_the_file(planned, name, caplog):
    with caplog.at_level(logging.ERROR, 'maxlm'):
        found, stored = planned(name)
    assert found == stored


def test_the_page_has_both_tables(result):
    page = (ROOT / 'docs/hardware.md').read_text()
    assert replaced(page, PLANS, plan_tables(result['plans'])) == page
    assert replaced(page, LOSSES, loss_table(ROOT / RESULTS)) == page
    # Negative control: other plans change the page.
    changed = [{**row, TARGETS[10]: None} for row in result['plans']]
    assert replaced(page, PLANS, plan_tables(changed)) != page


def test_every_plan_fits_its_gpu(result):
    for row in result['plans']:
        for gb, target in TARGETS.items():
            assert row[target] is None or row[target]['memory_gib'] < gb * 1e9 / 2**30, (row['preset'], target)
