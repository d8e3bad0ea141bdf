"""Tests the executor with real processes, which each test starts in about a second."""

import multiprocessing
import os

import pytest

from maxlm.data.executors.executor import run_tasks
from maxlm.data.executors.local_executor import Processes
from maxlm.errors import InputError
from tests.data.executors.tasks import ScriptedTask

pytestmark = pytest.mark.multiprocess


def run(tasks, *, num_slots=2, retries=1):
    progress = [0, 0, 0]

    def on_progress(*new):
        progress[:] = map(sum, zip(progress, new, strict=True))

    with Processes(num_slots) as engine:
        failed = run_tasks(engine, tasks, retries=retries, on_progress=on_progress, sleep=lambda _: None)
    return failed, progress


def test_tasks_run_in_other_processes(tmp_path):
    tasks = [ScriptedTask(tmp_path, str(i)) for i in range(6)]
    assert run(tasks) == ({}, [60, 18, 1800])
    pids = {pid for task in tasks for pid in task.attempts}
    assert os.getpid() not in pids
    assert 1 <= len(pids) <= 2
    # Each process has one thread.
    assert {task.result.read_text() for task in tasks} == {'false'}
    assert not multiprocessing.active_children()


@pytest.mark.parametrize(('failure', 'message'), [('killed', 'was killed by SIGKILL'), ('exit', 'exited with code 3')])
def test_a_process_that_dies_counts_as_one_attempt(tmp_path, failure, message):
    tasks = [
        ScriptedTask(tmp_path, 'once', failure, num_failures=1),
        ScriptedTask(tmp_path, 'always', failure),
        *(ScriptedTask(tmp_path, x) for x in 'abc'),
    ]
    failed, _ = run(tasks)
    assert list(failed) == [1]
    assert message in failed[1]
    assert [task.is_done() for task in tasks] == [True, False, True, True, True]
    assert [len(task.attempts) for task in tasks] == [2, 2, 1, 1, 1]


def test_bad_input_stops_the_other_tasks(tmp_path):
    tasks = [
        ScriptedTask(tmp_path, 'hangs', 'hang'),
        ScriptedTask(tmp_path, 'done'),
        ScriptedTask(tmp_path, 'bad', 'bad'),
    ]
    with pytest.raises(InputError, match='bad: not UTF-8'):
        run(tasks)
    assert tasks[1].is_done()
    assert not tasks[0].is_done()
    assert not multiprocessing.active_children()


def test_workers_ignore_ctrl_c(tmp_path):
    tasks = [ScriptedTask(tmp_path, str(i), 'ctrl-c') for i in range(3)]
    assert run(tasks, retries=0) == ({}, [30, 9, 900])
    assert [len(task.attempts) for task in tasks] == [1, 1, 1]
    # Negative control: in this process the interrupt ends the run.
    with pytest.raises(KeyboardInterrupt):
        ScriptedTask(tmp_path, 'in process', 'ctrl-c').run(lambda *_: None)


def test_processes_are_reused_by_the_next_stage(tmp_path):
    first, second = ([ScriptedTask(tmp_path, f'{stage}{i}') for i in range(2)] for stage in 'ab')
    with Processes(1) as engine:
        for tasks in (first, second):
            assert run_tasks(engine, tasks, retries=0, on_progress=lambda *_: None) == {}
    assert len({pid for task in (*first, *second) for pid in task.attempts}) == 1
