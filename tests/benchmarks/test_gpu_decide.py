"""Tests the search for the cause of a jump of the loss: with jumps of each cause, and on a run without one."""

import json

import jax
import pytest

from benchmarks import gpu_decide
from benchmarks.gpu_decide import FIRST, cause_of, main
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, exit_code
from tests.benchmarks.tiny_model import TINY

ARGUMENTS = [
    *TINY,
    '--config.train.global_batch_size=8',
    f'--steps={FIRST + 3}',
    '--repeats=3',
]
# Step whose loss jumps.
STEP = FIRST + 1
HIGH = {
    'loss': 8.6,
    'usual': 3.3,
    'same_batch': [8.5, 8.6],
    'other_batches': [8.2, 9.1, 3.4],
    'other_attention': 8.4,
}


@pytest.mark.parametrize(
    ('values', 'cause'),
    [
        ({}, 'parameters'),
        ({'other_batches': [3.2, 3.4, 8.4]}, 'batch'),
        ({'other_attention': 3.3}, 'attention kernel'),
        ({'same_batch': [3.3, 3.3], 'other_batches': [3.2, 3.4, 3.3]}, 'training step'),
        ({'same_batch': [3.3, 8.6]}, 'repetition'),
        ({'loss': float('nan'), 'same_batch': [3.3, 3.3]}, 'parameters'),
    ],
)
def test_cause(values, cause):
    assert cause_of({**HIGH, **values}) == cause


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Returns a function that runs the benchmark with a changed training step, and its exit code and result."""

    def run(change):
        compiled = gpu_decide.compile_train_step

        def changed(*arguments):
            step, count = compiled(*arguments), []

            def run_step(state, batch):
                count.append(1)
                return change(step.step, state, batch, len(count) - 1)

            return step._replace(step=run_step)

        monkeypatch.setattr(gpu_decide, 'compile_train_step', changed)
        output = tmp_path / 'result.json'
        code = main([*ARGUMENTS, f'--output={output}'])
        return code, json.loads(output.read_text())

    return run


def test_no_jump(run):
    code, result = run(lambda step, state, batch, number: step(state, batch))
    assert code == EXIT_DONE
    assert result['jumps'] == []
    assert [values['skipped'] for values in result['steps']] == [False] * (FIRST + 3)
    control = result['control']
    assert control['different_values'] == 1
    # The evaluation computes the same loss as the training step, with both kernels.
    assert control['same_batch'][0] == pytest.approx(control['loss'], rel=1e-5)
    assert control['other_attention'] == pytest.approx(control['loss'], rel=1e-5)
    assert control['other_batches'][0] != pytest.approx(control['loss'], rel=1e-5)


def test_jump_of_the_parameters(run):
    def change(step, state, batch, number):
        state, metrics = step(state, batch)
        if number == STEP - 1:
            state = state._replace(params=jax.tree.map(lambda x: -20 * x, state.params))
        return state, metrics

    code, result = run(change)
    assert code == EXIT_DONE
    assert result['jumps'][0]['step'] == STEP
    assert result['jumps'][0]['cause'] == 'parameters'


def test_jump_of_one_computation(run):
    def change(step, state, batch, number):
        state, metrics = step(state, batch)
        return state, metrics | ({'loss': metrics['loss'] + 3} if number == STEP else {})

    code, result = run(change)
    assert code == EXIT_FAILED
    assert [(jump['step'], jump['cause']) for jump in result['jumps']] == [(STEP, 'training step')]


def test_bad_input(capsys):
    assert exit_code(main, [*ARGUMENTS, f'--steps={FIRST}']) == EXIT_BAD_INPUT
    assert f'above {FIRST}' in capsys.readouterr().err
