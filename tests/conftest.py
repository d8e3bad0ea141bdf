"""Configuration of test sessions: eight virtual CPU devices, shared compiled programs, tiers and memory."""

import ctypes
import gc
import math
import os
import shutil
import signal
from pathlib import Path

from tests.cpu import cpu_flags
from tests.programs import IS_OWNER, KEPT_PROGRAMS, MIN_COMPILE_SECONDS, PROGRAMS

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = cpu_flags(8)
os.environ |= {
    # For child processes. With a maximum size JAX locks the directory, so that no process reads a partial file.
    'JAX_COMPILATION_CACHE_DIR': str(PROGRAMS / 'processes'),
    'JAX_COMPILATION_CACHE_MAX_SIZE': str(2**33),
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': str(MIN_COMPILE_SECONDS),
    # Tests compare the outputs of commands. tests/cli/test_hints.py tests the `Next:` lines.
    'MAXLM_HINTS': '0',
}

# Shells start background processes with SIGINT ignored, but some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# nohup starts processes with SIGHUP ignored, but some tests send it.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

import jax
import numpy as np
import psutil
import pytest
from hypothesis import HealthCheck, settings
from jax._src import compilation_cache

from maxlm import log
from maxlm.cli.setup import prepare
from maxlm.data.loader.batches import Batches, TrainingRows
from maxlm.data.loader.skipped_batches import data_index
from maxlm.planning import gpu_compiler
from maxlm.runtime.compilation_cache import enable_compilation_cache
from tools.durations import Durations

pytest_plugins = [
    'tests.buckets.fixtures',
    'tests.ended_runs',
    'tests.executed_functions',
    'tests.shared_steps',
    'tests.time_report',
]

ROOT = Path(__file__).parent.parent
# Tests compare the outputs of commands. On a slow machine, progress lines would be among them.
log.LINE_SECONDS = math.inf
# Fixtures that start a browser or a bucket emulator on loopback.
MARK_OF_FIXTURE = {'browser': 'browser', 'gcs': 'network_emulator', 's3': 'network_emulator'}
# Marks of tests that start other processes.
COSTLY_MARKS = ('multiprocess', 'browser', 'network_emulator', 'gpu')
# A worker that uses more memory clears JAX's caches after the current module.
CLEAR_CACHES_BYTES = 1.25 * 2**30
# Hypothesis tests run the same few examples in each session; `launch/test.sh --nightly` runs many random examples.
FEW_EXAMPLES = settings(
    max_examples=25, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
settings.register_profile('few', FEW_EXAMPLES)
settings.register_profile('nightly', FEW_EXAMPLES, max_examples=10_000, derandomize=False, print_blob=True)
settings.load_profile('few')


def pytest_unconfigure(config):
    if IS_OWNER and not hasattr(config, 'workerinput'):
        shutil.rmtree(PROGRAMS, ignore_errors=True)


# Timeout of a notebook of examples/.
NOTEBOOK_SECONDS = 400


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Runs notebooks with one device and all optimizations, as users do. Their models have real width."""
    if item.path.suffix != '.ipynb':
        return (yield)
    flags = os.environ.pop('XLA_FLAGS')
    try:
        return (yield)
    finally:
        os.environ['XLA_FLAGS'] = flags


def pytest_collection_modifyitems(config, items):
    durations = Durations.load()
    for item in items:
        if item.path.suffix == '.ipynb':
            item.add_marker(pytest.mark.timeout(NOTEBOOK_SECONDS))
        fixtures = getattr(item, 'fixturenames', ())
        for fixture, mark in MARK_OF_FIXTURE.items():
            if fixture in fixtures:
                item.add_marker(mark)
        # Until a new file is measured, its tests that train or start processes count as slow.
        is_costly = 'shared_steps' in fixtures or any(map(item.get_closest_marker, COSTLY_MARKS))
        if durations.is_slow(item.nodeid) or (is_costly and not durations.is_measured(item.nodeid)):
            item.add_marker('slow')
    if hasattr(config, 'workerinput'):
        # The longest files run first, so that the workers finish at about the same time.
        items.sort(key=lambda item: durations.seconds_of_file(item.nodeid), reverse=True)


@pytest.fixture(scope='session', autouse=True)
def _jax_settings():
    """Raises errors on rank promotion, and shares compiled programs with checksums among workers and sessions."""
    jax.config.update('jax_numpy_rank_promotion', 'raise')
    jax.config.update('jax_compilation_cache_dir', None)
    enable_compilation_cache(str(KEPT_PROGRAMS))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', MIN_COMPILE_SECONDS)
    is_cache_used = compilation_cache.is_cache_used
    # JAX writes programs for absent TPUs, but cannot read them without a TPU.
    compilation_cache.is_cache_used = lambda backend: backend.platform == 'cpu' and is_cache_used(backend)


@pytest.fixture(scope='session', autouse=True)
def _no_gpu_compiler(tmp_path_factory):
    """Hides the installed GPU compiler, because JAX has started in this process; see tests.gpu_compiler."""
    os.environ.pop(gpu_compiler.VARIABLE, None)
    gpu_compiler.CACHE = str(tmp_path_factory.mktemp('cache') / 'gpu-compiler')


@pytest.fixture(autouse=True)
def _signal_handlers():
    """Restores the handlers that a command in this process replaces. Child processes inherit ignored signals."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture(scope='module', autouse=True)
def _bounded_memory():
    yield
    if psutil.Process().memory_info().rss > CLEAR_CACHES_BYTES:
        jax.clear_caches()
        gc.collect()
        # Training runs in this process disable malloc's trimming, so freed memory must be returned explicitly.
        ctypes.CDLL(None).malloc_trim(0)


def make_dataset(folder: Path) -> Path:
    """Tokenizes the sections of the Apache license, which every checkout contains, as byte documents."""
    text, output = folder / 'text', folder / 'license'
    text.mkdir()
    sections = [part for part in (ROOT / 'LICENSE').read_text().split('\n\n') if part.strip()]
    for number, section in enumerate(sections):
        (text / f'{number:03}.txt').write_text(section)
    arguments = ['--input', str(text), '--output', str(output), '--tokenizer', 'bytes', '--validation-fraction', '0.1']
    assert prepare.main([*arguments, '--workers', '1', '--quiet']) == 0
    return output


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp('dataset'))


@pytest.fixture
def change_batches(monkeypatch):
    """Returns a function that patches training batches: `poisoned` batches get NaN weights, `left_out` are skipped."""
    original = Batches.__getitem__

    def change(*, poisoned=(), left_out=()):
        def get(self, step):
            if not isinstance(self.order, TrainingRows):
                return original(self, step)
            number = data_index(step, left_out)
            batch = original(self, number)
            if number in poisoned:
                batch['weights'] = np.full_like(batch['weights'], np.nan)
            return batch

        monkeypatch.setattr(Batches, '__getitem__', get)

    return change


@pytest.fixture
def in_time():
    """Aborts a hanging test."""
    signal.signal(signal.SIGALRM, lambda *_: pytest.fail('hangs'))
    signal.alarm(20)
    yield
    signal.alarm(0)
