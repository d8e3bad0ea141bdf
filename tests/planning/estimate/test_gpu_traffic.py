"""Estimated memory traffic of GPUs against compiled programs; `python -m benchmarks.plan_programs` records them."""

import dataclasses
import json

import numpy as np
import pytest

from benchmarks.plan_programs import PROGRAMS, is_fitted, is_present, resolve_for
from maxlm.planning.estimate.gpu_traffic import estimate_gpu_traffic
from maxlm.planning.targets import parse_target
from tests.conftest import ROOT
from tests.planning.estimate.test_collectives import program_config

COUNTED = [entry for entry in json.loads((ROOT / PROGRAMS).read_text()) if 'traffic' in entry]


def error_of(entry):
    """Returns the relative error of an estimate, and True if the coefficients are fitted to this program."""
    target = parse_target(entry['target'])
    config = resolve_for(target, entry['config'], entry['overrides'])
    return estimate_gpu_traffic(config) / entry['traffic'] - 1, is_fitted(config, target)


@pytest.fixture(scope='module')
def errors():
    found = [error_of(entry) for entry in COUNTED if is_present(entry)]
    return np.array([error for error, fitted in found if fitted])


def test_estimates_match_the_programs(errors):
    assert len(errors) >= 10
    assert np.median(np.abs(errors)) < 0.05
    assert np.abs(errors).max() < 0.20


def test_programs_of_other_kinds_have_larger_errors():
    """FP8, ring attention, pipelines, experts, and mask arrays of GPUs before Hopper."""
    others = [error for error, fitted in map(error_of, COUNTED) if not fitted]
    assert max(map(abs, others)) < 0.60


# Program → GB that it moves more than the same program without modules and teacher.
ADDED = {'modules': 2.87, 'modules, all saved': 2.50, 'teacher': 1.57, 'teacher, ZeRO-1': 1.83}


@pytest.mark.parametrize('name', ADDED)
def test_modules_and_teachers_add_the_traffic_of_the_programs(name):
    config = program_config(name)
    plain = dataclasses.replace(config, teacher=None, model=dataclasses.replace(config.model, mtp_depth=0))
    added = estimate_gpu_traffic(config) - estimate_gpu_traffic(plain)
    assert added / 1e9 == pytest.approx(ADDED[name], rel=0.20)


def test_mxfp8_adds_the_traffic_of_the_programs():
    programs = {entry['overrides'][-1]: entry for entry in COUNTED if entry['target'] == 'b200:8'}
    counted, estimated = {}, {}
    for precision in ('mxfp8', 'default'):
        entry = programs[f'model.matmul_precision={precision}']
        config = resolve_for(parse_target(entry['target']), entry['config'], entry['overrides'])
        counted[precision], estimated[precision] = entry['traffic'], estimate_gpu_traffic(config)
    added = counted['mxfp8'] - counted['default']
    assert estimated['mxfp8'] - estimated['default'] == pytest.approx(added, rel=0.10)
    # Control: the formula of FP8 counts less than half of it.
    fp8 = dataclasses.replace(config, model=dataclasses.replace(config.model, matmul_precision='fp8'))
    assert estimate_gpu_traffic(fp8) - estimated['default'] < 0.6 * added


def test_norm_kernels_save_the_traffic_of_the_programs():
    recorded = json.loads((ROOT / 'benchmarks/results/norm_kernel_programs.json').read_text())['programs']
    saved = {}
    for entry in recorded:
        target = parse_target(entry['target'])
        for kernel in ('xla', 'pallas'):
            config = resolve_for(
                target, str(ROOT / entry['config']), (*entry['overrides'], f'model.norm_kernel={kernel}')
            )
            saved[kernel] = estimate_gpu_traffic(config)
        before, after = (entry[kernel]['traffic'] for kernel in ('xla', 'pallas'))
        assert saved['xla'] - saved['pallas'] == pytest.approx(before - after, rel=0.3), entry['config']


def test_an_unrolled_program_moves_less_than_a_loop():
    """Control: the estimate depends on the settings that the programs differ in."""
    target = parse_target('h100:1')

    def traffic(*overrides):
        return estimate_gpu_traffic(resolve_for(target, str(ROOT / 'configs/1b.py'), overrides))

    assert traffic('model.scan_layers=true') > 2 * traffic()
    assert traffic('model.remat_policy=dots') > 1.3 * traffic()
    assert traffic('model.vocab_size=50001') > 1.05 * traffic()
    # Only chunks of an unaligned vocabulary copy the head.
    assert traffic('model.vocab_size=50001', 'train.loss_chunk_tokens=512') > 1.5 * traffic('model.vocab_size=50001')
    assert traffic('train.loss_chunk_tokens=512') == traffic()
    assert traffic('mesh.host_offload=optimizer') == traffic()
