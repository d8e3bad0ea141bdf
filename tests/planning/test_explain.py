"""Warnings about a compiled program that does more work than the formula expects."""

import pytest

from maxlm.planning.compiled.program import Program
from maxlm.planning.compiled.traffic import Traffic
from maxlm.planning.explain import explain, program_warnings
from maxlm.planning.forecast import estimate
from tests.planning.test_forecast import machine, resolved


@pytest.fixture(scope='module')
def forecast():
    """Returns the forecast of a program with exactly the work of the formula."""
    gpus = machine('h100:8')
    estimated = estimate(resolved('1b.py', gpus), gpus)
    program = Program(traffic=[Traffic('fusion', 'norm', estimated.work.memory_bytes, 1)])
    return estimated._replace(formula=estimated.work, program=program)


def test_no_warning_about_the_work_of_the_formula(forecast):
    assert program_warnings(forecast) == []


@pytest.mark.parametrize(
    ('change', 'fragments'),
    [
        (lambda f: {'work': f.work._replace(flops=1.2 * f.work.flops)}, ['20% more operations', 'model.remat_policy']),
        (
            lambda f: {'work': f.work._replace(memory_bytes=1.5 * f.work.memory_bytes)},
            ['GB of memory', 'the formula expects', '--explain'],
        ),
        (
            lambda f: {'program': Program(rematerialized=3)},
            ['XLA recomputes 3 instructions', 'train.per_device_batch_size'],
        ),
        (
            lambda f: {'memory': f.memory._replace(activations=0.8 * f.target.chip.memory), 'available': 80 * 2**30},
            ['76% of the memory', 'train.per_device_batch_size'],
        ),
    ],
    ids=['operations', 'traffic', 'rematerialization', 'memory'],
)
def test_each_excess_has_a_warning(forecast, change, fragments):
    (warning,) = program_warnings(forecast._replace(**change(forecast)))
    for fragment in fragments:
        assert fragment in warning


def test_a_table_lists_the_kernels_of_the_program(forecast):
    text = explain(forecast)
    assert '| norm | ' in text
    assert '| fusion | norm | 1 |' in text
    with pytest.raises(ValueError, match='compiled GPU program'):
        explain(forecast._replace(program=None))
