"""Tests estimated step times: properties of all estimates, and single transfers by hand."""

import dataclasses

import pytest

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.errors import InputError
from maxlm.hardware.chips import CHIPS
from maxlm.planning.estimate.roofline import (
    EFFICIENCIES,
    LIKE,
    Efficiency,
    StepTime,
    efficiency_of,
    mfu,
    step_time,
    tokens_per_second,
    transfer_time,
)
from maxlm.planning.estimate.transfers import Transfer
from maxlm.planning.estimate.work import estimate_work
from tests.conftest import ROOT

CHIP = {chip.name: chip for chip in reversed(CHIPS)}
H100, V5E = CHIP['h100'], CHIP['v5e']
# Full efficiency, so that times can be computed by hand.
IDEAL = Efficiency(1.0, 1.0, 1.0, links=1.0, network=1.0, overlap=0.0, latency=0.0, per_step=0.0)
WITHIN = {'replica': 1, 'fsdp': 1, 'data': 1, 'tensor': 1}

SMALL = 'train.per_device_batch_size=4'


def planned(*overrides, devices=8, spec='1b.py', platform='gpu'):
    config = load(str(ROOT / 'configs' / spec), overrides)
    return resolve(config, platform=platform, num_devices=devices, vocab_size=1, windows=1)


def timed(config, chip=H100, *, devices=8, islands=1, efficiency=None):
    return step_time(
        estimate_work(config),
        chip,
        num_devices=devices,
        num_islands=islands,
        mesh_sizes=config.mesh.sizes,
        dtype=config.model.dtype,
        efficiency=efficiency,
    )


@pytest.mark.parametrize(
    'resource', ['tflops', 'memory_bandwidth', 'link_bandwidth', 'network_bandwidth', 'host_bandwidth']
)
def test_more_of_a_resource_is_never_slower(resource):
    config = planned('mesh.replica=2', 'mesh.zero_stage=2', 'mesh.host_offload=optimizer', devices=16)
    faster = dataclasses.replace(H100, **{resource: 2 * getattr(H100, resource)})
    base = timed(config, devices=16, islands=2).total
    assert timed(config, faster, devices=16, islands=2).total < base
    slower = dataclasses.replace(H100, **{resource: 0.5 * getattr(H100, resource)})
    assert timed(config, slower, devices=16, islands=2).total > base


@pytest.mark.parametrize('field', ['products', 'attention', 'memory', 'links', 'network', 'overlap'])
def test_more_efficiency_is_never_slower(field):
    # At ZeRO stage 2, communication overlaps with the micro-batches.
    config = planned('mesh.replica=2', 'mesh.zero_stage=2', 'data.document_mask=false', devices=16)
    low, high = (efficiency_of(H100)._replace(**{field: value}) for value in (0.3, 0.6))
    assert (
        timed(config, devices=16, islands=2, efficiency=high).total
        < timed(config, devices=16, islands=2, efficiency=low).total
    )


def test_products_of_8_bits_take_half_of_the_time():
    work = estimate_work(planned('mesh.fsdp=1', devices=1))._replace(memory_bytes=0.0, attention_flops=0.0)

    def compute(work, chip):
        sizes = {axis: 1 for axis in planned().mesh.sizes}
        return step_time(
            work, chip, num_devices=1, num_islands=1, mesh_sizes=sizes, dtype='bfloat16', efficiency=IDEAL
        ).compute

    in_fp8 = work._replace(fp8_flops=work.flops)
    assert compute(in_fp8, H100) == compute(work, H100) / 2
    assert compute(work._replace(fp8_flops=work.flops / 2), H100) == pytest.approx(compute(work, H100) * 0.75)
    # A GPU without fp8 uses 16-bit matmuls.
    assert compute(in_fp8, CHIP['a100']) == compute(work, CHIP['a100'])


def test_twice_the_chips_take_about_half_of_the_time_at_best():
    for devices in (8, 16, 32, 64):
        once = timed(planned(SMALL, devices=devices), devices=devices, islands=devices // 8).total
        twice = timed(planned(SMALL, devices=2 * devices), devices=2 * devices, islands=devices // 4).total
        # The time is a little less than half only if gradients are accumulated less often, in smaller shards.
        assert 0.48 * once < twice < once
    # Control: over a slow network, more chips are useless once there is a single micro-batch.
    slow = dataclasses.replace(H100, network_bandwidth=1e9)
    near = timed(planned(SMALL, devices=128), slow, devices=128, islands=16).total
    assert (
        timed(planned('train.per_device_batch_size=2', devices=256), slow, devices=256, islands=32).total > 0.8 * near
    )


def test_parts_add_up():
    for config in (planned(), planned('mesh.host_offload=all'), planned('mesh.stage=2')):
        of = timed(config)
        # A step is never shorter than its compute, nor longer than the sum of all components.
        assert of.total >= of.compute / (1 - estimate_work(config).idle)
        assert 0 <= of.hidden <= min(of.communication, of.compute + of.memory)
        assert of.total == pytest.approx(
            of.compute + of.memory + of.communication - of.hidden + of.host + of.idle + of.fixed
        )
    assert timed(planned('mesh.stage=2')).idle > 0
    assert timed(planned()).idle == timed(planned()).host == 0
    assert timed(planned('mesh.host_offload=all')).host > 0


def test_the_limiting_resource_of_a_step():
    assert timed(planned()).bound == 'compute'
    assert timed(planned(), dataclasses.replace(H100, memory_bandwidth=1e11)).bound == 'memory'
    assert timed(planned(), dataclasses.replace(H100, link_bandwidth=1e9)).bound == 'communication'
    assert timed(planned('mesh.host_offload=all'), dataclasses.replace(H100, host_bandwidth=1e8)).bound == 'host'
    assert StepTime(1.0, 0.5, 0.0, 0.0, 0.0, 2.0, 0.0).bound == 'idle'


def transfer(kind, axes, group, size=1e9):
    return Transfer(kind, axes, group, size)


def test_transfers_within_a_node_by_hand():
    # 7/8 of 1 GB at 450 GB/s; an all-reduce takes twice as long.
    assert transfer_time(transfer('all-gather', ('fsdp',), 8), H100, IDEAL, WITHIN, 8) == pytest.approx(0.875 / 450)
    assert transfer_time(transfer('reduce-scatter', ('fsdp',), 8), H100, IDEAL, WITHIN, 8) == pytest.approx(0.875 / 450)
    assert transfer_time(transfer('all-reduce', ('tensor',), 8), H100, IDEAL, WITHIN, 8) == pytest.approx(
        2 * 0.875 / 450
    )
    assert transfer_time(transfer('all-to-all', ('fsdp',), 8), H100, IDEAL, WITHIN, 8) == pytest.approx(0.875 / 450)
    assert transfer_time(transfer('collective-permute', ('fsdp',), 8), H100, IDEAL, WITHIN, 8) == pytest.approx(1 / 450)
    late = IDEAL._replace(latency=1e-3)
    twice = transfer('all-gather', ('fsdp',), 8)._replace(count=2)
    assert transfer_time(twice, H100, late, WITHIN, 8) == pytest.approx(2 * (0.875 / 450 + 1e-3))


def test_transfers_across_nodes_by_hand():
    across = {**WITHIN, 'replica': 4, 'fsdp': 2}
    # With 16 devices in 2 nodes, each interface receives 1/8 of the other node's half.
    gather = transfer('all-gather', ('fsdp',), 16)
    assert transfer_time(gather, H100, IDEAL, across, 8) == pytest.approx(max(1 / 2 / 8 / 50, 0.875 / 450))
    # A device that is alone in its node needs all of the data itself.
    alone = transfer('all-reduce', ('replica',), 4)
    assert transfer_time(alone, H100, IDEAL, across, 8) == pytest.approx(2 * 0.75 / 50)
    ring = transfer('collective-permute', ('replica',), 4)
    assert transfer_time(ring, H100, IDEAL, across, 8) == pytest.approx(1 / 50)


@pytest.mark.parametrize('kind', ['all-gather', 'reduce-scatter', 'all-reduce', 'all-to-all', 'collective-permute'])
@pytest.mark.parametrize('chip', ['h100', 'a100', 'v4', 'v5e'])
def test_a_network_is_slower_than_links(chip, kind):
    slow_transfer = transfer(kind, ('data',), 8)
    slow = transfer_time(slow_transfer, CHIP[chip], IDEAL, {**WITHIN, 'data': 8}, 64)
    assert slow > 2 * transfer_time(slow_transfer, CHIP[chip], IDEAL, WITHIN, 64)


def test_a_torus_by_hand():
    # In a pod of 16 × 16, an axis of 16 is one ring of 90 GB/s, and all 256 chips are two rings.
    gather = transfer('all-gather', ('tensor',), 16)
    assert transfer_time(gather, V5E, IDEAL, WITHIN, 256) == pytest.approx(15 / 16 / 90)
    full_pod = transfer('all-gather', ('fsdp',), 256)
    assert transfer_time(full_pod, V5E, IDEAL, WITHIN, 256) == pytest.approx(255 / 256 / 180)
    # A slice of a pod has no wrap-around links.
    assert transfer_time(transfer('all-gather', ('fsdp',), 64), V5E, IDEAL, WITHIN, 64) == pytest.approx(63 / 64 / 90)
    # Data moves a quarter of the ring on average.
    moved = transfer('all-to-all', ('tensor',), 16, 1e6)
    assert transfer_time(moved, V5E, IDEAL, WITHIN, 256) == pytest.approx(16e6 / 4 / 90e9)


def test_a_mesh_that_cannot_span_islands():
    with pytest.raises(InputError, match='tensor'):
        timed(planned('mesh.tensor=4', 'mesh.fsdp=1', devices=4), devices=4, islands=4)


def test_utilization():
    config = planned()
    speed = tokens_per_second(timed(config).total, global_batch=512, seq_len=2048)
    of = mfu(config, 2048, tokens_per_second=speed, num_devices=8, tflops=H100.tflops)
    assert 0.25 < of.causal < of.full < 0.75
    half = mfu(config, 2048, tokens_per_second=speed / 2, num_devices=8, tflops=H100.tflops)
    assert half == pytest.approx((of.causal / 2, of.full / 2))
    # At full efficiency and with matmuls only, utilization is the ratio of the model's operations to all operations.
    ideal = estimate_work(config)._replace(memory_bytes=0.0, transfers=[])
    seconds = step_time(
        ideal, H100, num_devices=8, num_islands=1, mesh_sizes=config.mesh.sizes, dtype='bfloat16', efficiency=IDEAL
    )
    bound = mfu(
        config,
        2048,
        tokens_per_second=tokens_per_second(seconds.total, global_batch=512, seq_len=2048),
        num_devices=8,
        tflops=H100.tflops,
    )
    assert 0.9 < bound.full < 1


def test_every_chip_has_constants_but_a_cpu():
    for chip in CHIPS:
        of = efficiency_of(chip)
        assert 0 < of.products < 1
        assert 0 <= of.overlap <= 1
    assert set(LIKE.values()) <= set(EFFICIENCIES)
    assert not set(LIKE) & set(EFFICIENCIES)
    with pytest.raises(InputError, match='no efficiency is known'):
        efficiency_of(dataclasses.replace(H100, name='cpu', platform='cpu'))
