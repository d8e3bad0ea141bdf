"""Tests the initialization of a run: random, from another run, from an import or from its own checkpoint."""

import dataclasses
import functools
import json
import shutil
import types

import jax
import numpy as np
import pytest

from maxlm.checkpoint.manager import Checkpoints
from maxlm.checkpoint.streaming import write_step
from maxlm.data.dataset.records import load_manifest
from maxlm.errors import InputError
from maxlm.log import Console
from maxlm.trainer import checkpointing
from maxlm.trainer.checkpointing import check_init_from, restore_or_initialize
from maxlm.training.state import abstract_state, init_state
from maxlm.workdir.files import TOKENIZER
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR
from tests.checkpoint.test_manager import FACTS, abstract_on, config_on, random_state, same, save, zero_state
from tests.checkpoint.test_streaming import flatten, streamed
from tests.messages import input_error
from tests.small import small_layout

pytestmark = [
    # Orbax drops pending reads after a damaged array, which causes warnings.
    pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning'),
]

EMA = {'optimizer__ema_decay': 0.9}


@pytest.fixture(scope='module')
def data(dataset):
    return load_manifest(str(dataset))


@pytest.fixture(scope='module')
def trained():
    return random_state(abstract_on(2), step=7, skipped=2)


@pytest.fixture(scope='module')
def origin(tmp_path_factory, trained):
    """Returns the workdir of a run with checkpoints 3 and 7."""
    workdir = tmp_path_factory.mktemp('origin')
    save(workdir, [random_state(abstract_on(2), step=3, skipped=0, seed=3), trained])
    return workdir


@pytest.fixture
def imported(tmp_path, trained):
    """Returns the workdir of an import, which contains only parameters, as step 0."""
    write_step(tmp_path / 'imported', 0, streamed(flatten(jax.device_get(trained.params))))
    return tmp_path / 'imported'


@pytest.fixture
def start(data, capsys, monkeypatch):
    """Returns a function that starts a run in a workdir and returns its state and its output.

    The initial state is only computed with `random`, because this is slow.
    """

    def start(workdir, *, num_devices=2, init_from='', random=False, **overrides):
        monkeypatch.setattr(checkpointing, 'init_state', init_state if random else zero_state)
        config = config_on(num_devices, **overrides)
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, init_from=str(init_from)))
        layout = small_layout(config)
        abstract = abstract_state(config, layout)
        check_init_from(config, abstract.params, workdir)
        capsys.readouterr()
        with Console(), Checkpoints(workdir, max_to_keep=3) as manager:
            state, *_ = restore_or_initialize(
                config,
                tokenizer=data.tokenizer_path,
                layout=layout,
                abstract=abstract,
                manager=manager,
                fingerprint=FACTS,
            )
        placed = jax.tree.map(
            lambda leaf, expected: leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim), state, abstract
        )
        assert all(jax.tree.leaves(placed))
        return state, capsys.readouterr().out

    return start


@functools.cache
def fresh_state(**overrides):
    config = config_on(2, **overrides)
    return init_state(config, small_layout(config))


def assert_fresh(state, params, **overrides):
    """Checks that the state is `params` at step 0 with a fresh optimizer state."""
    fresh = fresh_state(**overrides)
    assert (int(state.step), int(state.skipped)) == (0, 0)
    assert same(jax.device_get(state.params), jax.device_get(params))
    assert same(state.opt_state, fresh.opt_state)
    # Negative control: the parameters differ from random ones.
    assert not same(jax.device_get(state.params), jax.device_get(fresh.params))


def test_new_run_starts_with_random_parameters(start, tmp_path):
    state, out = start(tmp_path, random=True)
    assert same(state, fresh_state())
    assert out == ''


@pytest.mark.parametrize('num_devices', [2, 1])
def test_run_starts_from_parameters_of_another_run(start, tmp_path, origin, trained, num_devices):
    state, out = start(tmp_path, num_devices=num_devices, init_from=origin, random=True)
    assert_fresh(jax.device_get(state), trained.params)
    assert out.count('\n') == 1
    assert f'{origin}/checkpoints/7/params' in out
    assert 'fresh optimizer' in out


def test_init_from_a_given_step(start, tmp_path, origin):
    state, out = start(tmp_path, init_from=f'{origin}@3')
    assert_fresh(state, random_state(abstract_on(2), step=3, skipped=0, seed=3).params)
    assert f'{origin}/checkpoints/3/params' in out


def test_init_from_uses_the_ema(start, tmp_path, trained):
    ema = random_state(abstract_on(2), step=0, skipped=0, seed=9).params
    save(tmp_path / 'with_ema', [trained._replace(ema=ema)])
    state, out = start(tmp_path / 'run', init_from=tmp_path / 'with_ema')
    assert_fresh(state, ema)
    assert '/7/ema' in out
    assert state.ema is None


@pytest.mark.parametrize('source', ['init_from', 'import'])
def test_ema_starts_as_a_copy_of_the_parameters(start, tmp_path, origin, imported, trained, source):
    state, _ = start(imported, **EMA) if source == 'import' else start(tmp_path / 'run', init_from=origin, **EMA)
    assert_fresh(state, trained.params, **EMA)
    assert same(state.ema, trained.params)
    # The step donates its state, and JAX crashes if the same buffer is donated twice.
    assert not memory(state.params) & memory(state.ema)
    # Negative control.
    assert memory(state.params) & memory(state.params['blocks'])


def memory(tree):
    shards = (shard.data for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards)
    return {shard.unsafe_buffer_pointer() for shard in shards}


def test_own_checkpoint_takes_precedence(start, tmp_path, origin, trained):
    saved = random_state(abstract_on(2), step=4, skipped=1, seed=4)
    save(tmp_path, [saved])
    state, out = start(tmp_path, init_from=origin)
    assert same(state, saved)
    assert not same(state, trained)
    assert out == 'resuming from step 4\n'
    # A resumed run does not read `train.init_from`.
    assert same(start(tmp_path, init_from=tmp_path / 'deleted')[0], saved)


def test_training_starts_from_an_import(start, imported, trained, origin):
    state, out = start(imported)
    assert_fresh(state, trained.params)
    assert out.count('\n') == 1
    assert f'{imported}/checkpoints/0/params and a fresh optimizer' in out
    # An import takes precedence over `train.init_from`.
    assert same(start(imported, init_from=f'{origin}@3')[0].params, trained.params)
    # If there is a later checkpoint, the run resumes from it.
    saved = random_state(abstract_on(2), step=4, skipped=1, seed=4)
    save(imported, [saved])
    assert same(start(imported)[0], saved)


def test_parameters_without_optimizer_state_are_rejected_after_step_0(start, tmp_path, trained):
    write_step(tmp_path, 5, streamed(flatten(jax.device_get(trained.params))))
    with pytest.raises(InputError, match='optimizer: missing from the checkpoint') as info:
        start(tmp_path)
    assert f'--config.train.init_from={tmp_path}/checkpoints/5' in str(info.value)
    assert '\n' not in str(info.value)
    # The command of the message works.
    state, _ = start(tmp_path / 'new', init_from=tmp_path / CHECKPOINTS_DIR / '5')
    assert_fresh(state, trained.params)


def test_run_resumes_from_a_saved_step_0(start, tmp_path):
    saved = random_state(abstract_on(2), step=0, skipped=0, seed=4)
    save(tmp_path, [saved])
    state, out = start(tmp_path)
    assert same(state, saved)
    assert out == 'resuming from step 0\n'


@pytest.mark.parametrize(
    ('overrides', 'parts'),
    [
        (
            {'model__dim': 32},
            ['blocks.attention.key.bias is (2, 2, 8) float32 in the checkpoint but (2, 2, 16) float32'],
        ),
        ({'model__num_layers': 3}, ['blocks.attention.key.bias is (2, 2, 8) float32', '(3, 2, 8) float32']),
        ({'model__norm': 'rmsnorm'}, ['.bias', 'missing']),
    ],
)
def test_other_architecture_is_rejected_before_writing(start, tmp_path, origin, overrides, parts):
    with input_error(f'train.init_from={origin}@3', f'{origin}/checkpoints/3/params', *parts):
        start(tmp_path / 'run', init_from=f'{origin}@3', **overrides)
    assert not (tmp_path / 'run').exists()


def test_damaged_init_from_is_reported(start, tmp_path, origin):
    shutil.copytree(origin, tmp_path / 'origin')
    for file in (tmp_path / 'origin' / CHECKPOINTS_DIR / '7' / 'params').rglob('d/*'):
        file.write_bytes(np.zeros(100).tobytes())
    with pytest.raises(InputError, match='or damaged') as info:
        start(tmp_path / 'run', init_from=tmp_path / 'origin')
    assert str(info.value).startswith(f'train.init_from={tmp_path}/origin: {tmp_path}/origin/checkpoints/7/params: ')
    assert not (tmp_path / 'run').exists()


def test_missing_init_from_is_reported_before_writing(start, tmp_path, origin):
    for init_from, message in {tmp_path / 'missing': 'no checkpoint in', f'{origin}@4': 'steps: 3, 7'}.items():
        with pytest.raises(InputError, match=message) as info:
            start(tmp_path / 'run', init_from=init_from)
        assert str(info.value).startswith(f'train.init_from={init_from}: ')
    assert not (tmp_path / 'run').exists()


def test_other_tokenizer_than_that_of_an_import_is_rejected(start, imported, data):
    # Different formatting of the JSON does not matter.
    text = json.dumps(json.loads(data.tokenizer_path.read_text()))
    assert text != data.tokenizer_path.read_text()
    (imported / TOKENIZER).write_text(text)
    start(imported)
    (imported / TOKENIZER).write_text(text.replace('<|endoftext|>', '<eos>'))
    with pytest.raises(InputError, match='is not the tokenizer') as info:
        start(imported)
    assert str(data.tokenizer_path) in str(info.value)
    assert f'--tokenizer {imported / TOKENIZER}' in str(info.value)
    assert f'--config.train.init_from={imported}' in str(info.value)


def test_other_tokenizer_of_init_from_is_a_warning(start, tmp_path, origin, data, trained):
    shutil.copytree(origin, tmp_path / 'origin')
    (tmp_path / 'origin' / TOKENIZER).write_text(data.tokenizer_path.read_text().replace('<|endoftext|>', '<eos>'))
    state, out = start(tmp_path / 'run', init_from=tmp_path / 'origin')
    assert_fresh(state, trained.params)
    assert 'is neither the tokenizer' in out
    shutil.copy(data.tokenizer_path, tmp_path / 'origin' / TOKENIZER)
    _, out = start(tmp_path / 'again', init_from=tmp_path / 'origin')
    assert 'is neither the tokenizer' not in out


def test_the_initial_state_is_compiled_with_fewer_optimizations(monkeypatch):
    config = config_on(2)
    layout = small_layout(config)
    # The tests set XLA_FLAGS to a lower level, which takes precedence and gives other values.
    of_flags = checkpointing._random_state(config, layout)
    monkeypatch.setenv('XLA_FLAGS', '')
    state = checkpointing._random_state(config, layout)
    assert same(state, init_state(config, layout, compiler_options={'xla_backend_optimization_level': 3}))
    assert not same(state, of_flags)


def test_a_run_with_other_data_forgets_the_arrays_of_its_source(monkeypatch, trained, caplog):
    """Responses to other prompts would be trained on as responses to the present ones."""
    config = config_on(2)
    loaded = []
    source = types.SimpleNamespace(
        fingerprint=lambda config: {'prompts': 'a'},
        load_state_arrays=loaded.append,
        tokenizer_path=None,
        follows_batch_size=False,
    )
    prepared = types.SimpleNamespace(config=config, layout=None, abstract=None)
    context = types.SimpleNamespace(recorder=None, workdir=None)
    manager = types.SimpleNamespace(latest_step=lambda: None)
    checkpoints = checkpointing.RunCheckpoints(manager, prepared, source, context)
    state, arrays = trained._replace(step=0), {'numbers': np.zeros((1, 4))}
    for prompts in ('a', 'b'):
        data = {**checkpoints._fingerprint, 'prompts': prompts}
        monkeypatch.setattr(
            checkpointing, 'restore_or_initialize', lambda *_, data=data, **__: (state, {}, arrays, data)
        )
        checkpoints.restore()
    assert loaded == [arrays, {}]
