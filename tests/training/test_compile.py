"""Tests the step compiled from shapes alone: its memory, and its execution on real arrays."""

import math
import types
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from maxlm.parallel.layout import make_layout
from maxlm.training import compile as compile_module
from maxlm.training.batch import BATCH_TYPES
from maxlm.training.compile import CompiledStep, compile_train_step, device_options
from maxlm.training.state import abstract_state, init_state
from tests.small import small_batch, small_config, small_layout


class Program:
    """Fake compiled program with memory figures."""

    def __init__(self, platform='gpu', **sizes):
        self._sizes = sizes
        device = SimpleNamespace(platform=platform)
        self.input_shardings = [SimpleNamespace(device_set=[device])]

    def memory_analysis(self):
        names = ('argument', 'temp', 'host_argument', 'host_temp')
        figures = {f'{name}_size_in_bytes': self._sizes.get(name, 0) for name in names}
        return SimpleNamespace(**figures, peak_memory_in_bytes=self._sizes.get('peak', 0)) if self._sizes else None


@pytest.mark.parametrize(
    ('platform', 'sizes', 'memory', 'total'),
    [
        ('gpu', {'argument': 30, 'temp': 12, 'peak': 40}, {'state': 30, 'temporary': 12}, 42),
        # On a TPU the peak must fit, if the compiler reports it.
        ('tpu', {'argument': 30, 'temp': 12, 'peak': 40}, {'state': 30, 'temporary': 12}, 40),
        ('tpu', {'argument': 30, 'temp': 12}, {'state': 30, 'temporary': 12}, 42),
        (
            'gpu',
            {'argument': 30, 'temp': 12, 'host_argument': 5, 'host_temp': 2},
            {'state': 30, 'temporary': 12, 'host': 7},
            42,
        ),
        ('gpu', {}, None, None),
    ],
)
def test_memory_of_a_program(platform, sizes, memory, total):
    compiled = CompiledStep(Program(platform, **sizes), 1.0)
    assert compiled.platform == platform
    assert compiled.memory_bytes() == memory
    assert compiled.total_bytes() == total


def test_the_compiler_receives_device_options_and_ours(monkeypatch):
    given = {}

    class Jitted:
        def __init__(self, function, donate_argnums, out_shardings):
            given['donated'] = donate_argnums

        def lower(self, abstract, batch):
            given['batch'] = batch
            return self

        def compile(self, compiler_options):
            given['options'] = compiler_options
            return Program(argument=1)

    monkeypatch.setattr(compile_module.jax, 'jit', Jitted)
    monkeypatch.setattr(compile_module, 'make_train_step', lambda *_: None)
    config = small_config()
    layout = make_layout(config.mesh, jax.devices()[:1])
    monkeypatch.setitem(compile_module.CPU_OPTIONS, 'both', 'b')
    monkeypatch.setitem(compile_module.CPU_OPTIONS, 'of_device', 'a')
    given_state = {'step': jax.ShapeDtypeStruct((), 'int32', sharding=layout.named())}
    compile_train_step(config, layout, given_state, 2, options={'both': 'ours'})
    assert given['options'] == {'of_device': 'a', 'both': 'ours'}
    # The level of optimization in XLA_FLAGS of the tests takes precedence.
    assert 'xla_backend_optimization_level' in compile_module.CPU_OPTIONS
    assert given['donated'] == 0
    shapes = {name: (x.shape, x.dtype) for name, x in given['batch'].items()}
    assert shapes.pop('sources') == ((8,), np.int32)
    assert shapes == {name: ((8, 16), kind) for name, kind in BATCH_TYPES.items()}


def test_flags_of_the_environment_replace_options_of_gpus(monkeypatch):
    gpu = types.SimpleNamespace(platform='gpu', device_kind='NVIDIA H100 80GB HBM3')
    monkeypatch.setenv('XLA_FLAGS', '--xla_other=1')
    assert device_options(gpu) == {'xla_gpu_enable_dynamic_slice_fusion': False}
    monkeypatch.setenv('XLA_FLAGS', '--xla_other=1 --xla_gpu_enable_dynamic_slice_fusion=true')
    assert device_options(gpu) == {}


def bytes_on_a_device(leaf):
    return math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize


@pytest.fixture(scope='module')
def compiled_on_eight():
    # The EMA starts as the parameters: a donated state must not contain an array twice.
    config = small_config(num_devices=8, model__num_layers=1, optimizer__ema_decay=0.9)
    layout = small_layout(config)
    abstract = abstract_state(config, layout)
    return config, layout, abstract, compile_train_step(config, layout, abstract)


def test_memory_of_state_and_batch(compiled_on_eight):
    config, _, abstract, compiled = compiled_on_eight
    memory = compiled.memory_bytes()
    state = sum(map(bytes_on_a_device, jax.tree.leaves(abstract)))
    batch = len(BATCH_TYPES) * 4 * config.train.global_batch_size * config.data.seq_len // 8
    assert memory['state'] == pytest.approx(state + batch, rel=0.02)
    assert memory['temporary'] > 0
    # Control: the figure differs from the state on a single device and from the state without moments.
    total = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(abstract))
    params = sum(map(bytes_on_a_device, jax.tree.leaves(abstract.params)))
    assert memory['state'] < 0.5 * total
    assert memory['state'] > 2 * params


def test_the_program_runs_on_real_arrays(compiled_on_eight):
    config, layout, abstract, compiled = compiled_on_eight
    assert compiled.seconds > 0
    host_batch = small_batch(config)
    batch = layout.put_batch(host_batch, config.train.global_batch_size)
    assert {name: x.dtype for name, x in batch.items()} == BATCH_TYPES
    given = init_state(config, layout)
    state, metrics = compiled.step(given, batch)
    assert float(metrics['tokens']) == host_batch['weights'].sum()
    assert abs(float(metrics['loss']) - math.log(61)) < 0.2
    # The new state has the shardings of the input, whose buffers were donated.
    assert jax.tree.all(jax.tree.map(lambda leaf, shape: leaf.sharding == shape.sharding, state, abstract))
    assert given.params['embedding'].is_deleted()
    assert given.ema['embedding'].is_deleted()
    before = np.asarray(state.params['embedding'])
    state, _ = compiled.step(state, batch)
    assert int(state.step) == 2
    assert not np.array_equal(state.params['embedding'], before)
