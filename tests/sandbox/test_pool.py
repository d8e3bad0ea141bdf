"""Tests the sandbox pool: correct programs, order, limits, missing mechanisms, dying workers and cleanup."""

# Programs are written on one line each.
# ruff: noqa: E501

import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from maxlm.errors import InputError
from maxlm.sandbox.limits import MIB, SandboxLimits
from maxlm.sandbox.pool import ALWAYS_ENFORCED, GUARANTEES, MECHANISMS, Sandbox, SandboxJob, SandboxPool
from tests.conftest import ROOT

pytestmark = pytest.mark.multiprocess

LIMITS = SandboxLimits(wall_seconds=30.0, cpu_seconds=10.0, memory_bytes=256 * MIB)
GOOD = {
    'prints': ('print(6 * 7)', '', '42\n'),
    'reads': ('print(sum(map(int, input().split())))', '1 2 3\n', '6\n'),
    'reads much': ('import sys\nprint(len(sys.stdin.read()))', 'ab\n' * 500_000, '1500000\n'),
    'ignores a large input': ('print(1)', 'x' * 1_000_000, '1\n'),
    'prints much': ('print("x" * 900_000)', '', 'x' * 900_000 + '\n'),
    'processes Unicode': ('print(input()[::-1])', 'añ→😀', '😀→ña\n'),
    'is a long program': ('x = 1\n' * 20_000 + 'print(x)', '', '1\n'),
    'uses files': ('open("a", "w").write("x")\nimport os, tempfile\ntempfile.mkdtemp()\nprint(os.path.getsize("a"))', '', '1\n'),
    'starts with an empty directory': ('import os\nprint(os.listdir("."), os.path.exists("/tmp/a"))', '', '[] False\n'),
    'uses threads': ('from concurrent.futures import ThreadPoolExecutor as T\nprint(list(T(4).map(abs, [-1, 2])))', '', '[1, 2]\n'),
    'uses processes': ('import os\nif os.fork() == 0:\n    print(1, flush=True)\n    os._exit(0)\nos.wait()\nprint(2)', '', '1\n2\n'),
    'uses multiprocessing': ('import multiprocessing as m\nif __name__ == "__main__":\n    with m.get_context("fork").Pool(2) as p: print(p.map(abs, [-1, -2]))', '', '[1, 2]\n'),
    'uses asyncio': ('import asyncio\nasync def f():\n    await asyncio.sleep(0.01)\n    return 5\nprint(asyncio.run(f()))', '', '5\n'),
    'uses the library': ('import sqlite3, ctypes, hashlib, zlib, lzma, decimal, csv, statistics\nprint(hashlib.sha256(b"").hexdigest()[:4], sqlite3.connect(":memory:").execute("select 1").fetchone())', '', 'e3b0 (1,)\n'),
    'is a dataclass': ('from dataclasses import dataclass\nimport pickle\n@dataclass\nclass A: x: int\nprint(pickle.loads(pickle.dumps(A(1))))', '', 'A(x=1)\n'),
    'exits normally': ('import sys, atexit\natexit.register(print, "end")\nsys.exit(0)', '', 'end\n'),
    'calls exit': ('print(1)\nexit()', '', '1\n'),
    'has random numbers': ('import random\nrandom.seed(0)\nprint(random.random())', '', '0.8444218515250481\n'),
    'has sets in one order': ('print({"a", "b", "c", "d", "e"} == set("abcde"), hash("a") == hash("a"))', '', 'True True\n'),
}  # fmt: skip


@pytest.fixture(scope='module')
def pool():
    with SandboxPool(2, limits=LIMITS) as pool:
        yield pool


@pytest.mark.parametrize('without', [(), ('root',), ('mount namespace', 'network namespace', 'process namespace')])
def test_correct_programs_pass(without):
    # Locks of multiprocessing are files in /dev/shm, which a program shares if it has no mount namespace.
    good = {name: facts for name, facts in GOOD.items() if not without[1:] or name != 'uses multiprocessing'}
    programs = {name: SandboxJob(text, stdin) for name, (text, stdin, _) in good.items()}
    with SandboxPool(2, limits=LIMITS, without=without, required=()) as pool:
        results = dict(zip(programs, pool.run_many(list(programs.values())), strict=True))
    found = {name: (result.status, result.stdout, result.exit_code) for name, result in results.items()}
    assert found == {name: ('passed', stdout, 0) for name, (_, _, stdout) in good.items()}, results


def test_results_are_in_order(pool):
    programs = [SandboxJob(f'import time\ntime.sleep({0.2 if i % 5 == 0 else 0})\nprint({i})') for i in range(20)]
    assert [result.stdout for result in pool.run_many(programs)] == [f'{i}\n' for i in range(20)]
    assert pool.run_many([]) == []


def test_threads_may_share_a_pool(pool):
    found = {}

    def run(i):
        found[i] = pool.run(SandboxJob(f'print({i})')).stdout

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {i: f'{i}\n' for i in range(4)}


def test_sets_have_the_same_order_in_every_worker():
    program = SandboxJob('print(list({"a", "b", "c", "d", "e", "f"}), hash("x"))')
    with SandboxPool(2, limits=LIMITS) as first, SandboxPool(1, limits=LIMITS) as second:
        assert len({result.stdout for result in (*first.run_many([program] * 6), second.run(program))}) == 1


def test_a_failure_is_reported(pool):
    result = pool.run(SandboxJob('def f():\n    return 1 / 0\nf()'))
    assert result[:2] == ('error', '')
    assert result.exit_code == 1
    assert result.stderr.startswith('Traceback')
    assert 'return 1 / 0' in result.stderr
    assert result.stderr.endswith('ZeroDivisionError: division by zero\n')
    assert 'maxlm' not in result.stderr
    assert pool.run(SandboxJob('import sys\nsys.exit("no")'))[::4] == ('error', 1)
    assert pool.run(SandboxJob('import sys\nsys.exit(7)')).exit_code == 7
    assert pool.run(SandboxJob('print(len(input()))', stdin='\ud800')).status == 'passed'


def test_limits_apply_to_one_program(pool):
    text = 'x = bytearray(100 << 20)\nprint(len(x))'
    small = LIMITS._replace(memory_bytes=100 * MIB)
    assert [result.status for result in pool.run_many([SandboxJob(text), SandboxJob(text, limits=small)])] == [
        'passed',
        'memory',
    ]
    job = SandboxJob('print("x" * 2000)')
    assert pool.run(job._replace(limits=LIMITS._replace(output_bytes=1000)))[:2] == ('output', 'x' * 1000)
    assert pool.run(job).status == 'passed'


COUNT_FORKS = """import os, time
count = 1
try:
    while count < 100:
        if os.fork() == 0:
            time.sleep(60)
        count += 1
except OSError:
    print(count, flush=True)
"""


@pytest.mark.parametrize('without', [(), ('root',), ('root', 'process namespace')])
def test_the_number_of_processes_is_exact(without):
    tested = SandboxJob(f'{COUNT_FORKS}def number(): return count', tests='assert number() == 16')
    few = SandboxJob(COUNT_FORKS, limits=LIMITS._replace(processes=3))
    with SandboxPool(2, limits=LIMITS, without=without, required=['processes']) as pool:
        results = pool.run_many([SandboxJob(COUNT_FORKS), tested, few])
    assert [result.stdout for result in results] == ['16\n', '16\n', '3\n']
    assert results[1].status == 'passed'


@pytest.mark.parametrize('field', SandboxLimits._fields)
@pytest.mark.parametrize('value', [0, -1, float('nan'), float('inf'), True, '1', None])
def test_a_limit_is_a_positive_number(field, value):
    with pytest.raises(InputError, match=f'sandbox limit {field}='):
        SandboxLimits(**{field: value}).checked()


def test_wrong_settings_are_reported():
    with pytest.raises(InputError, match='workers=0: a sandbox requires at least 1'):
        SandboxPool(0)
    with pytest.raises(InputError, match=r"unknown sandbox mechanism 'selinux'; use one of: root, mount"):
        SandboxPool(1, without=['selinux'])
    with pytest.raises(InputError, match="unknown sandbox guarantee 'safety'"):
        SandboxPool(1, required=['safety'])


def test_guarantees_that_are_not_enforced_are_reported():
    unprotected = Sandbox((), {})
    assert unprotected.missing == tuple(GUARANTEES)
    assert unprotected.enforced == ALWAYS_ENFORCED
    assert Sandbox(MECHANISMS, {}).missing == ()
    assert str(unprotected) == f'sandbox with limits only; not enforced: {", ".join(GUARANTEES)}'
    assert 'not enforced' not in str(Sandbox(MECHANISMS, {}))
    for name, ways in GUARANTEES.items():
        for way in ways:
            assert name not in Sandbox(way, {}).missing
            assert all(name in Sandbox(way[:place] + way[place + 1 :], {}).missing for place in range(len(way)))


@pytest.mark.parametrize('mechanism', [name for name in MECHANISMS if name != 'root'])
def test_each_mechanism_can_be_left_out(mechanism):
    with SandboxPool(1, limits=LIMITS, without=[mechanism], required=()) as pool:
        assert mechanism not in pool.sandbox.mechanisms
        assert pool.run(SandboxJob('print(1)')).stdout == '1\n'
        assert pool.run(SandboxJob('import os\ndef f(): return 1', tests='assert f() == 1')).status == 'passed'


def test_a_sandbox_without_required_guarantees_does_not_start():
    without = ('mount namespace', 'landlock')
    with pytest.raises(InputError, match=r'cannot enforce files .*landlock: disabled'):
        SandboxPool(1, without=without)
    with SandboxPool(1, without=without, required=['network']) as pool:
        assert 'files' in pool.sandbox.missing
        # Control: the mechanism is indeed missing.
        assert pool.run(SandboxJob('print(len(open("/etc/passwd").read()) > 0)')).stdout == 'True\n'


def test_a_worker_that_dies_is_replaced():
    with SandboxPool(2, limits=LIMITS) as pool:
        workers = [worker.process.pid for worker in pool.workers]
        # While a program runs, the child of a worker has a child.
        children = [psutil.Process(worker).children()[0] for worker in workers]

        def kill():
            while not all(child.children() for child in children):
                time.sleep(0.01)
            os.kill(workers[0], signal.SIGKILL)
            children[1].kill()

        killer = threading.Thread(target=kill)
        killer.start()
        program = SandboxJob('import time\ntime.sleep(0.4)\nprint(1)')
        assert [result.status for result in pool.run_many([program] * 4)] == ['passed'] * 4
        killer.join()
        assert not set(workers) & {worker.process.pid for worker in pool.workers}
    assert not any(psutil.pid_exists(worker) for worker in workers)


def test_a_program_that_kills_its_workers_is_abandoned(monkeypatch):
    with SandboxPool(1, limits=LIMITS) as pool:

        def fail(worker):
            raise EOFError

        monkeypatch.setattr('maxlm.sandbox.pool.SandboxWorker.receive', fail)
        assert pool.run(SandboxJob('print(1)')).status == 'killed'
        monkeypatch.undo()
        assert pool.run(SandboxJob('print(1)')).status == 'passed'


def test_a_pool_that_was_interrupted_is_closed(monkeypatch):
    with SandboxPool(1, limits=LIMITS) as pool:

        def interrupt(worker):
            raise KeyboardInterrupt

        monkeypatch.setattr('maxlm.sandbox.pool.SandboxWorker.receive', interrupt)
        with pytest.raises(KeyboardInterrupt):
            pool.run(SandboxJob('print(1)'))
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match='the sandbox is closed'):
            pool.run(SandboxJob('print(2)'))


def test_a_suspended_machine_stops_no_program():
    limits = LIMITS._replace(wall_seconds=1.0)
    with SandboxPool(1, limits=limits) as pool:
        worker = psutil.Process(pool.workers[0].process.pid).children()[0]

        def pause():
            while not worker.children():
                time.sleep(0.01)
            monitor = worker.children()[0]
            monitor.suspend()
            time.sleep(1.0)
            monitor.resume()

        pauser = threading.Thread(target=pause)
        pauser.start()
        assert pool.run(SandboxJob('import time\ntime.sleep(0.5)\nprint(1)')).status == 'passed'
        pauser.join()


def test_closing_stops_running_programs():
    pool = SandboxPool(1, limits=LIMITS)
    below = psutil.Process(pool.workers[0].process.pid)
    pool.workers[0].send(SandboxJob('import os, time\nos.fork()\ntime.sleep(60)'), LIMITS)
    while len(below.children(recursive=True)) < 5:
        time.sleep(0.02)
    running = [below, *below.children(recursive=True)]
    pool.close()
    assert psutil.wait_procs(running, timeout=20)[1] == []
    pool.close()


@pytest.mark.parametrize('without', [(), ('mount namespace', 'process namespace')])
def test_workers_exit_if_their_parent_is_killed(without, tmp_path):
    program = (
        'import os, sys, tempfile\n'
        'from maxlm.sandbox.pool import *\n'
        f'pool = SandboxPool(1, without={without}, required=())\n'
        'print(pool.workers[0].process.pid, flush=True)\n'
        'pool.run(SandboxJob("import os, time\\nos.fork()\\ntime.sleep(60)"))'
    )
    environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'TMPDIR': str(tmp_path)}
    with subprocess.Popen(
        [sys.executable, '-c', program], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        while len(worker.children(recursive=True)) < 5:
            time.sleep(0.02)
        running = [worker, *worker.children(recursive=True)]
        parent.kill()
    assert psutil.wait_procs(running, timeout=20)[1] == []
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_left_behind(tmp_path, monkeypatch):
    monkeypatch.setenv('TMPDIR', str(tmp_path))
    monkeypatch.setattr('tempfile.tempdir', None)
    process = psutil.Process()
    before = process.num_fds(), threading.active_count(), process.children()
    with SandboxPool(2, limits=LIMITS, without=['mount namespace'], required=()) as pool:
        pool.run_many([SandboxJob('open("a", "w")\nimport os\nos.mkdir("b", 0)')] * 4)
    assert (process.num_fds(), threading.active_count(), process.children()) == before
    assert list(tmp_path.iterdir()) == []


def test_closing_ends_the_programs_of_another_thread():
    pool = SandboxPool(1, limits=LIMITS)
    errors = []

    def run():
        try:
            pool.run_many([SandboxJob('while True: pass')] * 100)
        except RuntimeError as error:
            errors.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    time.sleep(0.2)
    pool.close()
    # Long before the limits of the programs, and without new workers.
    thread.join(LIMITS.cpu_seconds)
    assert not thread.is_alive()
    assert errors == ['the sandbox is closed']
    assert pool.workers[0].process.poll() is not None


def test_an_unreferenced_pool_is_closed():
    pool = SandboxPool(1)
    worker = psutil.Process(pool.workers[0].process.pid)
    del pool
    assert psutil.wait_procs([worker], timeout=20)[1] == []


def test_a_worker_imports_little():
    with SandboxPool(1, limits=LIMITS) as pool:
        loaded = pool.run(SandboxJob('import sys\nprint(*sys.modules)')).stdout.split()
    assert 'json' in loaded
    assert not {'jax', 'numpy', 'site', 'tensorflow'} & set(loaded)
