"""Shipped configs: every config key is read, and the real 1B config trains."""

import dataclasses
import subprocess
import sys

import jax
import numpy as np
import pytest

from maxlm.cli.runs import train
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import SECTIONS
from maxlm.errors import EXIT_DONE
from maxlm.parallel.layout import make_layout
from maxlm.telemetry.metrics import read_metrics
from maxlm.training.batch import batch_shapes
from maxlm.training.state import abstract_state
from maxlm.training.step import make_train_step
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import arguments, run
from tests.conftest import ROOT
from tests.cpu import fast_environment

BIG = f'{ROOT}/configs/1b.py'
# Only lengths and counts are reduced for a CPU.
SHORTENED = {
    'model.num_layers': 1,
    'data.seq_len': 32,
    'train.num_steps': 2,
    'train.global_batch_size': 8,
    'train.per_device_batch_size': 1,
    'train.log_every': 1,
    'eval.num_batches': 1,
    'metrics.tensorboard': 'false',
    'metrics.peak_tflops': 1,
}


def traced_step(config):
    """Returns the shapes of a state before and after a step, and of its metrics; nothing is computed."""
    layout = make_layout(config.mesh)
    abstract = abstract_state(config, layout)
    return abstract, *jax.eval_shape(make_train_step(config, layout), abstract, batch_shapes(config, layout))


def resolved(config):
    return resolve(config, platform='cpu', num_devices=8, vocab_size=257, windows=1000)


def big_arguments(dataset, workdir, **settings):
    settings = {**SHORTENED, 'data.path': dataset, **{k.replace('__', '.'): v for k, v in settings.items()}}
    return [
        f'--config={BIG}',
        f'--workdir={workdir}',
        *(f'--config.{key}={value}' for key, value in settings.items()),
    ]


@pytest.mark.nightly
@pytest.mark.multiprocess
@pytest.mark.timeout(900)
def test_the_real_1b_configuration_shortened(dataset, tmp_path):
    # One real layer of width 1536 with the full vocabulary.
    command = [sys.executable, '-m', 'maxlm.train', *big_arguments(dataset, tmp_path / 'run')]
    subprocess.run(command, check=True, cwd=ROOT, env=fast_environment())
    model = read_config(tmp_path / 'run').model
    assert (model.dim, model.num_heads, model.vocab_size, model.max_positions) == (1536, 24, 50_000, 2048)
    losses = [line['train/loss'] for line in read_metrics(tmp_path / 'run') if 'train/loss' in line]
    assert np.all(np.abs(np.array(losses) - np.log(50_000)) < 0.5)


def test_the_step_of_the_real_1b_configuration_is_traced():
    config = resolved(load(BIG))
    assert (config.model.dim, config.model.num_heads, config.model.vocab_size) == (1536, 24, 50_000)
    assert (config.train.global_batch_size, config.data.seq_len, config.rounds) == (512, 2048, 8)
    before, after, metrics = traced_step(config)
    assert sum(leaf.size for leaf in jax.tree.leaves(before.params)) == pytest.approx(0.76e9, rel=0.01)
    assert jax.tree.structure(before) == jax.tree.structure(after)
    for old, new in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        assert (old.shape, old.dtype) == (new.shape, new.dtype)
    assert {value.shape for value in metrics.values()} == {()}


def test_the_1b_configuration_trains_with_less_width(dataset, tmp_path):
    # Vocabulary, positions, dtypes and optimizer are those of the file.
    settings = {'model__dim': 32, 'model__num_heads': 2, 'model__vocab_size': 512, 'eval__interval': 0}
    assert train.main(big_arguments(dataset, tmp_path, **settings)) == EXIT_DONE
    losses = [line['train/loss'] for line in read_metrics(tmp_path)]
    assert losses == pytest.approx([np.log(512)] * 2, abs=0.5)
    shipped, model = resolved(load(BIG)), read_config(tmp_path).model
    changed = {
        field.name
        for field in dataclasses.fields(model)
        if getattr(model, field.name) != getattr(shipped.model, field.name)
    }
    assert changed == {'num_layers', 'dim', 'num_heads', 'num_kv_heads', 'head_dim', 'ffn_dim', 'vocab_size'}


def test_every_config_key_is_read(dataset, tmp_path, monkeypatch, change_batches):
    read = set()

    def watch(section, cls):
        original = cls.__getattribute__

        def recording(self, name):
            # Generic reads of all keys (checking bounds, writing JSON) do not count.
            reader = sys._getframe(1).f_globals['__name__']
            generic = ('maxlm.config.validation', 'maxlm.config.validation_architecture', 'maxlm.workdir.files')
            if reader.startswith('maxlm.') and reader not in generic:
                read.add(f'{section}.{name}')
            return original(self, name)

        monkeypatch.setattr(cls, '__getattribute__', recording)

    for section, cls in SECTIONS.items():
        watch(section, cls)
    # Alternatives for the length of a run, the batch size and the warm-up, and keys that only matter for some values of
    # other keys. Keys of a step are read when it is traced.
    by_family = {
        'llama': {'train__num_steps': 2, 'model__rope_scaling': 'yarn', 'model__dtype': 'float16'},
        'gpt2': {'train__num_tokens': 256, 'train__global_batch_size_tokens': 128, 'optimizer__warmup_tokens': 128},
        'qwen3': {'train__num_steps': 2, 'model__attention_pattern': 'S', 'model__sliding_window': 4},
        'phi3': {
            'train__num_steps': 2,
            'model__head_dim': 4,
            'model__rope_scaling': 'longrope',
            'model__rope_short_factors': (1.0, 2.0),
            'model__rope_long_factors': (1.0, 2.0),
        },
        'gpt_neox': {'train__num_epochs': 0.025, 'model__rope_scaling': 'llama3'},
    }
    unwanted = ('num_steps=20', 'warmup_steps=5')
    for family, chosen in by_family.items():
        config, _, *words = arguments(dataset, '', model__family=family, **chosen)
        words = [word.removeprefix('--config.') for word in words if not word.endswith(unwanted)]
        config = resolved(load(config.removeprefix('--config='), [*words, 'optimizer.warmup_steps=0']))
        if family != 'gpt_neox':
            assert config.train.num_steps == 2
        traced_step(config)
    settings = {
        'model__family': 'nanochat',
        'train__num_steps': 2,
        'eval__interval': 2,
        'eval__num_samples': 1,
        'optimizer__name': 'muon',
        'optimizer__schedule': 'wsd',
        'optimizer__warmup_steps': 0,
        'metrics__tensorboard': 'true',
        'metrics__wandb': 'offline',
        # Only data in a bucket is downloaded.
        'data__sources': f"(('file://{dataset}', 1.0),)",
        'data__cache_dir': tmp_path / 'cache',
        'data__allow_dataset_change': 'true',
    }
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    assert read_config(tmp_path / 'run').train.num_steps == 2
    # Only a resumed run and a rollback read some keys.
    change_batches(poisoned={2, 3})
    settings |= {'train__num_steps': 4, 'guard__max_consecutive_skips': 1, 'guard__rollback_skip_steps': 0}
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    declared = {f'{section}.{field.name}' for section, cls in SECTIONS.items() for field in dataclasses.fields(cls)}
    assert declared - read == set()
    # Negative control: an unread key is detected.
    assert (declared | {'train.unread'}) - read == {'train.unread'}
