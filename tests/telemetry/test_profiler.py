"""Tests profiles: traced steps, operation times, and failures that do not stop a run."""

import jax
import jax.numpy as jnp
import pytest

from maxlm.config.sections.monitoring import ProfileConfig
from maxlm.telemetry import profiler
from maxlm.telemetry.profiler import Operation, Profile, kind_of, newest_trace, operations, self_times


def trace(workdir, work, *, steps=range(1, 8), config=None):
    """Runs `work` for each step and traces steps 3 and 4, unless `config` selects other steps."""
    tracer = Profile(config or ProfileConfig(start_step=3, num_steps=2), workdir)
    traced = []
    for step in steps:
        if tracer.should_start(step):
            tracer.start(step)
            traced.append(step)
        work()
        if tracer.should_stop(step):
            tracer.stop(step)
            traced.append(step)
    tracer.close()
    return traced


def test_configured_steps_are_traced(tmp_path, caplog):
    @jax.jit
    def step(x):
        return jax.lax.fori_loop(0, 4, lambda _, x: jnp.tanh(x @ x), x)

    x = jnp.ones((64, 64))
    step(x).block_until_ready()
    with caplog.at_level('INFO', logger='maxlm'):
        assert trace(tmp_path, lambda: step(x).block_until_ready()) == [3, 4]
    found = operations(newest_trace(tmp_path))
    by_name = {operation.name: operation for operation in found}
    # Each of two steps runs a loop of four iterations on one device.
    assert by_name['while'].num_runs == 2
    tanh = by_name[next(name for name in by_name if 'tanh' in name)]
    assert tanh.num_runs == 8
    assert found == sorted(found, key=lambda operation: -operation.seconds)
    assert all(operation.seconds >= 0 for operation in found)
    headline, *lines = caplog.messages
    assert headline.startswith('profile of steps 3 to 4: ')
    assert len(lines) == min(len(found), profiler.TOP)
    assert lines[0].endswith(found[0].name)
    assert next(tmp_path.rglob('*.trace.json.gz')).stat().st_size


@pytest.mark.parametrize(
    ('config', 'steps', 'traced'),
    [
        (ProfileConfig(), range(1, 9), []),
        (ProfileConfig(start_step=1, num_steps=1), range(1, 9), [1, 1]),
        # A run that resumes after the traced steps traces nothing.
        (ProfileConfig(start_step=3, num_steps=2), range(4, 9), []),
        # A run that rolls back does not trace again.
        (ProfileConfig(start_step=3, num_steps=2), [1, 2, 3, 4, 2, 3, 4], [3, 4]),
        # The run ends between the traced steps.
        (ProfileConfig(start_step=3, num_steps=5), range(1, 5), [3]),
    ],
)
def test_start_and_stop_of_the_trace(tmp_path, monkeypatch, config, steps, traced):
    calls = []
    monkeypatch.setattr(jax.profiler, 'start_trace', lambda *_, **__: calls.append('start'))
    monkeypatch.setattr(jax.profiler, 'stop_trace', lambda: calls.append('stop'))
    assert trace(tmp_path, lambda: None, steps=steps, config=config) == traced
    assert calls == (['start', 'stop'] if traced else [])


def test_failure_is_logged_and_does_not_stop_the_run(tmp_path, monkeypatch, caplog):
    def fail(*_, **__):
        raise RuntimeError('another profile\nis in progress')

    monkeypatch.setattr(jax.profiler, 'start_trace', fail)
    assert trace(tmp_path, lambda: None) == [3]
    assert caplog.messages == ['profile.start_step=3: profiling failed (RuntimeError: another profile is in progress)']


def test_self_times_exclude_nested_operations():
    # A loop of 10 ns contains operations of 3 ns and 4 ns; the second contains one of 1 ns. One of 2 ns follows.
    events = [('loop', 0, 10), ('a.1', 1, 3), ('a.2', 5, 4), ('b', 6, 1), ('b', 12, 2)]
    assert sorted(self_times(events)) == [('a.1', 3), ('a.2', 3), ('b', 1), ('b', 2), ('loop', 3)]
    assert sum(time for _, time in self_times(events)) == 12


@pytest.mark.parametrize(
    ('name', 'kind'),
    [
        ('fusion.12', 'fusion'),
        ('loop_add_fusion_3', 'loop_add_fusion'),
        ('%while.5.clone.1', 'while'),
        ('nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT', 'nvjet_hsh_128x256_64x4_1x2_h_bz_coopA_NNT'),
        ('7', '7'),
    ],
)
def test_kind_of_an_operation(name, kind):
    assert kind_of(name) == kind


class Line:
    def __init__(self, name, *events):
        self.name = name
        self.events = [
            type('Event', (), dict(zip(('name', 'start_ns', 'duration_ns', 'stats'), event, strict=True)))
            for event in events
        ]


class Plane:
    def __init__(self, name, *lines):
        self.name, self.lines = name, lines


@pytest.mark.parametrize(
    ('planes', 'found'),
    [
        # On a TPU only the line of operations counts; on a GPU every stream counts.
        (
            [Plane('/device:TPU:0', Line('Steps', ('1', 0, 9, [])), Line('XLA Ops', ('fusion.1', 0, 4e9, [])))],
            [Operation('fusion', 4.0, 1)],
        ),
        (
            [
                Plane(
                    '/device:GPU:0', Line('Stream #1', ('gemm', 0, 2e9, [])), Line('Stream #2', ('nccl', 0, 3e9, []))
                ),
                Plane('/device:GPU:1', Line('Stream #1', ('gemm', 0, 2e9, []))),
            ],
            [Operation('gemm', 4.0, 2), Operation('nccl', 3.0, 1)],
        ),
        # On a CPU, only events of an HLO operation count.
        (
            [Plane('/host:CPU', Line('t', ('dot.3', 0, 1e9, [('hlo_op', 'dot.3')]), ('python', 0, 9e9, [])))],
            [Operation('dot', 1.0, 1)],
        ),
    ],
)
def test_operations_of_each_platform(monkeypatch, tmp_path, planes, found):
    data = type('Data', (), {'planes': planes})
    monkeypatch.setattr(jax.profiler.ProfileData, 'from_file', lambda path: data, raising=False)
    assert operations(tmp_path) == found
