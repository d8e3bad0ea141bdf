import pytest

from maxlm.data.executors.executor import TaskStatus, run_once, run_tasks
from maxlm.data.executors.local_executor import InProcess
from maxlm.errors import InputError
from tests.data.executors.tasks import ScriptedTask


def run(tasks, *, retries=2):
    """Runs the tasks in this process and returns failures, progress and pauses."""
    progress, pauses = [0, 0, 0], []

    def on_progress(*new):
        progress[:] = map(sum, zip(progress, new, strict=True))

    with InProcess() as engine:
        failed = run_tasks(engine, tasks, retries=retries, on_progress=on_progress, sleep=pauses.append)
    return failed, progress, pauses


def test_all_tasks_run_once_and_report_progress(tmp_path):
    tasks = [ScriptedTask(tmp_path, str(i)) for i in range(5)]
    assert run(tasks) == ({}, [50, 15, 1500], [])
    assert all(task.is_done() and len(task.attempts) == 1 for task in tasks)
    assert run([]) == ({}, [0, 0, 0], [])


def test_failed_tasks_are_retried_after_the_others(tmp_path):
    tasks = [
        ScriptedTask(tmp_path, 'first', 'unreachable', num_failures=1),
        ScriptedTask(tmp_path, 'second'),
        ScriptedTask(tmp_path, 'third', 'wrong', num_failures=2),
        ScriptedTask(tmp_path, 'never', 'unreachable'),
    ]
    failed, _, pauses = run(tasks, retries=2)
    assert failed == {3: 'never: no answer'}
    assert [len(task.attempts) for task in tasks] == [2, 1, 3, 3]
    assert [task.is_done() for task in tasks] == [True, True, True, False]
    # Pauses increase with the attempts.
    assert pauses == [1.0, 2.0]


def test_without_retries(tmp_path):
    tasks = [ScriptedTask(tmp_path, 'first', 'wrong', num_failures=1), ScriptedTask(tmp_path, 'second')]
    failed, _, pauses = run(tasks, retries=0)
    assert list(failed) == [0]
    assert failed[0].startswith('ZeroDivisionError: wrong (tasks.py:')
    assert pauses == []
    assert tasks[1].is_done()


@pytest.mark.parametrize(
    ('failure', 'message'), [('bad', '1: not UTF-8'), ('full', '/disk/1: No space left on device')]
)
def test_bad_input_and_a_full_disk_stop_the_run(tmp_path, failure, message):
    tasks = [ScriptedTask(tmp_path, '0'), ScriptedTask(tmp_path, '1', failure), ScriptedTask(tmp_path, '2')]
    with pytest.raises(InputError) as error:
        run(tasks)
    assert str(error.value) == message
    # Finished tasks stay finished; no task is retried or started.
    assert [len(task.attempts) for task in tasks] == [1, 1, 0]
    assert tasks[0].is_done()


def test_an_interrupt_is_not_a_failure(tmp_path):
    with pytest.raises(KeyboardInterrupt):
        run_once(0, ScriptedTask(tmp_path, '0', 'interrupt'), lambda *_: None)
    assert run_once(7, ScriptedTask(tmp_path, '1'), lambda *_: None).ending is TaskStatus.DONE
