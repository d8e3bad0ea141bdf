"""Restart decisions: table of exit codes, and detection of progress in directories and buckets."""

import fsspec
import pytest

from maxlm.supervision.restarts import Policy, RestartHistory, find_workdir, newest_step, next_action

POLICY = Policy(max_failures=3, backoff=10.0)


def decisions_after(*ends, newest=-1):
    """Returns the decision after the attempts with the given (code, newest step)."""
    history, decisions = RestartHistory(newest, 0, POLICY.backoff), []
    for code, step in ends:
        decision, history = next_action(POLICY, history, code, step)
        decisions.append(decision)
    return decisions


@pytest.mark.parametrize(
    ('ends', 'code'),
    [
        ([(0, -1)], 0),
        ([(2, -1)], 2),
        ([(1, -1), (75, -1), (2, -1)], 2),
        # Another host has to replace this one, even if there is a new checkpoint.
        ([(1, -1), (75, -1), (74, 10)], 74),
        ([(1, -1), (1, -1), (7, -1)], 7),
        # Exit code 75 would make the caller restart the run.
        ([(75, -1), (1, -1), (75, -1)], 1),
        ([(1, 10), (1, 10), (137, 10), (137, 10)], 137),
        # Progress resets the count of failures.
        ([(1, -1), (1, -1), (1, 10)], None),
        ([(75, step) for step in range(10)], None),
        # An older newest step, such as after damage, is no progress.
        ([(1, 20), (1, 10), (1, 20), (1, 20)], 1),
    ],
)
def test_decisions(ends, code):
    *before, last = decisions_after(*ends)
    assert [decision.code for decision in before] == [None] * len(before)
    assert last.code == code


def test_pauses_double_until_there_is_progress():
    policy = Policy(max_failures=100, backoff=10.0)
    history, pauses = RestartHistory(-1, 0, policy.backoff), []
    for code, step in [(1, -1)] * 7 + [(75, -1), (1, -1), (1, 5), (1, 5)]:
        decision, history = next_action(policy, history, code, step)
        pauses.append(decision.pause)
    assert pauses == [10, 20, 40, 80, 160, 300, 300, 0, 300, 10, 20]


def test_the_workdir_of_a_command():
    assert find_workdir(['python', '-m', 'maxlm.train', '--workdir=runs/x', '--config=y']) == 'runs/x'
    assert find_workdir(['python', '--workdir', 'gs://bucket/x']) == 'gs://bucket/x'
    assert find_workdir(['python', '--workdirs=x']) == ''
    assert find_workdir(['python', '--workdir']) == ''
    # The default workdir of maxlm train.
    assert find_workdir(['python', '-m', 'maxlm.train', '--config', 'configs/depth.py:24']) == 'runs/depth-24'


def test_steps_of_a_directory(tmp_path):
    assert newest_step(str(tmp_path)) == newest_step('') == -1
    for name in ('9', '10', '11.orbax-checkpoint-tmp', '_trash', '_damaged'):
        (tmp_path / 'checkpoints' / name).mkdir(parents=True)
    assert newest_step(str(tmp_path)) == 10


def test_steps_of_a_bucket():
    filesystem = fsspec.filesystem('memory')
    for step in (9, 10, 11):
        filesystem.pipe_file(f'/run_of_supervision/checkpoints/{step}/params/x', b'')
    url = 'memory://run_of_supervision'
    # File systems with rename: complete steps are renamed.
    assert newest_step(url) == 11
    # File systems without rename: complete steps contain a marker file.
    for step in (9, 10):
        filesystem.pipe_file(f'/run_of_supervision/checkpoints/{step}/commit_success.txt', b'')
    assert newest_step(url) == 10
    assert newest_step('memory://nothing_of_supervision') == -1
    assert newest_step('nowhere://x') == -1
