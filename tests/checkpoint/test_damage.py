"""Damage of a checkpoint: any damage is detected, and the newest intact checkpoint is restored."""

import itertools
import json
import random
import shutil

import jax
import numpy as np
import pytest

from maxlm.checkpoint import restore
from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.checkpoint.item_metadata import CorruptCheckpointError
from maxlm.checkpoint.manager import Checkpoints, find_step
from maxlm.checkpoint.params import restore_params
from maxlm.checkpoint.restore import _agree_on_errors
from maxlm.errors import InputError
from maxlm.log import Console
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, DAMAGED
from tests.checkpoint.test_manager import FACTS, abstract_on, random_state, same, save
from tests.damage import cut, flip, remove
from tests.faults import how_many, measured

# Orbax drops pending reads after a damaged array, which causes warnings.
pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')

EMA = {'optimizer__ema_decay': 0.9}
# Orbax reads these files only on object stores, or never.
UNREAD = {'commit_success.txt', '_CHECKPOINT_METADATA', '_sharding'}


def abstract():
    return abstract_on(2, **EMA)


@pytest.fixture(scope='module')
def states():
    averages = (random_state(abstract(), step=0, skipped=0, seed=seed).params for seed in (11, 12, 13))
    return {
        step: random_state(abstract(), step=step, skipped=0, seed=step)._replace(ema=average)
        for step, average in zip((3, 5, 7), averages, strict=True)
    }


@pytest.fixture(scope='module')
def saved(tmp_path_factory, states):
    """Returns a workdir with the checkpoints 3, 5 and 7, which tests must not change."""
    workdir = tmp_path_factory.mktemp('saved')
    save(workdir, states.values())
    return workdir


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / 'run')
    return tmp_path / 'run'


@pytest.fixture
def newest(capfd):
    """Returns a function that restores the newest checkpoint and returns it with the warnings."""

    def newest(workdir, wanted=None):
        capfd.readouterr()
        with Console(), Checkpoints(workdir, max_to_keep=10) as checkpoints:
            restored = checkpoints.restore_newest(wanted or abstract())
        return restored, capfd.readouterr().out

    return newest


def steps(workdir):
    return sorted(int(entry.name) for entry in (workdir / CHECKPOINTS_DIR).iterdir() if entry.name.isdigit())


def test_intact_checkpoint_is_restored(copy, states, newest):
    restored, out = newest(copy)
    assert same(restored.state, states[7])
    assert restored.fingerprint == FACTS
    assert out == ''
    assert steps(copy) == [3, 5, 7]
    found, compared = corrupt_arrays(copy / CHECKPOINTS_DIR / '7')
    assert found == []
    assert compared == sum(len(jax.tree.leaves(tree)) for tree in states[7][2:5]) + 2


def files_of(step):
    return sorted(path for path in step.rglob('*') if path.is_file() and path.name not in UNREAD)


# Removal is tested first, because it shows the unused files.
DAMAGES = {'remove': remove, 'flip': flip, 'cut': cut}


def test_damaged_files_are_never_restored(copy, states, newest, record_property):
    """Damage of any file is detected, or is in unused bytes; it never affects a restored state."""
    rng = random.Random(0)
    step = copy / CHECKPOINTS_DIR / '7'
    found = dict.fromkeys(('remove', 'flip', 'cut'), 0)
    # Unused files that Orbax leaves behind, and unused bytes in other files.
    unread, idle = set(), 0
    paths = [path for path in files_of(step) if path.stat().st_size]
    rng.shuffle(paths)
    tries = ((path, name, damage) for path in itertools.cycle(paths) for name, damage in DAMAGES.items())
    wanted = how_many(12, 201)
    while sum(found.values()) < wanted:
        path, name, damage = next(tries)
        if path in unread:
            continue
        content = path.read_bytes()
        damage(path, rng)
        restored, out = newest(copy)
        if out:
            # The previous checkpoint is restored, and a line names the damaged item.
            assert same(restored.state, states[5]), (name, path)
            assert out.count('\n') == 1
            assert str(step) in out
            assert steps(copy) == [3, 5]
            found[name] += 1
            (copy / CHECKPOINTS_DIR / DAMAGED / '7').rename(step)
        else:
            assert same(restored.state, states[7]), (name, path)
            assert restored.fingerprint == FACTS
            if name == 'remove':
                unread.add(path)
            else:
                idle += 1
        path.write_bytes(content)
    # Negative control: the repaired checkpoint is restored.
    restored, out = newest(copy)
    assert same(restored.state, states[7])
    assert out == ''
    assert min(found.values()) > 0, found
    kinds = f'{found["flip"]} bit flips, {found["cut"]} truncations, {found["remove"]} deleted files'
    rest = f'{idle} in unused bytes, {len(unread)} in unused files'
    measured(
        record_property, 'damage', f'{wanted} detected, previous step restored: {kinds}; {rest}; incorrect restores: 0'
    )


def replaced(item, workdir, states):
    """Replaces arrays of step 7 by those of another step, which are readable but wrong."""
    for name in ('5', '7'):
        assert (workdir / CHECKPOINTS_DIR / name / item).is_dir()
    shutil.rmtree(workdir / CHECKPOINTS_DIR / '7' / item)
    shutil.copytree(workdir / CHECKPOINTS_DIR / '5' / item, workdir / CHECKPOINTS_DIR / '7' / item)


@pytest.mark.parametrize('item', ['params', 'ema', 'optimizer', 'progress', 'data', 'checksums'])
def test_previous_step_replaces_a_damaged_step(copy, states, newest, item):
    if item == 'data':
        path = copy / CHECKPOINTS_DIR / '7' / 'data' / 'metadata'
        path.write_text(json.dumps({**json.loads(path.read_text()), 'window': 17}))
    else:
        replaced(item, copy, states)
    found, _ = corrupt_arrays(copy / CHECKPOINTS_DIR / '7')
    # With the checksums of another step, all arrays are reported.
    assert found if item == 'checksums' else [f'checkpoints/7/{item}' in line for line in found] == [True]
    restored, out = newest(copy)
    assert same(restored.state, states[5])
    assert out.count('\n') == 1
    for part in (
        'checkpoint of step 7 is damaged and skipped',
        str(copy / CHECKPOINTS_DIR / '7'),
        'falling back to step 5',
    ):
        assert part in out
    if item != 'checksums':
        assert f'7/{item}' in out
    # The damaged checkpoint is kept for inspection.
    assert steps(copy) == [3, 5]
    assert (copy / CHECKPOINTS_DIR / DAMAGED / '7' / 'params').is_dir()
    assert find_step(str(copy)).name == '5'


def test_damaged_step_can_be_saved_again(copy, states, newest):
    replaced('params', copy, states)
    for _ in range(2):
        restored, out = newest(copy)
        assert same(restored.state, states[5])
    # The warning appears once.
    assert out == ''
    save(copy, [states[7]])
    assert same(newest(copy)[0].state, states[7])


def test_several_damaged_steps(copy, states, newest):
    replaced('params', copy, states)
    shutil.rmtree(copy / CHECKPOINTS_DIR / '5' / 'optimizer')
    restored, out = newest(copy)
    assert same(restored.state, states[3])
    assert [line.split(' is damaged')[0] for line in out.splitlines()] == [
        'checkpoint of step 7',
        'checkpoint of step 5',
    ]
    assert steps(copy) == [3]
    assert {entry.name for entry in (copy / CHECKPOINTS_DIR / DAMAGED).iterdir()} == {'5', '7'}


def test_nothing_changes_if_all_steps_are_damaged(copy, newest):
    for step in (3, 5, 7):
        (copy / CHECKPOINTS_DIR / str(step) / 'params' / '_METADATA').write_text('{')
    with pytest.raises(InputError, match='all 3 checkpoints are damaged') as info:
        newest(copy)
    assert str(copy / CHECKPOINTS_DIR / '7' / 'params') in str(info.value)
    assert '\n' not in str(info.value)
    assert steps(copy) == [3, 5, 7]
    assert not (copy / CHECKPOINTS_DIR / DAMAGED).exists()


def test_another_model_is_not_damage(copy, newest):
    other = abstract_on(2, model__num_layers=3, **EMA)
    with pytest.raises(InputError, match='checkpoint of another model'):
        newest(copy, other)
    assert steps(copy) == [3, 5, 7]
    # Metadata that lists an item that was not saved is damage.
    path = copy / CHECKPOINTS_DIR / '7' / 'params' / '_METADATA'
    text = path.read_text()
    path.write_text(text.replace('embedding', 'embeddinh'))
    assert path.read_text() != text
    restored, out = newest(copy)
    assert int(restored.state.step) == 5
    assert f'{copy}/checkpoints/7/params: ' in out


def test_step_without_checksums_is_restored_with_a_warning(copy, states, newest):
    step = copy / CHECKPOINTS_DIR / '7'
    shutil.rmtree(step / 'checksums')
    progress = json.loads((step / 'progress' / 'metadata').read_text())
    # The metadata lists checksums, but they are missing.
    restored, out = newest(copy)
    assert int(restored.state.step) == 5
    assert 'checksums: missing' in out
    (copy / CHECKPOINTS_DIR / DAMAGED / '7').rename(step)
    progress.pop('checksums')
    (step / 'progress' / 'metadata').write_text(json.dumps(progress))
    restored, out = newest(copy)
    assert same(restored.state, states[7])
    assert out == 'step 7 was saved without checksums: its integrity cannot be verified\n'
    assert corrupt_arrays(step) == ([], 0)


def test_params_only_restore_verifies_checksums(copy, states):
    step = copy / CHECKPOINTS_DIR / '7'
    assert same(restore_params(step, abstract().params), states[7].params)
    replaced('params', copy, states)
    with pytest.raises(CorruptCheckpointError, match=r'7/params: damaged: .*, and \d+ more'):
        restore_params(step, abstract().params)
    # Undamaged items can be restored.
    assert same(restore_params(step, abstract().params, item='ema'), states[7].ema)


def test_best_and_permanent_steps_are_kept(tmp_path):
    rules = {'max_to_keep': 1, 'keep_best': 1, 'keep_period': 4}
    small = abstract_on(1)
    losses = {2: 3.0, 3: 1.0, 4: 2.0, 5: None, 6: 2.5}
    with Checkpoints(tmp_path, **rules) as checkpoints:
        for step, loss in losses.items():
            state = random_state(small, step=step, skipped=0, seed=step)
            checkpoints.save(step, state, FACTS, validation_loss=loss, history={'hours': step / 2})
    assert steps(tmp_path) == [3, 4, 6]
    assert find_step(f'{tmp_path}@best').name == '3'
    # A new manager must find the checkpoints on disk.
    with Checkpoints(tmp_path, **rules) as checkpoints:
        assert checkpoints.restore(4, small).history == {'hours': 2.0}
        checkpoints.save(7, random_state(small, step=7, skipped=0), FACTS, validation_loss=0.5)
    assert steps(tmp_path) == [4, 7]
    assert find_step(f'{tmp_path}@best').name == '7'


def test_best_step_requires_validation_losses(saved):
    with pytest.raises(InputError, match=r'no step was saved with a validation loss .*; available steps: 3, 5, 7'):
        find_step(f'{saved}@best')


def test_checkpoint_unreadable_by_one_process_is_used_by_none(monkeypatch, tmp_path):
    def fail():
        raise CorruptCheckpointError('7/params: cannot be read')

    # A single process decides without communication.
    assert _agree_on_errors(tmp_path, lambda: 'state') == 'state'
    monkeypatch.setattr(jax, 'process_count', lambda: 2)
    for failed, read, message in (
        ([False, False], lambda: 'state', None),
        ([False, True], lambda: 'state', 'cannot be read by process 1'),
        ([True, False], fail, '7/params: cannot be read'),
    ):
        sent = []
        monkeypatch.setattr(
            restore.multihost_utils, 'process_allgather', lambda x, f=failed, s=sent: s.append(x) or np.array(f)
        )
        if message is None:
            assert _agree_on_errors(tmp_path, read) == 'state'
        else:
            with pytest.raises(CorruptCheckpointError, match=message):
                _agree_on_errors(tmp_path, read)
        # Each process sends its result to all processes.
        assert [bool(x) for x in sent] == [read is fail]
