"""`maxlm checkpoints`: list, verify, delete and fetch."""

import dataclasses
import functools
import json
import os
import shutil
from unittest import mock

import fsspec
import jax
import pytest

from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.checkpoint.drop_optimizer import drop_optimizer
from maxlm.checkpoint.manager import Checkpoints
from maxlm.checkpoint.params import restore_params
from maxlm.checkpoint.restore import is_params_only
from maxlm.cli.models import checkpoints
from maxlm.config.schema import CheckpointConfig
from maxlm.config.serialization import to_json
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, InputError
from maxlm.formatting import format_bytes
from maxlm.trainer.run_context import _surplus, check_resume
from maxlm.workdir.files import CONFIG
from maxlm.workdir.files import METRICS_FILE as METRICS
from maxlm.workdir.lock import LOCK, STALE_SECONDS, WorkdirLock, this_process
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, to_path
from tests.checkpoint.test_manager import FACTS, abstract_on, config_on, random_state, restore, same
from tests.messages import assert_error_line

LOSSES = {2: 3.0, 4: 1.5, 6: 2.0, 8: None}
RULES = {'checkpoint__max_to_keep': 1, 'checkpoint__keep_best': 1, 'checkpoint__keep_period': 6}

pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')


@pytest.fixture(scope='module')
def states():
    return {step: random_state(abstract_on(1), step=step, skipped=0, seed=step) for step in LOSSES}


@pytest.fixture(scope='module')
def saved(tmp_path_factory, states):
    """Returns a workdir with checkpoints 2 to 8, which tests must not change."""
    workdir = tmp_path_factory.mktemp('saved') / 'run'
    with Checkpoints(workdir, max_to_keep=10) as written:
        for step, state in states.items():
            written.save(step, state, FACTS, validation_loss=LOSSES[step])
    (workdir / CONFIG).write_text(to_json(config_on(1, **RULES)))
    (workdir / METRICS).write_text('{"step": 8}\n')
    return workdir


@pytest.fixture
def copy(saved, tmp_path):
    shutil.copytree(saved, tmp_path / 'run')
    return tmp_path / 'run'


@pytest.fixture
def verb(run_command):
    return functools.partial(run_command, checkpoints.main)


def steps(workdir):
    return sorted(int(entry.name) for entry in (workdir / CHECKPOINTS_DIR).iterdir() if entry.name.isdigit())


def size_of(directory):
    return sum(path.stat().st_size for path in directory.rglob('*') if path.is_file())


def flip(step, item='params'):
    """Changes bytes throughout an item's arrays, because some bytes of the files are unused."""
    for path in (step / item).rglob('d/*'):
        content = bytearray(path.read_bytes())
        content[::97] = bytes(byte ^ 4 for byte in content[::97])
        path.write_bytes(content)


def test_the_list(saved, verb):
    code, out, err = verb('list', saved, '--json')
    assert (code, err) == (EXIT_DONE, '')
    assert [json.loads(line) for line in out.splitlines()] == [
        {
            'name': f'{saved}@{step}',
            'step': step,
            'bytes': size_of(saved / CHECKPOINTS_DIR / str(step)),
            'optimizer_bytes': size_of(saved / CHECKPOINTS_DIR / str(step) / 'optimizer'),
            'validation_loss': LOSSES[step],
            'kept': kept,
        }
        for step, kept in {2: 'nothing', 4: 'best', 6: 'permanent', 8: 'last'}.items()
    ]
    code, out, _ = verb('list', f'{saved}@best')
    assert code == EXIT_DONE
    assert [line.split()[0] for line in out.splitlines()] == ['checkpoint', f'{saved}@4']
    assert '1.5000' in out
    # Other retention rules give other reasons.
    assert json.loads(verb('list', f'{saved}@2', '--json', '--max-to-keep=4')[1])['kept'] == 'last'


def test_intact_checkpoints_verify(saved, verb):
    code, out, err = verb('verify', saved)
    assert (code, err) == (EXIT_DONE, '')
    assert [line.split()[:2] for line in out.splitlines()] == [['intact', f'{saved}@{step}:'] for step in LOSSES]


def test_a_relative_path_verifies(saved, verb, monkeypatch):
    monkeypatch.chdir(saved.parent)
    code, out, _ = verb('verify', saved.name)
    assert code == EXIT_DONE
    assert out.startswith('intact    run@2: ')


@pytest.mark.parametrize('item', ['params', 'optimizer'])
def test_a_damaged_checkpoint_is_named(copy, verb, item):
    flip(copy / CHECKPOINTS_DIR / '6', item)
    code, out, _ = verb('verify', copy)
    assert code == EXIT_FAILED
    lines = [line.split()[0] for line in out.splitlines()]
    assert lines == ['intact', 'intact', 'damaged', 'intact']
    assert str(copy / CHECKPOINTS_DIR / '6' / item) in out
    assert verb('verify', f'{copy}@6')[0] == EXIT_FAILED
    # Nothing is moved, and an intact step can be verified alone.
    assert steps(copy) == list(LOSSES)
    assert verb('verify', f'{copy}@4')[0] == EXIT_DONE


def test_pruning(copy, verb):
    code, out, _ = verb('prune', copy, '--dry-run')
    assert code == EXIT_DONE
    assert out.splitlines()[0].startswith(f'{copy}@2: would be deleted')
    assert f'{copy}: 3 of 4 steps kept' in out
    assert steps(copy) == [2, 4, 6, 8]
    assert verb('prune', copy)[0] == EXIT_DONE
    assert steps(copy) == [4, 6, 8]
    assert verb('prune', copy, '--max-to-keep=2', '--keep-best=0', '--keep-period=0')[0] == EXIT_DONE
    assert steps(copy) == [6, 8]
    assert list((copy / CHECKPOINTS_DIR / '_trash').iterdir()) == []
    # Without a config, the rules must be given as options.
    (copy / CONFIG).unlink()
    code, _, err = verb('prune', copy)
    assert code == EXIT_BAD_INPUT
    assert str(copy / CONFIG) in err
    assert steps(copy) == [6, 8]


def parameters(workdir, step):
    return restore_params(workdir / CHECKPOINTS_DIR / str(step), abstract_on(1).params)


def test_the_optimizer_state_of_old_steps_is_dropped(copy, verb, states):
    folder = copy / CHECKPOINTS_DIR
    rules = ('--max-to-keep=4', '--drop-optimizer')
    sizes = {step: size_of(folder / str(step) / 'optimizer') for step in (2, 4)}
    freed = sum(sizes.values())
    # A rollback after step 8 restores step 6, which precedes step 8 by guard.rollback_skip_steps=2.
    (copy / CONFIG).write_text(to_json(config_on(1, guard__rollback_skip_steps=2, guard__max_rollbacks=2)))
    code, out, _ = verb('prune', copy, *rules, '--dry-run')
    assert code == EXIT_DONE
    complete = format_bytes(sum(size_of(folder / str(step) / 'optimizer') for step in (6, 8)))
    assert out.splitlines()[-2:] == [
        f'{copy}: optimizer state kept to resume and roll back: steps 6, 8, {complete}',
        f'{copy}: 4 of 4 steps kept; {format_bytes(freed)} freed',
    ]
    assert size_of(folder / '2/optimizer') > 0
    before = size_of(folder)
    code, out, err = verb('prune', copy, *rules)
    assert (code, err) == (EXIT_DONE, '')
    assert out.splitlines()[:2] == [
        f'{copy}@{step}: optimizer state deleted, {format_bytes(size)}' for step, size in sizes.items()
    ]
    # The checksums are shorter, too.
    assert freed <= before - size_of(folder) < freed + 10_000
    assert [(folder / str(step) / 'optimizer').exists() for step in LOSSES] == [False, False, True, True]
    # All steps verify and can be used; only the steps with optimizer state can be resumed.
    assert verb('verify', copy)[0] == EXIT_DONE
    for step in LOSSES:
        assert same(parameters(copy, step), states[step].params)
    assert same(restore(copy, abstract_on(1), step=6).state, states[6])
    with pytest.raises(InputError, match=r'4/optimizer: missing .* --drop-optimizer\); resume from a step with'):
        restore(copy, abstract_on(1), step=4)
    with pytest.raises(InputError, match=r'--resume=.*@4: step 4 has no optimizer state .*; choose a step'):
        check_resume(f'{copy}@4', config_on(1))
    check_resume(f'{copy}@6', config_on(1))
    # A second call changes nothing.
    assert verb('prune', copy, *rules)[1].endswith('4 of 4 steps kept; 0 B freed\n')
    # Without rollbacks, only the newest step is needed.
    (copy / CONFIG).write_text(to_json(config_on(1, guard__max_rollbacks=0)))
    assert f'{copy}@6: optimizer state deleted' in verb('prune', f'{copy}@6', *rules)[1]
    assert (folder / '8/optimizer').exists()
    assert [json.loads(line)['optimizer_bytes'] > 0 for line in verb('list', copy, '--json')[1].splitlines()] == [
        False,
        False,
        False,
        True,
    ]


@pytest.mark.parametrize('stop_at', ['checksums', 'rename', 'delete'])
def test_an_interrupted_drop_leaves_a_usable_step(copy, states, monkeypatch, stop_at):
    class KilledError(Exception):
        pass

    def kill(*_, **__):
        raise KilledError

    step = copy / CHECKPOINTS_DIR / '4'
    with monkeypatch.context() as patch:
        if stop_at == 'checksums':
            patch.setattr('maxlm.checkpoint.drop_optimizer.atomic_write', kill)
        elif stop_at == 'rename':
            patch.setattr('maxlm.checkpoint.drop_optimizer.StepDirectory.delete_item', kill)
        else:
            # The first call clears the trash; the second one deletes the item.
            patch.setattr('maxlm.workdir.step_dirs._remove', mock.Mock(side_effect=[None, KilledError]))
        with pytest.raises(KilledError):
            drop_optimizer(copy, 4)
    assert same(parameters(copy, 4), states[4].params)
    assert corrupt_arrays(to_path(step))[0] == []
    # The old step is complete, or the step has no optimizer state.
    assert is_params_only(to_path(step)) is (stop_at != 'checksums')
    if stop_at == 'checksums':
        assert same(restore(copy, abstract_on(1), step=4).state, states[4])
    else:
        with pytest.raises(InputError, match='contains only parameters'):
            restore(copy, abstract_on(1), step=4)
    # Another call or the next run deletes the files.
    drop_optimizer(copy, 4)
    assert not (step / 'optimizer').exists()
    assert list((copy / CHECKPOINTS_DIR / '_trash').iterdir()) == []


def test_a_step_without_checksums_can_be_dropped(copy):
    shutil.rmtree(copy / CHECKPOINTS_DIR / '4/checksums')
    assert drop_optimizer(copy, 4) > 0
    assert is_params_only(to_path(copy / CHECKPOINTS_DIR / '4'))


def test_the_size_limit_applies_to_steps_of_other_machines_in_a_bucket(saved):
    newest = size_of(saved / CHECKPOINTS_DIR / '8')
    rules = CheckpointConfig(max_to_keep=9, keep_best=1)
    assert _surplus(str(saved), rules, list(LOSSES)) == []
    limited = dataclasses.replace(rules, max_gib=2.5 * newest / 2**30)
    # Step 4 has the lowest loss.
    assert _surplus(str(saved), limited, list(LOSSES)) == [2, 6]


def test_prune_is_refused_during_a_run(copy, verb):
    with WorkdirLock(copy):
        code, _, err = verb('prune', copy)
        assert code == EXIT_BAD_INPUT
        assert f'{copy}: in use by process {os.getpid()}' in err
        assert verb('prune', copy, '--dry-run')[0] == EXIT_DONE
    # The lock of another machine cannot be checked, and the command does not wait for it.
    path = copy / LOCK
    path.write_text(json.dumps({**dataclasses.asdict(this_process()), 'kernel': 'another'}))
    assert verb('prune', copy)[0] == EXIT_BAD_INPUT
    assert steps(copy) == [2, 4, 6, 8]
    os.utime(path, (path.stat().st_atime, path.stat().st_mtime - 2 * STALE_SECONDS))
    assert verb('prune', copy)[0] == EXIT_DONE
    assert steps(copy) == [4, 6, 8]
    assert not path.exists()


def test_fetching_a_step(saved, states, tmp_path, verb):
    code, out, err = verb('fetch', saved, '--output', tmp_path / 'local')
    assert code == EXIT_DONE
    assert err.count('\n') == err.count('using step 8') == 1
    assert steps(tmp_path / 'local') == [8]
    assert f'{tmp_path}/local/checkpoints/8' in out
    assert same(restore(tmp_path / 'local', abstract_on(1), step=8).state, states[8])
    assert (tmp_path / 'local' / CONFIG).read_text() == (saved / CONFIG).read_text()
    # A resumed run appends to this file.
    assert (tmp_path / 'local' / METRICS).read_text() == (saved / METRICS).read_text()
    # Another checkpoint is added.
    assert verb('fetch', f'{saved}@2', '--output', tmp_path / 'local')[0] == EXIT_DONE
    assert steps(tmp_path / 'local') == [2, 8]
    code, _, err = verb('fetch', saved, '--output', tmp_path / 'local')
    assert code == EXIT_BAD_INPUT
    assert 'checkpoint already exists' in err


def test_a_bucket(saved, states, tmp_path, verb):
    # An in-memory bucket of fsspec. A step exists when its commit marker exists.
    bucket = fsspec.filesystem('memory')
    bucket.put(str(saved), '/bucket/run', recursive=True)
    bucket.rm('/bucket/run/checkpoints/8/commit_success.txt')
    url = 'memory://bucket/run'
    code, out, _ = verb('list', url, '--json')
    assert code == EXIT_DONE
    found = [json.loads(line) for line in out.splitlines()]
    assert [(entry['name'], entry['validation_loss']) for entry in found] == [
        (f'{url}@{n}', LOSSES[n]) for n in (2, 4, 6)
    ]
    assert verb('fetch', f'{url}@best', '--output', tmp_path)[0] == EXIT_DONE
    assert same(restore(tmp_path, abstract_on(1), step=4).state, states[4])
    code, _, err = verb('verify', url)
    assert code == EXIT_BAD_INPUT
    assert 'only local directories can be verified' in err


def test_fetching_parameters_alone(saved, states, tmp_path, verb):
    assert verb('fetch', f'{saved}@best', '--output', tmp_path, '--weights-only')[0] == EXIT_DONE
    step = tmp_path / CHECKPOINTS_DIR / '4'
    assert not (step / 'optimizer').exists()
    assert not (tmp_path / METRICS).exists()
    assert size_of(step) < 0.6 * size_of(saved / CHECKPOINTS_DIR / '4')
    assert same(restore_params(step, abstract_on(8).params), jax.device_get(states[4].params))
    assert not same(restore_params(step, abstract_on(8).params), jax.device_get(states[8].params))
    # The fetched checkpoints can be verified, and no run resumes from them by mistake.
    assert verb('verify', tmp_path)[0] == EXIT_DONE
    with pytest.raises(InputError, match='init_from'):
        restore(tmp_path, abstract_on(1), step=4)
    flip(step)
    assert verb('verify', tmp_path)[0] == EXIT_FAILED


def test_an_interrupted_fetch_resumes(saved, states, tmp_path, verb):
    unfinished = tmp_path / CHECKPOINTS_DIR / '_fetching' / '8'
    shutil.copytree(saved / CHECKPOINTS_DIR / '8', unfinished)
    files = sorted(path for path in unfinished.rglob('d/*'))
    kept = files[0].stat().st_ino
    for path in files[1:]:
        path.unlink()
    assert steps(tmp_path) == []
    assert verb('fetch', saved, '--output', tmp_path)[0] == EXIT_DONE
    assert same(restore(tmp_path, abstract_on(1), step=8).state, states[8])
    # Existing files are not downloaded again.
    assert (tmp_path / CHECKPOINTS_DIR / '8' / files[0].relative_to(unfinished)).stat().st_ino == kept


def test_a_damaged_step_is_not_fetched(copy, tmp_path, verb):
    flip(copy / CHECKPOINTS_DIR / '8')
    code, out, _ = verb('fetch', copy, '--output', tmp_path / 'local')
    assert code == EXIT_FAILED
    assert f'{copy}/checkpoints/8/params' in out
    assert steps(tmp_path / 'local') == []
    assert verb('fetch', f'{copy}@6', '--output', tmp_path / 'local')[0] == EXIT_DONE


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['list', '{}/nothing'], 'no checkpoint in'),
        (['verify', '{}@5'], "step '5' does not exist; available steps: 2, 4, 6, 8"),
        (['prune', '{}', '--max-to-keep=0'], '--max-to-keep=0: must be at least 1'),
        (['fetch', '{}@3', '--output=x'], "step '3' does not exist"),
    ],
)
def test_bad_input(saved, verb, words, message):
    code, out, err = verb(*(word.format(saved) for word in words))
    assert (code, out) == (EXIT_BAD_INPUT, '')
    assert_error_line(err, message)
