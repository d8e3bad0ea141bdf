"""Tests that steps computed twice are equal, and that a bit flipped in one computation is found."""

import json
import math

import jax
import numpy as np
import pytest

from benchmarks import gpu_replay
from benchmarks.gpu_replay import compare, main
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, exit_code
from maxlm.training.decisions.replay import StepResult
from tests.benchmarks.tiny_model import TINY

ARGUMENTS = [
    *TINY,
    '--config.train.global_batch_size=16',
    '--config.train.per_device_batch_size=1',
    '--steps=3',
]
SUMS = np.arange(4, dtype=np.uint32)[None]


@pytest.fixture
def run(tmp_path):
    def run(*more):
        """Returns the exit code and the result."""
        output = tmp_path / 'result.json'
        code = main([*ARGUMENTS, *more, f'--output={output}'])
        return code, json.loads(output.read_text())

    return run


def test_equal_computations(run):
    code, result = run('--exact')
    assert code == EXIT_DONE
    assert result['steps'] == 3
    assert result['different'] == result['beyond_rounding'] == 0
    assert result['differences'] == []
    assert result['exact']


@pytest.mark.parametrize('arguments', [(), ('--exact',)])
def test_a_flipped_bit_of_a_parameter_is_found(run, monkeypatch, arguments):
    compiled, calls = gpu_replay.compile_train_step, []

    def flipping(*given):
        step = compiled(*given)

        def run_step(state, batch):
            calls.append(1)
            state, metrics = step.step(state, batch)
            # The second computation of the second step.
            if len(calls) == 4:
                leaves, treedef = jax.tree.flatten(state.params)
                bits = np.array(leaves[0]).view(np.uint32)
                bits.flat[5] ^= 1
                leaves[0] = jax.device_put(bits.view(np.float32), leaves[0].sharding)
                state = state._replace(params=jax.tree.unflatten(treedef, leaves))
            return state, metrics

        return step._replace(step=run_step)

    monkeypatch.setattr(gpu_replay, 'compile_train_step', flipping)
    code, result = run(*arguments)
    assert code == (EXIT_FAILED if arguments else EXIT_DONE)
    (difference,) = result['differences']
    assert difference['step'] == 1
    assert difference['changed_arrays'] == 1
    assert not difference['beyond_rounding']
    assert (result['different'], result['beyond_rounding']) == (1, 0)


def test_differences():
    first = StepResult(loss=3.0, grad_norm=1.0, param_norm=9.0, checksums=SUMS)
    assert compare(first, first, dtype='bfloat16') is None
    assert compare(first._replace(loss=math.nan), first._replace(loss=math.nan), dtype='bfloat16') is None
    for second, is_beyond in (
        ({'loss': 3.0000005}, False),
        ({'loss': 3.01}, True),
        ({'loss': math.nan}, True),
        ({'grad_norm': 1.001}, False),
        ({'grad_norm': 1.2}, True),
        ({'checksums': SUMS[:, ::-1]}, False),
    ):
        assert compare(first, first._replace(**second), dtype='bfloat16')['beyond_rounding'] == is_beyond


def test_bad_input(capsys):
    assert exit_code(main, [*ARGUMENTS, '--steps=0']) == EXIT_BAD_INPUT
    assert '--steps=0' in capsys.readouterr().err
