"""Number of splash attention kernels in steps compiled for absent TPUs.

The TPU compiler needs ten CPU-seconds for each program.
"""

import dataclasses
from importlib.util import find_spec

import pytest

from maxlm.planning.compiled.program import read_program
from maxlm.planning.targets import parse_target, target_layout
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state
from tests.small import small_config

pytestmark = pytest.mark.skipif(not find_spec('libtpu'), reason="needs the compiler for TPUs: pip install 'maxlm[tpu]'")
LAYERS, MICRO_BATCHES = 3, 2
RUNS = LAYERS * MICRO_BATCHES


def kernels(spec, remat):
    """Returns the executions of each kernel in a step of a small Llama with loops over layers and micro-batches."""
    target = parse_target(spec)
    config = small_config(
        num_devices=target.num_devices,
        model__family='llama',
        model__num_layers=LAYERS,
        model__vocab_size=64,
        model__dim=256,
        model__num_heads=4,
        model__num_kv_heads=2,
        model__dtype='bfloat16',
        model__remat_policy=remat,
        data__seq_len=256,
        train__global_batch_size=MICRO_BATCHES * target.num_devices,
        train__per_device_batch_size=2,
        mesh__tensor=2,
    )
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention='splash'))
    layout = target_layout(target, config.mesh)
    step = compile_train_step(config, layout, abstract_state(config, layout)).step
    found = read_program(step.as_text(), config.mesh.sizes).kernels
    return {name.removeprefix('tpu_custom_call splash_mha_'): count for name, count in found.items()}


@pytest.mark.parametrize(
    'spec',
    [
        'v5e:2x2',
        pytest.param('v4:2x2x1', marks=pytest.mark.nightly),
        pytest.param('v5p:2x2x1', marks=pytest.mark.nightly),
    ],
)
def test_the_forward_kernel_runs_once_if_its_results_are_kept(spec):
    backward = {'dq_segmented_no_residuals': RUNS, 'dkv_segmented_no_residuals': RUNS}
    assert kernels(spec, 'dots') == {'fwd_segmented_residuals': RUNS, **backward}


@pytest.mark.nightly
def test_the_forward_kernel_runs_again_if_nothing_is_kept():
    assert kernels('v4:2x2x1', 'full')['fwd_segmented_residuals'] == 2 * RUNS
