"""Tests the loop benchmark: figures from a run's lines, and runs with and without the packages that training needs."""

import importlib.util
import json

import pytest

from benchmarks import loop
from benchmarks.loop import WARMUP, Bench, main
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, exit_code
from tests.conftest import ROOT
from tests.cpu import cpu_flags

SMALL = ['model.num_layers=1', 'model.dim=16', 'model.ffn_dim=16', 'data.seq_len=16', 'metrics.peak_tflops=1']


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setenv('XLA_FLAGS', cpu_flags(1))
    monkeypatch.setattr(loop, 'PACKAGES', ('json', 'logging'))
    monkeypatch.setattr(loop, 'VOCABULARY', 300)


def line(step, time, *, waits=0.0, seconds=0.25, **pauses):
    values = {'data_loading': waits, 'step_time': seconds, **pauses}
    return {'step': step, 'time': time, **{f'perf/{name}_seconds': value for name, value in values.items()}}


def test_figures_from_the_lines_of_a_run():
    lines = [
        # Slow steps of the warm-up, which do not count.
        line(10, 100.0, waits=5.0, seconds=9.0, eval=50.0, checkpoint_blocked=50.0),
        line(WARMUP, 1000.0, waits=5.0, seconds=9.0, eval=50.0, checkpoint_blocked=50.0),
        line(WARMUP + 10, 1005.5, waits=0.125, seconds=0.5, checkpoint_blocked=0.5),
        line(WARMUP + 30, 1010.0, seconds=0.125, eval=2.0),
    ]
    turn = loop._read(lines)
    # Thirty steps take ten seconds, two of them for evaluation. Steps take 5 s and 2.5 s, of which 1.25 s wait for
    # data.
    assert turn.step_seconds == pytest.approx(8 / 30)
    assert turn.with_evaluation == pytest.approx(10 / 30)
    assert turn.save_share == pytest.approx(0.05)
    assert turn.evaluation_share == pytest.approx(0.2)
    assert turn.data_wait_share == pytest.approx(1.25 / 7.5)


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.timeout(600)
def test_a_run_and_its_bare_step(tmp_path, monkeypatch):
    monkeypatch.setattr(loop, 'WARMUP', 10)
    every = ['eval.interval=10', 'eval.num_batches=1', 'checkpoint.save_interval_steps=10']
    bench = Bench(f'{ROOT}/configs/tiny.py', [*SMALL, *every], tmp_path)
    assert bench.missing == []
    result = bench.loop(1, 20)
    assert result['share_of_bare']['median'] == pytest.approx(
        result['bare_step_seconds']['median'] / result['step_seconds']['median']
    )
    assert 0 < result['share_of_bare_with_evaluation']['median'] < result['share_of_bare']['median']
    assert 0 < result['save_share']['median'] < 1
    assert 0 < result['evaluation_share']['median'] < 1
    assert bench.machine['devices'] == 1
    # The compilation caches are kept for the next turn, but the workdirs are not.
    assert {path.name for path in tmp_path.iterdir()} == {'data', 'programs'}
    for kind in ('train', 'bare'):
        assert list((tmp_path / 'programs' / kind).glob('jit_train_step*'))


def test_missing_packages(tmp_path, monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(loop.importlib.util, 'find_spec', lambda name: None if name == 'grain' else find(name))
    # The test above runs bare steps in processes.
    monkeypatch.setattr(Bench, '_bare', lambda bench, steps, programs, settings=None: (0.5, 2.0))
    monkeypatch.setattr(Bench, 'import_seconds', lambda bench: 1.0)
    output = tmp_path / 'result.json'
    words = [f'--config={ROOT}/configs/tiny.py', *(f'--config.{setting}' for setting in SMALL)]
    counts = ['--steps=2', '--rounds=1', '--starts=1', '--host-steps=2']
    assert main([*words, *counts, f'--output={output}']) == EXIT_DONE
    assert capsys.readouterr().out.startswith('only the bare step is measured: grain cannot be imported\n')
    result = json.loads(output.read_text())
    assert result['missing'] == ['grain']
    assert result['start'] == {kind: {'median': 2.0, 'min': 2.0, 'max': 2.0} for kind in ('bare_cold', 'bare_warm')}
    assert result['bare_step_seconds']['median'] == 0.5
    assert 'share_of_bare' not in result
    assert 'host_microseconds' not in result


def test_bad_input(capsys):
    assert exit_code(main, ['--rounds=0']) == EXIT_BAD_INPUT
    assert 'at least 1' in capsys.readouterr().err
