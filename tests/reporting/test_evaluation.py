"""The results of `maxlm evaluate` in a workdir, in the report."""

import re

import numpy as np
import pytest

from maxlm.cli.runs import report
from maxlm.evaluation.statistics import Measure, mean_of
from maxlm.evaluation.table import Column, table_json
from maxlm.evaluation.tasks.core_bundle import open_bundle
from maxlm.reporting.overview import tiles
from maxlm.reporting.page import section
from maxlm.reporting.records import evaluated
from maxlm.reporting.run_summary import make_runs
from maxlm.storage.json_text import finite_json
from maxlm.telemetry.run_history import read_history
from tests import workdirs
from tests.conftest import ROOT

MEASURES = [
    mean_of('bits_per_byte', np.array([0.7, 0.74])),
    Measure('core', 0.2626, 0.01),
    Measure('core/colors/acc', 0.75, 0.02),
    Measure('core/colors/centered', 0.5, 0.04),
    Measure('unknown', float('nan'), None),
]


@pytest.fixture
def workdir(tmp_path):
    return workdirs.fresh(tmp_path / 'run')


def write(workdir, *names):
    (workdir / 'evaluation').mkdir()
    table = table_json([Column(name, MEASURES) for name in names])
    (workdir / 'evaluation/evaluation.json').write_text(finite_json({'table': table}))


def shown(workdir):
    return make_runs([read_history(workdir)], workdirs.NOW)


def test_core_and_bits_per_byte_are_in_the_report(workdir, capsys):
    write(workdir, 'run@400')
    runs = shown(workdir)
    (one,) = evaluated(runs[0].history)
    assert one.core_rows == [
        ['colors', '0.7500 ± 0.0392', '0.5000 ± 0.0784'],
        ['CORE (mean)', '', '0.2626 ± 0.0196'],
    ]
    assert one.other_rows == [['bits_per_byte', '0.7200 ± 0.0392']]
    cells = re.findall(r'<td[^>]*>([^<]*)</td>', section('evaluation', runs))
    assert cells == ['bits_per_byte', '0.7200 ± 0.0392', *one.core_rows[0], *one.core_rows[1]]
    found = {tile.label: (tile.value, tile.detail) for tile in tiles(runs[0])}
    assert found['CORE'] == ('0.2626', 'run@400')
    assert found['Validation bits per byte'] == ('0.7200', 'run@400')
    report.main([str(workdir)])
    assert 'run@400: CORE 0.2626, 0.7200 validation bits per byte\n' in capsys.readouterr().out


def test_several_checkpoints_are_shown_apart(workdir):
    write(workdir, 'run@200', 'run@400')
    text = section('evaluation', shown(workdir))
    assert re.findall(r'<h3>(.*)</h3>', text) == ['run@200', 'run@400']
    assert text.count('CORE (mean)') == 2


def test_a_run_without_evaluation_has_no_section(workdir):
    assert section('evaluation', shown(workdir)) == ''
    (workdir / 'evaluation').mkdir()
    assert section('evaluation', shown(workdir)) == ''


@pytest.mark.parametrize('text', ['{', '[]', '{"table": 1}', '{"table": [1, {"name": 1, "checkpoints": [2]}]}'])
def test_damaged_results_are_no_error(workdir, text):
    (workdir / 'evaluation').mkdir()
    (workdir / 'evaluation/evaluation.json').write_text(text)
    history = read_history(workdir)
    assert evaluated(history) == []
    assert any('invalid JSON' in note for note in history.notes) == (text == '{')


def test_the_trial_bundle_has_tasks_of_all_kinds():
    tasks = open_bundle(str(ROOT / 'configs/core_trial'))
    assert {task.kind for task in tasks} == {'multiple_choice', 'schema', 'language_modeling'}
    assert [len(task.examples) for task in tasks] == [4, 4, 4]
