"""Tests the evaluation of device bandwidth against reference figures, and its measurement on virtual devices."""

import types

import jax
import numpy as np
import pytest

from maxlm.config.schema import MeshConfig
from maxlm.diagnostics.checks import bandwidth
from maxlm.diagnostics.checks.bandwidth import (
    check_links,
    check_matmul,
    evaluate_links,
    evaluate_matmul,
    expected_bandwidth,
    measure_sum,
)
from maxlm.diagnostics.result import CheckStatus
from maxlm.hardware.chips import find_chip
from maxlm.parallel.layout import make_layout
from tests.diagnostics.machines import CPU, case_on
from tests.small import small_config

EIGHT = {device: 700.0 for device in range(8)}


def test_matmul():
    assert evaluate_matmul(EIGHT, 'bfloat16 products', 989.4, {}).status is CheckStatus.OK
    assert evaluate_matmul({0: 0.1}, 'float32 products', 0.0, {}).message == (
        '0.1 TFLOP/s in float32 products; no datasheet value to compare with'
    )


def test_devices_that_are_all_slow():
    found = evaluate_matmul(dict.fromkeys(EIGHT, 500.0), 'bfloat16 products', 989.4, {3: 'power'})
    assert found.status is CheckStatus.WARNING
    assert '51% of 989.4' in found.message
    assert 'throttled by power' in found.message


def test_one_slow_device_among_many_is_named():
    found = evaluate_matmul({**EIGHT, 5: 600.0}, 'bfloat16 products', 989.4, {5: 'thermal'})
    assert found.status is CheckStatus.WARNING
    assert 'slower: device 5 600 (thermal)' in found.message
    assert evaluate_matmul({**EIGHT, 5: 650.0}, 'bfloat16 products', 989.4, {}).status is CheckStatus.OK


@pytest.fixture
def small(monkeypatch):
    monkeypatch.setattr(bandwidth, 'ROUNDS', 2)
    monkeypatch.setattr(bandwidth, 'PRODUCT_SIZE', {'cpu': 64})
    monkeypatch.setattr(bandwidth, 'SUM_BYTES', {'cpu': 2**16})


def test_matmul_of_this_machine(small):
    found = check_matmul(case_on(CPU))
    assert found.status is CheckStatus.OK
    assert 'TFLOP/s in float32 products' in found.message


def test_links():
    assert evaluate_links('data=8', 3e11, 4.5e11, True).message == (
        'data=8: 300.0 GB/s sent per device in an all-reduce, 67% of 450.0 GB/s'
    )
    assert evaluate_links('data=8', 1e11, 4.5e11, True).status is CheckStatus.WARNING
    assert evaluate_links('data=8', 1.0, 0.0, True).status is CheckStatus.OK
    assert evaluate_links('data=8', 3e11, 4.5e11, False).status is CheckStatus.FAILURE


def test_sums_over_virtual_devices(small):
    found = check_links(case_on(CPU))
    assert found.status is CheckStatus.OK, found
    assert found.message.startswith('fsdp=8: ')
    found = check_links(case_on(CPU, config=small_config(8, mesh__data=4, mesh__fsdp=2)))
    assert 'data=4: ' in found.message
    assert 'fsdp=2: ' in found.message


def test_a_wrong_sum_is_detected(small, monkeypatch):
    mesh = make_layout(MeshConfig(fsdp=8)).mesh
    assert measure_sum(mesh, 'fsdp')[1]
    right = jax.lax.psum
    # One device contributes another value.
    monkeypatch.setattr(jax.lax, 'psum', lambda x, axis: right(x + (jax.lax.axis_index(axis) == 3), axis))
    assert not measure_sum(mesh, 'fsdp')[1]
    assert check_links(case_on(CPU)).status is CheckStatus.FAILURE


def test_one_device_has_no_links(monkeypatch):
    monkeypatch.setattr(jax, 'device_count', lambda: 1)
    assert check_links(case_on(CPU)).status is CheckStatus.SKIPPED


def test_across_nodes_the_network_is_shared():
    chip = find_chip('NVIDIA H100 80GB HBM3')

    def mesh(nodes, gpus):
        devices = [types.SimpleNamespace(slice_index=i // gpus, platform='gpu') for i in range(nodes * gpus)]
        grid = np.array(devices, dtype=object)
        return types.SimpleNamespace(
            devices=grid.reshape(nodes, gpus), axis_names=('data', 'fsdp'), shape={'data': nodes, 'fsdp': gpus}
        )

    assert expected_bandwidth(chip, mesh(2, 8), 'fsdp') == chip.link_bandwidth
    assert expected_bandwidth(chip, mesh(2, 8), 'data') == chip.network_bandwidth
    full = types.SimpleNamespace(
        devices=mesh(2, 8).devices.reshape(1, 16), axis_names=('data', 'fsdp'), shape={'data': 1, 'fsdp': 16}
    )
    assert expected_bandwidth(chip, full, 'fsdp') == min(chip.link_bandwidth, 8 * chip.network_bandwidth)
