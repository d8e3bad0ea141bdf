"""Eight virtual CPU devices for every test, set before JAX starts, and the data set that whole runs train on."""

import os
from pathlib import Path

from tests.cpu import cpu_flags

os.environ['JAX_PLATFORMS'] = 'cpu'
os.environ['XLA_FLAGS'] = cpu_flags(8)
# Neither here nor in the processes of tests anything is kept for later, in the home directory above all.
os.environ['JAX_COMPILATION_CACHE_DIR'] = ''

import jax
import numpy as np
import pytest

from maxlm import prepare
from maxlm.data.batches import Batches, TrainingRows
from maxlm.data.skips import data_step

ROOT = Path(__file__).parent.parent


def make_dataset(folder: Path) -> Path:
    """The sections of the Apache license as documents of bytes: real text that every checkout has."""
    text, output = folder / 'text', folder / 'license'
    text.mkdir()
    sections = [part for part in (ROOT / 'LICENSE').read_text().split('\n\n') if part.strip()]
    for number, section in enumerate(sections):
        (text / f'{number:03}.txt').write_text(section)
    arguments = ['--input', str(text), '--output', str(output), '--tokenizer', 'bytes', '--validation_share', '0.1']
    assert prepare.main([*arguments, '--workers', '1', '--quiet']) == 0
    return output


@pytest.fixture(scope='session')
def dataset(tmp_path_factory):
    return make_dataset(tmp_path_factory.mktemp('dataset'))


@pytest.fixture(scope='module')
def compile_once(tmp_path_factory):
    """A compilation cache, so that a program that is run many times is compiled once."""
    settings = {
        'jax_compilation_cache_dir': str(tmp_path_factory.mktemp('compiled')),
        'jax_persistent_cache_min_compile_time_secs': 0,
        'jax_persistent_cache_min_entry_size_bytes': -1,
    }
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    yield
    for name, value in before.items():
        jax.config.update(name, value)


@pytest.fixture
def change_batches(monkeypatch):
    """Has a run train on other batches: `poisoned` have weights that are not finite, `left_out` are not there."""
    original = Batches.__getitem__

    def change(*, poisoned=(), left_out=()):
        def get(self, step):
            if not isinstance(self.order, TrainingRows):
                return original(self, step)
            number = data_step(step, left_out)
            batch = original(self, number)
            if number in poisoned:
                batch['weights'] = np.full_like(batch['weights'], np.nan)
            return batch

        monkeypatch.setattr(Batches, '__getitem__', get)

    return change
