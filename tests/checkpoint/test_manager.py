"""Checkpoint manager: exact round trips over any mesh, selection of steps, and errors for unreadable checkpoints."""

import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from maxlm.checkpoint.async_save import AsyncSave
from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.checkpoint.manager import Checkpoints, find_step
from maxlm.checkpoint.params import params_item, restore_params
from maxlm.checkpoint.retention import RetentionPolicy, RetentionRules
from maxlm.errors import InputError
from maxlm.log import Console
from maxlm.training.optimizers.muon import MuonState
from maxlm.training.spike_guard import SpikeStatistics
from maxlm.training.state import TrainState, abstract_state
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, TRASH, StepDirectory
from tests.messages import input_error
from tests.small import small_config, small_layout

# Orbax drops pending reads after a damaged array, which causes warnings.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')

FACTS = {'dataset': 'abc', 'window': 16, 'isolate_documents': True}
MODEL = {'model__num_layers': 2, 'model__dim': 16, 'model__num_heads': 2}


def config_on(num_devices, **overrides):
    return small_config(num_devices=num_devices, **{**MODEL, **overrides})


def abstract_on(num_devices, **overrides):
    config = config_on(num_devices, **overrides)
    return abstract_state(config, small_layout(config))


def random_state(abstract, *, step, skipped, seed=0):
    """Returns a state with random arrays, so that no arrays are equal because they are zero."""
    rng = np.random.default_rng(seed)

    def fill(leaf):
        values = rng.integers(1, 1000, leaf.shape) if leaf.dtype == jnp.int32 else rng.normal(size=leaf.shape)
        return jax.device_put(np.asarray(values, leaf.dtype), leaf.sharding)

    counters = (jax.device_put(jnp.int32(number), abstract.step.sharding) for number in (step, skipped))
    params, opt_state = jax.tree.map(fill, (abstract.params, abstract.opt_state))
    spike_window = abstract.spike_window
    if spike_window is not None:
        good_QW = np.asarray(rng.normal(size=spike_window.good_QW.shape), np.float32)
        filled = min(step, good_QW.shape[1])
        good_QW[:, : good_QW.shape[1] - filled] = 0
        spike_window = jax.device_put(SpikeStatistics(good_QW, np.int32(filled)), abstract.step.sharding)
    return TrainState(*counters, params, opt_state, spike_window=spike_window)


def zero_state(config, layout, *, compiler_options=None):
    """Replaces `init_state`, whose random values do not matter if all parameters are restored."""
    abstract = abstract_state(config, layout)
    return jax.tree.map(lambda leaf: jax.device_put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), abstract)


def same(tree, other):
    pairs = zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(a, b) and a.dtype == b.dtype for a, b in pairs)


def save(workdir, states, *, max_to_keep=10):
    with Checkpoints(workdir, max_to_keep=max_to_keep) as checkpoints:
        for state in states:
            checkpoints.save(int(state.step), state, FACTS)


def restore(workdir, abstract, step=7):
    with Checkpoints(workdir, max_to_keep=10) as checkpoints:
        return checkpoints.restore(step, abstract)


@pytest.fixture(scope='module')
def eight():
    """Returns a state sharded over eight devices."""
    return random_state(abstract_on(8), step=7, skipped=2)


@pytest.fixture(scope='module')
def saved(tmp_path_factory, eight):
    """Returns a workdir with the checkpoints 3 and 7, which tests must not change."""
    workdir = tmp_path_factory.mktemp('saved')
    save(workdir, [random_state(abstract_on(8), step=3, skipped=0, seed=3), eight])
    return workdir


@pytest.fixture
def copy(saved, tmp_path):
    """Returns a copy of `saved` that a test may damage."""
    shutil.copytree(saved, tmp_path / 'run')
    return tmp_path / 'run'


def test_sharded_state_is_restored_bit_for_bit(saved, eight):
    abstract = abstract_on(8)
    state, facts, *_ = restore(saved, abstract)
    assert same(state, eight)
    assert facts == FACTS
    assert (int(state.step), int(state.skipped)) == (7, 2)
    placed = jax.tree.map(lambda leaf, wanted: leaf.sharding == wanted.sharding, state, abstract)
    assert all(jax.tree.leaves(placed))
    kernel = state.params['blocks']['attention']['query']['kernel']
    assert kernel.addressable_shards[0].data.size * 8 == kernel.size
    # Negative control: all arrays of the other step differ.
    earlier, *_ = restore(saved, abstract, step=3)
    assert not any(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(earlier), jax.tree.leaves(eight), strict=True))


@pytest.mark.parametrize('num_devices', [1, 4])
def test_state_is_restored_on_another_mesh(saved, eight, num_devices):
    state, *_ = restore(saved, abstract_on(num_devices))
    assert same(jax.device_get(state), jax.device_get(eight))
    assert len(state.params['embedding'].devices()) == num_devices


def test_params_only_restore(saved, eight, copy):
    # The optimizer state is not needed.
    shutil.rmtree(copy / CHECKPOINTS_DIR / '7' / 'optimizer')
    for num_devices in (8, 1):
        params = restore_params(copy / CHECKPOINTS_DIR / '7', abstract_on(num_devices).params)
        assert same(jax.device_get(params), jax.device_get(eight.params))
    assert not same(restore_params(saved / CHECKPOINTS_DIR / '3', abstract_on(8).params), eight.params)


EMA = {'optimizer__ema_decay': 0.9}


@pytest.fixture(scope='module')
def averaged(tmp_path_factory, eight):
    """Returns a workdir with checkpoint 7 with EMA, and its state; tests must not change them."""
    workdir = tmp_path_factory.mktemp('averaged')
    state = eight._replace(ema=random_state(abstract_on(8), step=0, skipped=0, seed=1).params)
    save(workdir, [state])
    return workdir, state


def test_ema_is_a_separate_item(saved, eight, averaged):
    workdir, state = averaged
    for num_devices in (8, 2):
        restored, *_ = restore(workdir, abstract_on(num_devices, **EMA))
        assert same(jax.device_get(restored), jax.device_get(state))
        assert len(restored.ema['embedding'].devices()) == num_devices
    assert params_item(workdir / CHECKPOINTS_DIR / '7') == 'ema'
    abstract = abstract_on(8).params
    assert same(restore_params(workdir / CHECKPOINTS_DIR / '7', abstract, item='ema'), state.ema)
    assert not same(restore_params(workdir / CHECKPOINTS_DIR / '7', abstract), state.ema)
    # Negative control: a run without EMA has none.
    assert restore(saved, abstract_on(8))[0].ema is None
    assert params_item(saved / CHECKPOINTS_DIR / '7') == 'params'
    assert not (saved / CHECKPOINTS_DIR / '7' / 'ema').exists()


def test_arrays_of_the_batch_source_are_a_separate_item(saved, eight, tmp_path):
    abstract = abstract_on(8)
    source = {'tokens': np.arange(6, dtype=np.int32).reshape(2, 3), 'log_probs': np.array([-0.5], np.float32)}
    source['ended'] = np.array([True, False])
    with Checkpoints(tmp_path, max_to_keep=1) as checkpoints:
        checkpoints.save(7, eight, FACTS, source=source)
        restored = checkpoints.restore(7, abstract)
    assert restored.source.keys() == source.keys()
    assert same(restored.source, source)
    # Negative control: a step without them.
    assert restore(saved, abstract).source == {}
    # Their damage is detected.
    item = tmp_path / CHECKPOINTS_DIR / '7' / 'source'
    assert corrupt_arrays(item.parent)[0] == []
    shutil.rmtree(item)
    assert len(corrupt_arrays(item.parent)[0]) == 1


def test_newly_enabled_ema_starts_at_the_parameters(saved, eight, capsys):
    with Console():
        state, *_ = restore(saved, abstract_on(8, **EMA))
    assert same(state, eight._replace(ema=eight.params))
    out = capsys.readouterr().out
    assert out.count('\n') == 1
    assert 'step 7 was saved without an EMA' in out


def test_disabled_ema_is_not_restored_or_saved(averaged, eight, tmp_path):
    state, *_ = restore(averaged[0], abstract_on(8))
    assert same(state, eight)
    save(tmp_path, [state])
    assert params_item(tmp_path / CHECKPOINTS_DIR / '7') == 'params'


def test_damaged_ema_is_named(averaged, tmp_path):
    shutil.copytree(averaged[0], tmp_path / 'run')
    (tmp_path / 'run' / CHECKPOINTS_DIR / '7' / 'ema' / '_METADATA').write_text('{')
    with input_error(str(tmp_path / 'run' / CHECKPOINTS_DIR / '7' / 'ema')):
        restore(tmp_path / 'run', abstract_on(8, **EMA))
    # A run that does not need it can resume.
    restore(tmp_path / 'run', abstract_on(8))


def test_newest_steps_are_kept(tmp_path):
    abstract = abstract_on(1)
    states = [random_state(abstract, step=step, skipped=0, seed=step) for step in (2, 4, 6, 8)]
    save(tmp_path / 'three', states, max_to_keep=3)
    assert steps_in(tmp_path / 'three') == [4, 6, 8]
    with Checkpoints(tmp_path / 'three', max_to_keep=3) as checkpoints:
        assert checkpoints.latest_step() == 8
    assert same(restore(tmp_path / 'three', abstract, step=4).state, states[1])
    # Deleted checkpoints are also removed from the trash directory.
    assert list((tmp_path / 'three' / CHECKPOINTS_DIR / TRASH).iterdir()) == []
    save(tmp_path / 'one', states, max_to_keep=1)
    assert steps_in(tmp_path / 'one') == [8]


def size_of(directory):
    return sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())


def test_checkpoints_stay_below_the_size_limit(tmp_path, monkeypatch, caplog):
    states = [random_state(abstract_on(1), step=step, skipped=0, seed=step) for step in range(1, 6)]
    monkeypatch.setattr(RetentionPolicy, '_size', lambda self, step: 100)
    present = []
    begin = AsyncSave.begin

    def record(self, path, items):
        present.append(steps_in(path.parent.parent) if path.parent.exists() else [])
        begin(self, path, items)

    monkeypatch.setattr(AsyncSave, 'begin', record)

    def run(workdir, num_steps, **options):
        with Checkpoints(workdir, max_to_keep=9, **options) as checkpoints:
            for state in states[:num_steps]:
                loss = 1.0 if int(state.step) == 2 else 2.0
                checkpoints.save(int(state.step), state, FACTS, validation_loss=loss)
                checkpoints.wait()
        return steps_in(workdir)

    # Before a save, an old step is deleted, so that the new one fits. Step 2 has the lowest loss.
    assert run(tmp_path / 'best', 5, max_bytes=350, keep_best=1) == [2, 4, 5]
    assert present == [[], [1], [1, 2], [2, 3], [2, 4]]
    assert not caplog.messages
    # The newest and permanent steps are kept in any case.
    with caplog.at_level('WARNING', logger='maxlm'):
        assert run(tmp_path / 'permanent', 3, max_bytes=50, keep_period=2) == [2, 3]
    (warning,) = caplog.messages
    assert 'exceed checkpoint.max_gib (50 B), because permanent checkpoints' in warning


def test_the_size_of_a_step_is_that_of_its_files(saved):
    policy = RetentionPolicy(StepDirectory(saved), RetentionRules(1, max_bytes=1))
    assert policy._size(7) == size_of(saved / CHECKPOINTS_DIR / '7') > 0


def steps_in(workdir):
    return sorted(int(entry.name) for entry in (workdir / CHECKPOINTS_DIR).iterdir() if entry.name.isdigit())


def test_no_checkpoint_yet(tmp_path):
    with Checkpoints(tmp_path / 'new', max_to_keep=1) as checkpoints:
        assert checkpoints.latest_step() is None


def test_find_step(saved):
    folder = saved / CHECKPOINTS_DIR
    assert find_step(str(saved)) == folder / '7'
    assert find_step(f'{saved}@3') == folder / '3'
    assert find_step(str(folder / '3')) == folder / '3'
    assert find_step(f'{folder}/3/') == folder / '3'


def test_a_workdir_may_have_an_at_sign_in_its_name(saved, tmp_path):
    workdir = tmp_path / 'me@host'
    shutil.copytree(saved, workdir)
    assert find_step(str(workdir)) == workdir / CHECKPOINTS_DIR / '7'
    assert find_step(f'{workdir}@3') == workdir / CHECKPOINTS_DIR / '3'


@pytest.mark.parametrize('wanted', ['5', 'worst', '-3', '3.0'])
def test_missing_step(saved, wanted):
    with pytest.raises(InputError, match=rf"step '{wanted}' does not exist; available steps: 3, 7"):
        find_step(f'{saved}@{wanted}')


def test_config_key_of_a_missing_step_is_named(saved):
    with pytest.raises(InputError, match=rf"^train\.init_from={saved}@5: step '5' does not exist"):
        find_step(f'{saved}@5', key='train.init_from')


@pytest.mark.parametrize('make', [lambda path: None, lambda path: path.mkdir(), lambda path: path.write_text('')])
def test_no_checkpoint_in_path(tmp_path, make):
    make(tmp_path / 'run')
    for spelled in ('run', 'run@3', 'run/checkpoints/3'):
        with pytest.raises(InputError, match='no checkpoint in') as info:
            find_step(str(tmp_path / spelled))
        assert str(tmp_path / spelled) in str(info.value)


OTHERS = {
    'num_layers': ({'model__num_layers': 3}, ['params', 'blocks.attention.', '(2, ', '(3, ']),
    'vocab': ({'model__vocab_size': 72}, ['params', 'embedding', '(61, 16) float32', '(72, 16) float32']),
    'rmsnorm': ({'model__norm': 'rmsnorm'}, ['params', '.bias', 'missing']),
    'untied': ({'model__tie_embeddings': False}, ['params', 'head.kernel', 'missing', '(16, 61) float32']),
}


@pytest.mark.parametrize('other', OTHERS)
def test_another_model_is_refused(saved, other):
    overrides, parts = OTHERS[other]
    abstract = abstract_on(1, **overrides)
    for read in (
        lambda: restore(saved, abstract),
        lambda: restore_params(saved / CHECKPOINTS_DIR / '7', abstract.params),
    ):
        with input_error('checkpoint of another model', str(saved / CHECKPOINTS_DIR / '7'), *parts):
            read()


def test_another_optimizer_is_refused(saved):
    abstract = abstract_on(8)
    momentum = jax.eval_shape(optax.sgd(1e-3, momentum=0.9).init, abstract.params)
    with input_error('missing', str(saved / CHECKPOINTS_DIR / '7' / 'optimizer')):
        restore(saved, abstract._replace(opt_state=momentum))


def test_second_moments_of_muon_are_restored_on_another_mesh(tmp_path):
    second = {'optimizer__name': 'muon', 'optimizer__muon_beta2': 0.9}
    state = random_state(abstract_on(8, **second), step=7, skipped=0)
    query = state.opt_state[0].inner_states['muon'].inner_state.second_moment['blocks']['attention']['query']['kernel']
    assert query.addressable_shards[0].data.size * 8 == query.size
    save(tmp_path, [state])
    restored, *_ = restore(tmp_path, abstract_on(4, **second))
    assert same(jax.device_get(restored), jax.device_get(state))
    with pytest.raises(InputError, match=r'checkpoint of another model: .*second_moment\.blocks'):
        restore(tmp_path, abstract_on(8, optimizer__name='muon'))
    # Checkpoints of earlier versions have this state without second moments.
    assert MuonState._fields == ('num_updates', 'momentum')


def test_another_dtype_is_refused_and_not_cast(saved):
    abstract = abstract_on(8)
    halved = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16, sharding=leaf.sharding), abstract.params
    )
    with pytest.raises(InputError, match=r'float32 in the checkpoint but .* bfloat16 in the config'):
        restore_params(saved / CHECKPOINTS_DIR / '7', halved)


def refused(workdir, *parts):
    with input_error(str(workdir / CHECKPOINTS_DIR / '7'), *parts):
        restore(workdir, abstract_on(1))


@pytest.mark.parametrize('item', ['params', 'optimizer', 'progress', 'data'])
def test_a_missing_item_is_named(copy, item):
    shutil.rmtree(copy / CHECKPOINTS_DIR / '7' / item)
    refused(copy, item)


@pytest.mark.parametrize('item', ['params', 'optimizer'])
def test_missing_arrays(copy, item):
    shutil.rmtree(copy / CHECKPOINTS_DIR / '7' / item / 'd')
    refused(copy)
    shutil.rmtree(copy / CHECKPOINTS_DIR / '7' / item / 'ocdbt.process_0')
    refused(copy)


@pytest.mark.parametrize('item', ['progress', 'data'])
@pytest.mark.parametrize('content', ['{', '[]', 'null', '\x00\xff', '{}', '{"step": "x", "skipped": 0}'])
def test_garbage_in_json_items(copy, item, content):
    (copy / CHECKPOINTS_DIR / '7' / item / 'metadata').write_text(content, encoding='latin-1')
    refused(copy, item)


@pytest.mark.parametrize('item', ['params', 'optimizer'])
def test_garbage_in_the_array_metadata(copy, item):
    for content in ('{', '[]', '{}'):
        (copy / CHECKPOINTS_DIR / '7' / item / '_METADATA').write_text(content)
        refused(copy, str(copy / CHECKPOINTS_DIR / '7' / item))


def test_previous_step_is_used_after_removal_of_a_damaged_step(copy):
    shutil.rmtree(copy / CHECKPOINTS_DIR / '7' / 'params')
    refused(copy)
    shutil.rmtree(copy / CHECKPOINTS_DIR / '7')
    with Checkpoints(copy, max_to_keep=10) as checkpoints:
        assert checkpoints.latest_step() == 3
        assert int(checkpoints.restore(3, abstract_on(1)).state.step) == 3


@pytest.mark.parametrize('name', ['9.orbax-checkpoint-tmp', '9.orbax-checkpoint-tmp-1700000000'])
def test_partial_save_is_not_a_checkpoint(copy, eight, name):
    shutil.copytree(copy / CHECKPOINTS_DIR / '7', copy / CHECKPOINTS_DIR / name)
    assert find_step(str(copy)).name == '7'
    with pytest.raises(InputError, match='steps: 3, 7'):
        find_step(f'{copy}@9')
    again = eight._replace(step=jax.device_put(jnp.int32(9), eight.step.sharding))
    with Checkpoints(copy, max_to_keep=10) as checkpoints:
        assert checkpoints.latest_step() == 7
        # The partial checkpoint does not prevent saving the step again.
        checkpoints.save(9, again, FACTS)
    assert not (copy / CHECKPOINTS_DIR / name).exists()
    assert same(restore(copy, abstract_on(8), step=9).state, again)
    # Negative control: with its final name, the checkpoint would count.
    shutil.copytree(copy / CHECKPOINTS_DIR / '7', copy / CHECKPOINTS_DIR / '11')
    assert find_step(str(copy)).name == '11'
