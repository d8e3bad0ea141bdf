"""Tests the benchmark of the start: its processes, medians and output."""

import json

import pytest

from benchmarks import startup
from benchmarks.startup import Seconds, main, medians, run
from maxlm.cli.commands import COMMANDS
from maxlm.errors import EXIT_DONE, InputError


def test_a_process_is_measured_until_it_exits_or_prints_the_line():
    program = 'import time; print("first"); print("step 1"); time.sleep(60)'
    assert 0 < run('-c', program, until='step').wall < 60
    assert run('-c', 'print(sum(range(10**6)))').cpu > 0
    with pytest.raises(InputError, match='exited with code 3'):
        run('-c', 'raise SystemExit(3)')
    # A process that exits without the line has failed, also with exit code 0.
    with pytest.raises(InputError, match='exited with code 0'):
        run('-c', 'print("steps")', until='step')


def test_medians():
    assert medians([Seconds(1, 5), Seconds(3, 4), Seconds(2, 9)]) == {'wall': 2, 'cpu': 5}


def test_output(tmp_path, monkeypatch, capsys):
    calls = []

    def measured(*words, until=''):
        calls.append((words, until))
        return Seconds(len(calls), 0.5)

    monkeypatch.setattr(startup, 'run', measured)
    output = tmp_path / 'result.json'
    assert main(['--data=data', '--rounds=2', f'--output={output}']) == EXIT_DONE
    result = json.loads(output.read_text())
    assert result['first_step'] == {'cold': {'wall': 2, 'cpu': 0.5}, 'warm': {'wall': 3, 'cpu': 0.5}}
    assert list(result['help']) == list(COMMANDS)
    assert result['machine']['jax']
    assert 'cold' in capsys.readouterr().out
    # Cold and warm starts of a round share the compilation cache, and rounds do not.
    caches = [word for words, until in calls if until for word in words if 'compilation_cache_dir' in word]
    assert caches[0] == caches[1] != caches[2] == caches[3]
    with pytest.raises(InputError, match='--rounds=0'):
        main(['--data=data', '--rounds=0'])
