"""Tests the differences between the config of a run and the shipped config file."""

import dataclasses

import pytest

from maxlm.config.loading import load
from maxlm.reporting.config_diff import SHIPPED, differences, shipped_config, varying_keys

TINY = str(SHIPPED / 'tiny.py')


def with_keys(config, section, **keys):
    return dataclasses.replace(config, **{section: dataclasses.replace(getattr(config, section), **keys)})


@pytest.mark.parametrize(
    ('command', 'name'),
    [
        (['python', '-m', 'maxlm.train', '--config=configs/tiny.py'], 'configs/tiny.py'),
        (['x', '--config', '/root/elsewhere/configs/tiny.py'], 'configs/tiny.py'),
        (['x', '--config=configs/depth.py:24'], 'configs/depth.py:24'),
        (['x', '--config=configs/depth.py:no-such'], None),
        (['x', '--config=configs/none.py'], None),
        (['x', '--config=tiny.py'], None),
        (['x', '--config=runs/tiny/config.json'], None),
        (['x', '--config'], None),
        ([], None),
    ],
)
def test_config_file_of_a_command(command, name):
    found = shipped_config(command)
    assert (found and found[0]) == name
    if name == 'configs/tiny.py':
        assert found[1] == load(TINY)


def test_config_file_outside_the_package_is_not_executed(tmp_path):
    planted = tmp_path / 'configs' / 'tiny.py'
    planted.parent.mkdir()
    planted.write_text(f'open({str(tmp_path / "executed")!r}, "w").close()\n')
    name, config = shipped_config(['x', f'--config={planted}'])
    assert (name, config) == ('configs/tiny.py', load(TINY))
    assert shipped_config(['x', f'--config={planted.parent}/../configs/planted.py']) is None
    assert not (tmp_path / 'executed').exists()
    # Control: the file has this effect if it is executed.
    shipped_config(['x', '--config=configs/tiny.py'], folder=planted.parent)
    assert (tmp_path / 'executed').exists()


def test_differences_show_command_line_overrides():
    shipped = load(TINY)
    run = with_keys(with_keys(shipped, 'train', num_steps=7), 'model', vocab_size=512)
    found = differences(run, shipped, ['x', '--config.train.num_steps=7', '--config.train.log_every', '10'])
    assert [tuple(difference) for difference in found] == [
        ('train.num_steps', 400, 7, True),
        ('model.vocab_size', 0, 512, False),
    ]
    assert differences(shipped, shipped, []) == []


def test_keys_that_vary_between_runs():
    tiny = load(TINY)
    other = with_keys(tiny, 'optimizer', learning_rate=1.0)
    assert varying_keys([tiny, other, tiny]) == {'optimizer.learning_rate': [2e-3, 1.0, 2e-3]}
    assert varying_keys([tiny, tiny]) == {}
    assert varying_keys([tiny, None])['model.dim'] == [256, None]
