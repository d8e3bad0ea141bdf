"""Failed saves: training continues, older steps remain, and the next save succeeds."""

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
    """Yields a function that limits files to a few KiB, as on a full disk, or removes the limit."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)

    def fill(is_full=True):
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]) if is_full else before)

    yield fill
    fill(is_full=False)
    signal.signal(signal.SIGXFSZ, handler)


def entries(workdir):
    return sorted(entry.name for entry in (workdir / CHECKPOINTS_DIR).iterdir())


def test_a_full_disk(tmp_path, full_disk, capfd, record_property):
    steps = range(2, 2 + how_many(2, 50))
    messages = []
    with Checkpoints(tmp_path, max_to_keep=1, on_failure=messages.append) as checkpoints:
        checkpoints.save(1, state(1), FACTS)
        assert checkpoints.wait() == 1
        full_disk()
        for step in steps:
            checkpoints.save(step, state(step), FACTS)
            assert checkpoints.wait() == 1
        # Unfinished saves are deleted, so that they do not use space.
        assert [name for name in entries(tmp_path) if UNFINISHED in name] == []
        full_disk(is_full=False)
        assert same(checkpoints.restore(1, ABSTRACT).state, state(1))
        # The failed step can be saved again.
        last = steps[-1]
        checkpoints.save(last, state(last), FACTS)
        assert checkpoints.wait() == last
        assert same(checkpoints.restore_newest(ABSTRACT).state, state(last))
    assert messages == [
        f'checkpoint of step {step} not saved: File too large; the newest checkpoint is step 1; training continues'
        for step in steps
    ]
    assert saved_steps(tmp_path) == [last]
    assert capfd.readouterr().err == ''
    measured(
        record_property,
        'full-disk',
        f'{len(steps)} of {len(steps)} failed saves reported in one line; previous step bit-identical',
    )


def test_first_save_may_fail(tmp_path):
    messages = []
    with Checkpoints(tmp_path, max_to_keep=1, on_failure=messages.append) as checkpoints:
        assert checkpoints.wait() is None
        # A regular file replaces the checkpoint directory.
        (tmp_path / CHECKPOINTS_DIR).write_text('')
        checkpoints.save(1, state(1), FACTS)
        assert checkpoints.wait() is None
        (tmp_path / CHECKPOINTS_DIR).unlink()
        checkpoints.save(2, state(2), FACTS)
        assert checkpoints.wait() == 2
    assert messages == [
        'checkpoint of step 1 not saved: Not a directory; there is no earlier checkpoint; training continues'
    ]


def test_rollback(tmp_path):
    """A rollback deletes later steps, and steps with the same numbers can be saved again."""
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
        # The step was saved without a history.
        assert restored.history == {}


def test_existing_step_is_not_overwritten(tmp_path):
    with Checkpoints(tmp_path, max_to_keep=3) as checkpoints:
        checkpoints.save(1, state(1), FACTS)
        checkpoints.save(1, state(2), FACTS)
        assert same(checkpoints.restore(1, ABSTRACT).state, state(1))


@pytest.mark.parametrize(
    ('error', 'reason'),
    [
        (OSError(28, 'No space left on device', '/disk/x'), 'No space left on device'),
        (ValueError("OUT_OF_RANGE: Error writing: Failed [os_error_code='28'] [x='y']"), 'No space left on device'),
        (ValueError("PERMISSION_DENIED: x [http_response_code='403']"), 'the bucket returned status 403'),
        (OSError('Forbidden: https://x?token=hunter2'), 'the bucket returned status 403'),
        (RuntimeError('one\ntwo https://x/y?token=hunter2'), 'RuntimeError: one two https://x/y'),
    ],
)
def test_failure_reason_is_one_line(error, reason):
    assert failure_reason(error) == reason


@pytest.mark.multiprocess
def test_no_process_waits_for_a_failed_process(tmp_path):
    with forking('tests.checkpoint.failing_pair:main') as parent:
        pair = parent.start_run(2, [tmp_path], tmp_path / 'logs')
        assert [process.wait() for process in pair] == [0, 0], pair[0].stderr + pair[1].stderr
    results = [json.loads(process.stdout.splitlines()[-1]) for process in pair]
    # The disk is full for process 1 at step 2 and for process 0 at step 3. Both processes report it immediately.
    end = 'File too large; the newest checkpoint is step 1; training continues'
    busy = 'checkpoint of step 6 skipped: the previous checkpoint is still being written; training continues'
    assert [result['messages'] for result in results] == [
        [f'checkpoint of step 2 not saved: process 1: {end}', f'checkpoint of step 3 not saved: {end}', busy],
        [f'checkpoint of step 2 not saved: {end}', f'checkpoint of step 3 not saved: {end}', busy],
    ]
    for result in results:
        assert result['newest'] == [1, 1, 1, 4, 1, 4, 5, 6]
        assert result['same'] == [True, True]
        # Orbax alone would wait for 20 minutes.
        assert max(result['seconds']) < 20
    # The checksums of two processes match the arrays that one process reads.
    found, compared = corrupt_arrays(tmp_path / CHECKPOINTS_DIR / '6')
    assert found == []
    assert compared > 40
