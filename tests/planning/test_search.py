"""Tests the search for a layout that fits: its candidates, its preferences, and the compiler's final decision."""

import dataclasses
from functools import partial

import pytest

from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import AUTO
from maxlm.errors import InputError
from maxlm.planning.forecast import estimate
from maxlm.planning.machine import Machine, usable_memory
from maxlm.planning.search import Override, candidate_meshes, choose_micro_batch, search_layouts, verify_by_compiling
from maxlm.planning.targets import parse_target
from tests.conftest import ROOT


def machine_of(spec, share=1.0):
    target = parse_target(spec)
    return Machine(target, int(share * usable_memory(target.chip)))


def resolver(machine):
    target = machine.target
    return partial(resolve, platform=target.chip.platform, num_devices=target.num_devices, vocab_size=32, windows=1)


def config_of(spec='code.py:7b', *overrides):
    return load(f'{ROOT}/configs/{spec}', list(overrides))


def with_changes(config, changes):
    """Returns the config with the overrides applied."""
    for key, value in changes:
        section, name = key.split('.')
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


def test_layouts_fit_and_are_sorted_by_speed():
    machine = machine_of('h100:8')
    config = config_of()
    found = search_layouts(config, machine, resolver(machine))
    assert len(found) > 20
    assert all(candidate.forecast.fits for candidate in found)
    times = [candidate.forecast.time.total for candidate in found]
    assert times == sorted(times)
    # Applying the overrides gives the promised result.
    for candidate in found[:: len(found) // 5]:
        resolved = resolver(machine)(with_changes(config, candidate.changes))
        again = estimate(resolved, machine)
        assert again.needed == candidate.forecast.needed
        assert again.time == candidate.forecast.time
    # The config's own layout is a candidate but not the fastest: it remats everything although memory is available.
    (own,) = [candidate for candidate in found if not candidate.changes]
    assert own.forecast.time.total > times[0]
    assert any(change.key == 'model.remat_policy' for change in found[0].changes)


def test_less_memory_leaves_slower_layouts():
    config, large, small = config_of(), machine_of('h100:8'), machine_of('h100:8', share=0.25)
    fastest = [search_layouts(config, machine, resolver(machine))[0].forecast for machine in (large, small)]
    assert fastest[1].needed <= small.available < fastest[0].needed
    assert fastest[1].time.total > fastest[0].time.total


def test_a_run_is_changed_only_if_nothing_else_fits():
    changing = {'optimizer.moment_dtype', 'mesh.host_offload'}
    config, machine = config_of(), machine_of('h200:1', share=0.95)
    # 6.7 billion parameters take 108 GB with moments and a gradient, and accumulating gradients needs another 27 GB.
    found = search_layouts(config, machine, resolver(machine))
    assert found
    assert all(changing & {change.key for change in candidate.changes} for candidate in found)
    small = search_layouts(config_of('1b.py'), machine, resolver(machine))
    assert not any(changing & {change.key for change in candidate.changes} for candidate in small)
    # Nothing is found if even host offload does not help.
    tiny = machine_of('h100:1', share=0.001)
    assert search_layouts(config, tiny, resolver(tiny)) == []


def test_meshes_keep_tensor_within_a_node_and_use_all_devices():
    target = parse_target('h100:8x4')
    meshes = list(candidate_meshes(config_of(), target))[1:]
    sizes = [mesh.sizes for mesh in meshes]
    assert all(mesh['tensor'] <= 8 for mesh in sizes)
    assert {mesh['replica'] for mesh in sizes} == {1, 4}
    assert all(mesh['context'] == 1 for mesh in sizes)
    long = config_of('code.py:7b', 'data.seq_len=16384')
    assert max(mesh.context for mesh in candidate_meshes(long, target)) == 8
    product = 1
    for size in sizes[-1].values():
        product *= size
    assert product == 32
    assert len(set(meshes)) == len(meshes)


class Compiler:
    """Fake compiler that reports a multiple of the estimated memory."""

    def __init__(self, machine, factor):
        self.machine, self.factor, self.calls = machine, factor, 0

    def __call__(self, config):
        self.calls += 1
        forecast = estimate(config, self.machine)
        more = int((self.factor - 1) * forecast.needed)
        memory = forecast.memory._replace(temporary=forecast.memory.temporary + more, is_estimate=False)
        return forecast._replace(memory=memory)


def test_the_compiler_decides():
    machine = machine_of('h100:8')
    found = search_layouts(config_of(), machine, resolver(machine))
    exact, overestimating = Compiler(machine, 1.0), Compiler(machine, 1.3)
    assert verify_by_compiling(found, exact).changes == found[0].changes
    assert exact.calls == 1
    second = verify_by_compiling(found, overestimating)
    assert second.forecast.fits
    assert not second.forecast.memory.is_estimate
    assert second.changes != found[0].changes
    # Candidates as large as a rejected one are not compiled.
    assert overestimating.calls <= 5
    assert verify_by_compiling(found, Compiler(machine, 100.0)) is None


def test_the_largest_micro_batch():
    machine = machine_of('h100:8')
    auto = config_of('1b.py', 'train.per_device_batch_size=auto')
    assert auto.train.per_device_batch_size == AUTO
    chosen = choose_micro_batch(auto, machine, resolver(machine), Compiler(machine, 1.0)).train.per_device_batch_size
    needed = {
        size: estimate(
            resolver(machine)(with_changes(auto, [Override('train.per_device_batch_size', size)])), machine
        ).needed
        for size in (chosen, 2 * chosen)
    }
    assert needed[chosen] <= machine.available < needed[2 * chosen]
    smaller = machine_of('h100:8', share=0.5)
    assert (
        choose_micro_batch(auto, smaller, resolver(smaller), Compiler(smaller, 1.0)).train.per_device_batch_size
        < chosen
    )
    # This program is larger than its estimate.
    assert (
        choose_micro_batch(auto, machine, resolver(machine), Compiler(machine, 2.0)).train.per_device_batch_size
        < chosen
    )
    none = machine_of('h100:8', share=0.01)
    with pytest.raises(InputError, match=r'train\.per_device_batch_size=auto: one sequence per device needs .* GiB'):
        choose_micro_batch(auto, none, resolver(none), Compiler(none, 1.0))


def test_auto_reports_errors_of_the_config():
    machine = machine_of('h100:8')
    odd = config_of('1b.py', 'train.per_device_batch_size=auto', 'train.global_batch_size=12')
    with pytest.raises(InputError, match=r'train\.global_batch_size=12 cannot be split over 8'):
        choose_micro_batch(odd, machine, resolver(machine), Compiler(machine, 1.0))


def test_experts_are_split_within_a_node():
    target = machine_of('h100:8x2').target
    meshes = list(candidate_meshes(config_of('moe.py:8x1b'), target))
    assert {mesh.expert for mesh in meshes} == {1, 2, 4, 8}
    assert all(mesh.expert * mesh.tensor * mesh.context <= 8 for mesh in meshes)
    # Control: a dense model has no such axis.
    assert {mesh.expert for mesh in candidate_meshes(config_of('code.py:7b'), target)} == {1}
