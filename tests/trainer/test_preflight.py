"""Tests preflight: compilation, errors with a suggestion if a step does not fit, and the choice of a micro-batch."""

import dataclasses
from functools import partial

import jax
import pytest

from maxlm.cli.runs import train
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import AUTO
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.planning import forecast, machine
from maxlm.trainer import preflight
from maxlm.trainer import run as trainer_run
from maxlm.trainer.preflight import compile_step
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import arguments
from tests.conftest import ROOT
from tests.messages import assert_error_line

SMALL = (
    'model.num_layers=2',
    'model.dim=32',
    'model.num_heads=2',
    'data.seq_len=64',
    'train.global_batch_size=64',
    'metrics.peak_tflops=1',
)


@pytest.fixture(scope='module', autouse=True)
def _compiled_once():
    """Caches the compiled step of each config for the tests of this module."""
    compile_train_step, cache = forecast.compile_train_step, {}

    def compile_once(config, layout, *rest, **options):
        key = repr((config, layout.mesh, rest[1:], options))
        if key not in cache:
            cache[key] = compile_train_step(config, layout, *rest, **options)
        return cache[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, 'compile_train_step', compile_once)
        yield


@pytest.fixture
def memory(monkeypatch):
    """Returns a function that sets the memory of a device in bytes."""

    def set_memory(size):
        monkeypatch.setattr(machine, 'usable_memory', lambda chip: size)

    return set_memory


def run_preflight(*overrides, first_step=0):
    config = load(f'{ROOT}/configs/tiny.py', [*SMALL, *overrides])
    resolver = partial(resolve, platform='cpu', num_devices=jax.device_count(), vocab_size=256, windows=100)
    return compile_step(config, resolver, num_sources=0, first_step=first_step)


def test_fitting_config_is_compiled():
    found = run_preflight('train.per_device_batch_size=2')
    assert found.forecast.fits
    assert not found.forecast.memory.is_estimate
    assert found.forecast.compiled is not None
    assert found.config.train.per_device_batch_size == 2
    assert found.layout.mesh.size == jax.device_count()


@pytest.fixture
def estimated(monkeypatch):
    """Replaces compilation of a step by an estimate."""
    monkeypatch.setattr(
        preflight, 'compile_for', lambda config, machine, *_, **options: forecast.estimate(config, machine)
    )


def test_sequence_length_of_the_first_step_is_compiled(estimated):
    growing = 'data.seq_len_schedule=((32,0.5),)'
    assert run_preflight(growing).forecast.config.data.seq_len == 32
    assert run_preflight(growing, first_step=399).forecast.config.data.seq_len == 64


def test_error_suggests_a_config_that_fits(memory):
    before = run_preflight('train.per_device_batch_size=8').forecast
    # Another batch does not change the memory of the process.
    available = before.process + 0.6 * before.memory.total
    memory(int(available))
    with pytest.raises(InputError, match=r'more than the available .*MiB; this would fit: --config\.') as info:
        run_preflight('train.per_device_batch_size=8')
    suggestion = str(info.value).partition('this would fit: ')[2].replace('--config.', '').split()
    found = run_preflight('train.per_device_batch_size=8', *suggestion)
    assert found.forecast.needed <= available


def test_error_has_no_suggestion_if_nothing_fits(memory, estimated):
    memory(1000)
    with pytest.raises(InputError, match='none of the layouts tried fits'):
        run_preflight('train.per_device_batch_size=8')


def test_auto_chooses_the_largest_batch_that_fits(memory, estimated):
    assert run_preflight('train.per_device_batch_size=auto').config.train.per_device_batch_size == 8
    needed = {size: run_preflight(f'train.per_device_batch_size={size}').forecast.needed for size in (1, 2, 4)}
    for size in needed:
        memory(needed[size] + 1)
        assert run_preflight('train.per_device_batch_size=auto').config.train.per_device_batch_size == size


def test_auto_reduces_the_batch_if_the_compiled_step_does_not_fit(memory):
    memory(int(1.02 * run_preflight('train.per_device_batch_size=2').forecast.needed))
    assert run_preflight('train.per_device_batch_size=auto').config.train.per_device_batch_size in (1, 2)


@pytest.mark.parametrize(
    'sizes',
    [
        ('model.dim=1000000', 'model.num_heads=1'),
        ('model.vocab_size=2000000000',),
        ('model.num_layers=1000', 'model.dim=65536', 'model.scan_layers=True'),
        ('data.seq_len=10000000', 'train.global_batch_size=8'),
        ('model.num_heads=65536', 'model.head_dim=65536'),
    ],
)
def test_oversized_configs_are_rejected_before_the_step_is_traced(sizes, monkeypatch):
    def fail(*arguments, **options):
        raise AssertionError('traced')

    monkeypatch.setattr(jax, 'jit', fail)
    config = load(f'{ROOT}/configs/tiny.py', [*SMALL, *sizes])
    resolver = partial(resolve, platform='cpu', num_devices=jax.device_count(), vocab_size=256, windows=100)
    with pytest.raises(InputError, match=r'per device, .* more than the available') as info:
        preflight.check_size(config, resolver)
    assert '\n' not in str(info.value)
    # Negative control: the config is accepted without these sizes.
    preflight.check_size(load(f'{ROOT}/configs/tiny.py', SMALL), resolver)


def test_training_starts_or_leaves_no_workdir(dataset, tmp_path, memory, capsys):
    workdir = tmp_path / 'run'
    settings = {'train__num_steps': 2, 'train__per_device_batch_size': 'auto'}
    assert exit_code(train.main, arguments(dataset, workdir, **settings)) == EXIT_DONE
    assert read_config(workdir).train.per_device_batch_size != AUTO
    assert 'train.per_device_batch_size=auto: ' in capsys.readouterr().out

    memory(1000)
    refused = tmp_path / 'refused'
    assert exit_code(train.main, arguments(dataset, refused, train__num_steps=2)) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, 'more than the available')
    assert not refused.exists()


def test_invalid_paths_are_rejected_before_compilation(dataset, tmp_path, monkeypatch, capsys):
    def fail(*arguments, **options):
        raise AssertionError('compiled')

    monkeypatch.setattr(trainer_run, 'compile_step', fail)
    (tmp_path / 'file').write_text('')
    for workdir, settings, message in (
        (tmp_path / 'file', {}, f'--workdir={tmp_path}/file: '),
        (tmp_path / 'run', {'train__init_from': tmp_path / 'missing'}, f'train.init_from={tmp_path}/missing: '),
    ):
        assert exit_code(train.main, arguments(dataset, workdir, **settings)) == EXIT_BAD_INPUT
        assert message in capsys.readouterr().err
    with pytest.raises(AssertionError, match='compiled'):
        train.main(arguments(dataset, tmp_path / 'run'))


def test_a_wrong_kernel_stops_the_run_before_it_has_a_workdir(dataset, tmp_path, monkeypatch, capsys):
    kernels = []

    def wrong(make, about, mesh, *, cache):
        kernels.extend(answer.kernel for answer in make())
        raise InputError('attention computes wrong results')

    monkeypatch.setattr(trainer_run, 'check_kernels', wrong)
    workdir = tmp_path / 'run'
    assert exit_code(train.main, arguments(dataset, workdir)) == EXIT_BAD_INPUT
    assert capsys.readouterr().err == 'error: attention computes wrong results\n'
    assert not workdir.exists()
    assert {'attention within documents (model.attention=xla)', 'cross-entropy'} < set(kernels)
    kernels.clear()
    train.main(arguments(dataset, workdir, train__check_kernels=False, train__num_steps=1))
    assert not kernels


def test_peak_is_measured_unless_configured(monkeypatch):
    config = run_preflight('train.per_device_batch_size=2').config
    configured = machine.present_machine(config)
    # A configured peak is not measured.
    assert configured.target.chip.tflops != configured.target.chip.tflops
    assert configured.available > 0
    measured = machine.present_machine(
        dataclasses.replace(config, metrics=dataclasses.replace(config.metrics, peak_tflops=0.0))
    )
    assert measured.target.chip.tflops > 0
    assert preflight.present_machine is machine.present_machine
