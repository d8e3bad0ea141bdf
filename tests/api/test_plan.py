"""`maxlm.Plan`: the figures of `maxlm plan`."""

import json

import pytest

import maxlm
from maxlm.cli.setup import plan
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code

BIG = {'model.dim': 8192, 'model.num_layers': 64, 'model.num_heads': 64, 'model.num_kv_heads': 8}


def command(capsys, *arguments):
    """Returns the exit code and the JSON of `maxlm plan`."""
    code = exit_code(plan.main, [*arguments, '--estimate', '--json'])
    return code, json.loads(capsys.readouterr().out)


def test_the_figures_equal_those_of_the_command(capsys):
    code, expected = command(capsys, '--config=1b', '--target=h100:8')
    found = maxlm.Plan('1b', 'h100:8', estimate=True)
    assert (code, found.fits) == (EXIT_DONE, True)
    assert json.loads(json.dumps(found.to_dict())) == {**expected, 'why_estimated': 'estimate=True'}
    figures = (found.memory_bytes, found.step_seconds, found.tokens_per_second, found.mfu, found.cost.dollars)
    assert figures == (
        expected['memory']['total'],
        expected['step_seconds'],
        expected['tokens_per_second'],
        expected['mfu'],
        expected['dollars'],
    )
    # Control: half of the devices are slower.
    assert maxlm.Plan('1b', 'h100:4', estimate=True).step_seconds > found.step_seconds


def test_a_search_finds_a_layout_that_fits(capsys):
    config = maxlm.Config.get('1b', {**BIG, 'mesh.fsdp': 1, 'mesh.data': 8})
    planned = maxlm.Plan(config, 'h100:8', estimate=True)
    found = planned.search()
    assert (planned.fits, planned.changes, found.fits) == (False, {}, True)
    again = maxlm.Plan(config.replace(found.changes), 'h100:8', estimate=True)
    assert (again.fits, again.memory_bytes) == (True, found.memory_bytes)
    overrides = [f'--config.{key}={value}' for key, value in {**BIG, 'mesh.fsdp': 1, 'mesh.data': 8}.items()]
    code, expected = command(capsys, '--config=1b', '--target=h100:8', *overrides)
    assert code == EXIT_FAILED
    assert expected['advice'] == [f'--config.{key}={value}' for key, value in found.changes.items()]


def test_wrong_targets():
    with pytest.raises(InputError, match='h100'):
        maxlm.Plan('1b', 'h10:8', estimate=True)
