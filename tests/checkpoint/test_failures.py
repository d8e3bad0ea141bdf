"""A save that fails costs that save: the run goes on, older steps stay, the next save is there."""

import json
import resource
import signal

import pytest

from maxlm.checkpoint.async_save import failure_reason
from maxlm.checkpoint.checksums import corrupt_arrays
from maxlm.checkpoint.manager import Checkpoints, saved_steps
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR, UNFINISHED
from tests.checkpoint.test_manager import FACTS, abstract_on, random_state, same
from tests.faults import how_many, measured
from tests.forking import forking

pytestmark = pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')

ABSTRACT = abstract_on(1)


def state(step):
    return random_state(ABSTRACT, step=step, skipped=0, seed=step)


@pytest.fixture
def full_disk():
    """Limits files to a few KiB, as on a full disk, from the call on, until it is called with True."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(room=False):
        resource.setrlimit(resource.RLIMIT_FSIZE, before if room else (4096, before[1]))

    yield fill
    fill(room=True)
    signal.signal(signal.SIGXFSZ, handler)


def entries(workdir):
    return sorted(entry.name for entry in (workdir / CHECKPOINTS_DIR).iterdir())


def test_a_full_disk(tmp_path, full_disk, capfd, record_property):
    steps = range(2, 2 + how_many(2, 50))
    told = []
    with Checkpoints(tmp_path, max_to_keep=1, on_failure=told.append) as checkpoints:
        checkpoints.save(1, state(1), FACTS)
        assert checkpoints.wait() == 1
        full_disk()
        for step in steps:
            checkpoints.save(step, state(step), FACTS)
            assert checkpoints.wait() == 1
        # Unfinished saves are deleted, so that they do not use space.
        assert [name for name in entries(tmp_path) if UNFINISHED in name] == []
        full_disk(room=True)
        assert same(checkpoints.restore(1, ABSTRACT).state, state(1))
        # Nor is it lost for good: the step that failed can be saved.
        last = steps[-1]
        checkpoints.save(last, state(last), FACTS)
        assert checkpoints.wait() == last
        assert same(checkpoints.restore_newest(ABSTRACT).state, state(last))
    assert told == [
        f'checkpoint of step {step} not saved: File too large; the newest checkpoint is step 1; training continues'
        for step in steps
    ]
    assert saved_steps(tmp_path) == [last]
    assert capfd.readouterr().err == ''
    measured(
        record_property,
        'full-disk',
        f'{len(steps)} of {len(steps)} saves told in one line, the step before bit for bit',
    )


def test_first_save_may_fail(tmp_path):
    told = []
    with Checkpoints(tmp_path, max_to_keep=1, on_failure=told.append) as checkpoints:
        assert checkpoints.wait() is None
        # A file where the folder of checkpoints was.
        (tmp_path / CHECKPOINTS_DIR).write_text('')
        checkpoints.save(1, state(1), FACTS)
        assert checkpoints.wait() is None
        (tmp_path / CHECKPOINTS_DIR).unlink()
        checkpoints.save(2, state(2), FACTS)
        assert checkpoints.wait() == 2
    assert told == [
        'checkpoint of step 1 not saved: Not a directory; there is no earlier checkpoint; training continues'
    ]


def test_rollback(tmp_path):
    """After a rollback the steps behind it are gone, and the same numbers are saved anew."""
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        for step in (1, 2, 3, 4):
            checkpoints.save(step, state(step), FACTS, validation_loss=1 / step)
        assert checkpoints.steps() == [2, 3, 4]
        checkpoints.remove_after(4)
        assert checkpoints.steps() == [2, 3, 4]
        checkpoints.remove_after(2)
        assert checkpoints.steps() == [2] == saved_steps(tmp_path)
        assert checkpoints.latest_step() == 2
        other = random_state(ABSTRACT, step=3, skipped=0, seed=33)
        checkpoints.save(3, other, FACTS)
        assert checkpoints.wait() == 3
        restored = checkpoints.restore_newest(ABSTRACT)
        assert same(restored.state, other)
        assert not same(restored.state, state(3))
        # It was saved without one.
        assert restored.history == {}


def test_existing_step_is_not_overwritten(tmp_path):
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        checkpoints.save(1, state(1), FACTS)
        checkpoints.save(1, state(2), FACTS)
        assert same(checkpoints.restore(1, ABSTRACT).state, state(1))


@pytest.mark.parametrize(
    ('error', 'told'),
    [
        (OSError(28, 'No space left on device', '/disk/x'), 'No space left on device'),
        (ValueError("OUT_OF_RANGE: Error writing: Failed [os_error_code='28'] [x='y']"), 'No space left on device'),
        (ValueError("PERMISSION_DENIED: x [http_response_code='403']"), 'the bucket returned status 403'),
        (OSError('Forbidden: https://x?token=hunter2'), 'the bucket returned status 403'),
        (RuntimeError('one\ntwo https://x/y?token=hunter2'), 'RuntimeError: one two https://x/y'),
    ],
)
def test_failure_reason_is_one_line(error, told):
    assert failure_reason(error) == told


@pytest.mark.multiprocess
def test_no_process_waits_for_a_failed_process(tmp_path):
    with forking('tests.checkpoint.failing_pair:main') as parent:
        pair = parent.start_run(2, [tmp_path], tmp_path / 'logs')
        assert [process.wait() for process in pair] == [0, 0], pair[0].stderr + pair[1].stderr
    found = [json.loads(process.stdout.splitlines()[-1]) for process in pair]
    # At step 2 process 1 meets a full disk, at step 3 process 0 does; the other one hears of it at once.
    end = 'File too large; the newest checkpoint is step 1; training continues'
    busy = 'checkpoint of step 6 skipped: the previous checkpoint is still being written; training continues'
    assert [one['told'] for one in found] == [
        [f'checkpoint of step 2 not saved: process 1: {end}', f'checkpoint of step 3 not saved: {end}', busy],
        [f'checkpoint of step 2 not saved: {end}', f'checkpoint of step 3 not saved: {end}', busy],
    ]
    for one in found:
        assert one['newest'] == [1, 1, 1, 4, 1, 4, 5, 6]
        assert one['same'] == [True, True]
        # Orbax alone would wait for 20 minutes.
        assert max(one['seconds']) < 20
    # The checksums of both are those of what one reads.
    found, compared = corrupt_arrays(tmp_path / CHECKPOINTS_DIR / '6')
    assert found == []
    assert compared > 40
