"""The plan of a recipe: one row per phase, whose figures are those of `maxlm plan`."""

import re

import pytest

import maxlm
from maxlm.cli.execution import recipe_plan
from maxlm.cli.runs import recipe
from maxlm.config.loading import load
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from tests.conftest import ROOT


def dry_run(capsys, *words):
    assert exit_code(recipe.main, [*words, '--dry-run']) == EXIT_DONE
    return capsys.readouterr().out


@pytest.fixture
def no_gpu(monkeypatch):
    monkeypatch.setattr(recipe_plan, 'present_target', lambda: '')


def cells(output, phase):
    (line,) = re.findall(rf'^{phase}  .*$', output, re.MULTILINE)
    return re.split(r' {2,}', line.strip())


def test_the_phases_have_the_figures_of_plan(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    output = dry_run(capsys, '--config=configs/code.py:7b', 'code=x', 'chats=x', 'prompts=x', '--target=h100:8')
    plan = maxlm.Plan('code:7b', 'h100:8', estimate=True)
    number, name, steps, _, dollars, disk = cells(output, 2)
    assert (number, name, steps) == ('2', 'train configs/code.py:7b', '47,684')
    assert dollars == f'${plan.cost.dollars:,.0f}'
    # The newest five checkpoints and the best one, with float32 parameters and two moments.
    assert disk.endswith(' GiB')
    assert float(disk.split()[0]) * 2**30 == pytest.approx(6 * 12 * 6.74e9, rel=0.01)
    # Data preparation is not planned.
    assert cells(output, 1) == ['1', 'prepare data/code-7b', '-', '-', '-', '-']
    # Instruction tuning is planned for 1000 steps, because its conversations do not exist yet.
    assert cells(output, 5)[2] == '1,000'
    total = sum(float(row[4].strip('$').replace(',', '')) for phase in (2, 3, 5, 6) if (row := cells(output, phase)))
    assert float(cells(output, 'all')[2].strip('$').replace(',', '')) == pytest.approx(total, abs=3)


def test_without_hardware_only_steps_and_disk_are_known(capsys, monkeypatch, no_gpu):
    monkeypatch.chdir(ROOT)
    output = dry_run(capsys, '--config=configs/1b.py', 'text=x', '--phase=2')
    assert 'add --target=h100:8' in output
    assert cells(output, 2)[2:5] == ['100,000', '-', '-']
    assert not re.search('^1  ', output, re.MULTILINE)


def test_a_phase_that_does_not_fit_says_so(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ['--config=configs/1b.py', 'text=x', '--phase=2']
    assert 'does not fit rtx3080:1: needs ' in dry_run(capsys, *words, '--target=rtx3080:1')
    assert 'does not fit' not in dry_run(capsys, *words, '--target=h100:8')


def test_an_unknown_target_is_refused(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ['--config=configs/1b.py', 'text=x', '--dry-run', '--target=h999:1']
    assert exit_code(recipe.main, words) == EXIT_BAD_INPUT
    assert 'h999' in capsys.readouterr().err


def test_checkpoints_and_the_export_fill_the_disk():
    config = load('tiny', ['checkpoint.max_to_keep=2', 'checkpoint.keep_best=1', 'export.at_end=False'])
    (without,) = recipe_plan.plan_phases([['train']], [config], 'h100:1')
    exported = load('tiny', ['checkpoint.max_to_keep=2', 'checkpoint.keep_best=1', 'export.at_end=True'])
    (with_export,) = recipe_plan.plan_phases([['train']], [exported], 'h100:1')
    plan = maxlm.Plan(maxlm.Config.get('tiny', {}), 'h100:1', estimate=True)
    assert without.disk == 3 * plan.cost.checkpoint_bytes
    assert with_export.disk - without.disk == pytest.approx(plan.cost.checkpoint_bytes / 6, rel=0.01)


def test_a_config_that_cannot_be_planned_names_the_reason():
    config = load('tiny', ['distill.teacher=runs/none'])
    (planned,) = recipe_plan.plan_phases([['train', '--config=tiny']], [config], 'h100:1')
    assert (planned.hours, planned.name) == (None, 'train tiny')
    assert 'runs/none' in planned.note
    assert f'phase 1: {planned.note}' in recipe_plan.plan_text([planned], 'h100:1')


def test_the_preset_for_10_gb_fits_and_the_published_trial_does_not():
    """Compiled, the preset needs 7.1 GiB."""
    fits = {name: maxlm.Plan(name, 'rtx3080:1', estimate=True).fits for name in ('neox:tuned_10gb', 'neox:test')}
    assert fits == {'neox:tuned_10gb': True, 'neox:test': False}
