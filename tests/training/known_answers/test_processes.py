"""Tests that all processes of a run stop if one of them has a wrong kernel."""

import json

import pytest

from tests.forking import forking


@pytest.mark.multiprocess
def test_all_processes_stop_at_a_wrong_kernel_of_one(tmp_path):
    with forking('tests.training.known_answers.kernels_pair:main', devices=2) as parent:
        pair = parent.start_run(2, [], tmp_path / 'logs')
        assert [process.wait() for process in pair] == [0, 0], pair[0].stderr + pair[1].stderr
    errors = [json.loads(process.stdout.splitlines()[-1]) for process in pair]
    for number, (before, of_first, of_second, after) in enumerate(errors):
        assert (before, after) == ('', '')
        for process, error in enumerate((of_first, of_second)):
            prefix = '' if process == number else f'process {process}: '
            assert error.startswith(f'{prefix}layernorm computes wrong results on cpu, device ')
