"""`maxlm.plan` with real compilers: configs of all five kinds for a slice of TPU v4 and for their own GPUs.

Slow, up to a minute each: it is the compilers that work, on steps of real size. For every config of every kind see
tests/planning/test_memory.py, which holds estimates to recorded programs.
"""

import json

import pytest

from maxlm import plan
from maxlm.errors import EXIT_DONE, EXIT_FAILED, exit_code
from maxlm.planning.targets import CompilerMissingError, check_compiler, parse_target
from tests.conftest import ROOT

FULL = '--config.model.remat=full'
# Config, target, overrides, whether it fits.
ON_TPU = [
    ('1b.py', 'v4:8x8x8', ('--config.train.micro_batch=1',), True),
    ('1b.py', 'v4:2x2x4', (), False),
    ('neox.py:production_8gpu', 'v4:2x2x4', (), True),
    ('depth.py:64', 'v4:2x2x4', ('--vocab_size=32',), True),
    ('mix.py:xlarge', 'v4:2x2x4', (), True),
    ('code.py:7b', 'v4:2x2x4', (), True),
    ('mix.py:tiny', 'v5e:2x2', (FULL, '--config.train.micro_batch=1'), True),
    ('mix.py:tiny', 'v5p:2x2x1', (FULL, '--config.train.micro_batch=1'), True),
    ('mix.py:tiny', 'v6e:2x2', (FULL, '--config.train.micro_batch=1'), True),
]
ON_GPU = [
    ('1b.py', 'h100:8', (), True),
    ('neox.py:production_8gpu', 'h100:8', (), True),
    ('depth.py:64', 'h100:8', ('--vocab_size=32',), True),
    ('depth.py:64', 'h100:8', ('--vocab_size=32', '--config.model.remat=none'), False),
    ('mix.py:xlarge', 'a100:8', (), True),
    ('code.py:7b', 'h100:8', (), True),
    ('code.py:70b', 'h100:8x16', ('--config.mesh.replica=2',), True),
]


def figures(capfd, config, target, *options):
    capfd.readouterr()
    words = [f'--config={ROOT}/configs/{config}', f'--target={target}', '--json', *options]
    code = exit_code(plan.main, words)
    told = json.loads(capfd.readouterr().out)
    assert code == (EXIT_DONE if told['fits'] else EXIT_FAILED)
    return told


def plan_and_compare(capfd, config, target, options, fits):
    told = figures(capfd, config, target, *options)
    assert not told['is_estimate']
    assert told['why_estimated'] is None
    assert told['fits'] == fits
    estimated = figures(capfd, config, target, *options, '--estimate')
    assert estimated['is_estimate']
    assert estimated['fits'] == fits
    # Of a small program a tenth is less than what compilers keep for themselves.
    assert estimated['memory']['total'] == pytest.approx(told['memory']['total'], rel=0.1, abs=0.25 * 2**30)
    return told, estimated


@pytest.mark.parametrize(('config', 'target', 'options', 'fits'), ON_TPU)
def test_tpu(capfd, config, target, options, fits):
    told, estimated = plan_and_compare(capfd, config, target, options, fits)
    if not fits:
        # The advice is of another program, which has been compiled too; pasted, it fits.
        assert figures(capfd, config, target, *options, *told['advice'])['fits']
        return
    # Several devices have sent each other something, and the program is of as many products as the formula says.
    assert told['transfers']
    assert told['flops']['compiled'] == pytest.approx(estimated['flops']['executed'], rel=0.1)


@pytest.mark.parametrize(('config', 'target', 'options', 'fits'), ON_GPU)
def test_gpu(capfd, config, target, options, fits):
    try:
        check_compiler(parse_target(target))
    except CompilerMissingError as error:
        pytest.fail(f'{error}; launch/test.sh installs it')
    told, estimated = plan_and_compare(capfd, config, target, options, fits)
    assert told['flops']['compiled'] < estimated['flops']['executed'], 'attention is in a kernel of its own'
    if not fits:
        assert told['memory']['total'] - told['memory']['available'] > 2**30
