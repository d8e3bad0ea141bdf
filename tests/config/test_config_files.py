"""Tests the workdir of a run without --workdir."""

import pytest

from maxlm.config.config_files import default_workdir


@pytest.mark.parametrize(
    ('spec', 'workdir'),
    [
        ('configs/1b.py', 'runs/1b'),
        ('configs/depth.py:24', 'runs/depth-24'),
        ('configs/code.py:7b-long', 'runs/code-7b-long'),
        ('/elsewhere/my.config.py:a/b c', 'runs/my.config-a_b_c'),
        # The run that wrote this file stays unchanged.
        ('runs/tiny/config.json', 'runs/tiny-2'),
        ('mine.json', 'runs/mine'),
    ],
)
def test_the_workdir_is_derived_from_the_config(spec, workdir):
    assert default_workdir(spec) == workdir


def test_a_config_in_the_current_directory(tmp_path, monkeypatch):
    (tmp_path / 'first').mkdir()
    monkeypatch.chdir(tmp_path / 'first')
    assert default_workdir('config.json') == 'runs/first-2'
