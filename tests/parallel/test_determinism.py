"""Tests the options of deterministic runs: what each platform gets, and the program that the GPU compiler creates."""

import json
import os

import pytest

from maxlm.parallel.determinism import deterministic_options, exclude_switch_sums
from tests.gpu_compiler import needs_gpu_compiler, run_python
from tests.small import small_config

# Prints the scatters of the step's program without and with train.deterministic, and its kernels for products.
COMPILE = """
import dataclasses, json, re, jax
jax.config.update('jax_platforms', 'cpu')
from maxlm.training.compile import compile_train_step
from maxlm.planning.targets import compiling_for, parse_target, target_layout
from maxlm.training.state import abstract_state
from tests.small import small_config

target = parse_target('h100:1')
found = []
for deterministic in (False, True):
    config = small_config(train__deterministic=deterministic, model__dtype='bfloat16', model__dim=128)
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, attention='cudnn_mask'))
    layout = target_layout(target, config.mesh)
    with compiling_for(target):
        step = compile_train_step(config, layout, abstract_state(config, layout)).step
    text = step.as_text()
    scatters = re.findall(r'= f32.* scatter\\(.*', text)
    found.append({
        'scatters': len(scatters),
        'atomic': sum('unique_indices=true' not in line for line in scatters),
        'triton': len(re.findall('"kind":"__triton\\\\w*gemm', text)),
        'attention': text.count('__cudnn$fmhaSoftmaxBackward') + text.count('__cudnn$fmhaScaleBiasSoftmaxBackward'),
    })
print(json.dumps(found))
"""


@pytest.mark.parametrize(
    ('platform', 'deterministic', 'is_empty'),
    [('gpu', True, False), ('gpu', False, True), ('cpu', True, True), ('tpu', True, True)],
)
def test_only_gpus_need_options(platform, deterministic, is_empty):
    config = small_config(train__deterministic=deterministic)
    assert (deterministic_options(config, platform) == {}) is is_empty


@pytest.mark.parametrize(('given', 'expected'), [(None, '0'), ('1', '1')])
def test_sums_in_switches_are_disabled_unless_the_user_decides(monkeypatch, given, expected):
    monkeypatch.setenv('NCCL_NVLS_ENABLE', given or '')
    if given is None:
        monkeypatch.delenv('NCCL_NVLS_ENABLE')
    exclude_switch_sums(small_config())
    assert os.environ.get('NCCL_NVLS_ENABLE') == given
    exclude_switch_sums(small_config(train__deterministic=True))
    assert os.environ['NCCL_NVLS_ENABLE'] == expected


@needs_gpu_compiler
def test_the_program_for_a_gpu_has_no_atomics():
    done = run_python('-c', COMPILE)
    assert done.returncode == 0, done.stderr
    default, deterministic = json.loads(done.stdout.splitlines()[-1])
    # Without the options, the sum of the embedding's gradients is a scatter with atomic additions.
    assert default['atomic'] == default['scatters'] > 0
    assert deterministic['atomic'] == 0 < deterministic['scatters']
    assert default['triton'] > 0 == deterministic['triton']
    assert default['attention'] == deterministic['attention'] > 0
