"""Tests that hostile programs are contained: with all mechanisms, without root, and with Landlock and seccomp alone.

Results depend on the kernel that runs the tests. `Sandbox.missing` reports mechanisms that it lacks.
"""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

import maxlm
from maxlm.sandbox.pool import SandboxJob, SandboxPool
from tests.sandbox.hostile import AMPLE, ANYWHERE, ATTEMPT, PROGRAMS

pytestmark = pytest.mark.multiprocess

WORKERS = 4
NAMESPACES = ('mount namespace', 'network namespace', 'process namespace', 'ipc namespace', 'user namespace')
WAYS = {'everything': (), 'no root': ('root',), 'no namespaces': NAMESPACES}
NAMES = [program.name for program in PROGRAMS]
# Programs that do no harm if they are not contained. They serve as controls.
HARMLESS = ('reads the canary of the parent', 'lists the folder of the parent', 'connects by TCP', 'sends by UDP')
HARMLESS += ('connects to a UNIX socket', 'connects to an abstract socket', 'lists the processes', 'starts a shell')


def programs_of(way):
    """Returns the names of the programs that run in a kind of sandbox."""
    return [name for name in NAMES if way == 'everything' or name not in ANYWHERE]


@pytest.fixture(scope='module')
def machine(tmp_path_factory):
    """Returns resources of the parent process, by the names that programs use for them."""
    folder = tmp_path_factory.mktemp('parent')
    folder.chmod(0o777)
    canary = folder / 'canary'
    canary.write_text('a canary')
    canary.chmod(0o666)
    bystander = subprocess.Popen([sys.executable, '-S', '-c', 'import time; time.sleep(600)'], start_new_session=True)
    abstract = f'maxlm-canary-{os.getpid()}'
    sockets = [socket.create_server(('127.0.0.1', 0)), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)]
    sockets[1].bind(('127.0.0.1', 0))
    for address in (str(folder / 'u'), f'\0{abstract}'):
        sockets.append(socket.socket(socket.AF_UNIX))
        sockets[-1].bind(address)
        sockets[-1].listen()
    for opened in sockets:
        opened.setblocking(False)
    os.environ['MAXLM_SECRET'] = 'the secret canary'
    yield {
        **{
            'FOLDER': folder,
            'CANARY': canary,
            'PARENT': os.getpid(),
            'GROUP': os.getpgrp(),
            'sockets': sockets,
            'facts': facts(canary),
        },
        **{'BYSTANDER': bystander.pid, 'TCP': sockets[0].getsockname()[1], 'UDP': sockets[1].getsockname()[1]},
        **{'UNIX': folder / 'u', 'ABSTRACT': abstract, 'PACKAGE': os.path.dirname(maxlm.__file__)},
    }
    del os.environ['MAXLM_SECRET']
    bystander.kill()
    bystander.wait()
    for opened in sockets:
        opened.close()


def filled(text, machine):
    for name, value in machine.items():
        text = text.replace(f'@{name}@', str(value))
    return text


def is_contained(program, sandbox):
    """Returns True if the sandbox promises to contain the program."""
    if program.needs == 'own user':
        return bool({'own user', 'user namespace'} & set(sandbox.mechanisms))
    return not program.needs or program.needs in sandbox.enforced


def facts(path):
    """Returns the metadata of a file that a program must not change. Reading changes only the access time."""
    stat = path.stat()
    return stat.st_mode, stat.st_uid, stat.st_gid, stat.st_nlink, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def descendants(process, others):
    """Returns the descendants of a process, except `others`."""
    return [child.pid for child in process.children(recursive=True) if child.pid not in others]


def settled(process, others):
    """Returns the descendants after the last process monitors have had time to exit; they respond before they exit."""
    for _ in range(200):
        if len(descendants(process, others)) <= 2 * WORKERS:
            break
        time.sleep(0.02)
    return descendants(process, others)


@pytest.fixture(scope='module', params=WAYS)
def outcome(request, machine):
    """Runs all programs concurrently, and returns their results and the state of the machine before and after."""
    caught = []
    before = signal.signal(signal.SIGTERM, lambda *_: caught.append('SIGTERM'))
    process = psutil.Process()
    files, threads = process.num_fds(), threading.active_count()
    # Descendants that the tests started: the bystander, and remainders of earlier tests.
    others = descendants(process, [])
    with SandboxPool(WORKERS, without=WAYS[request.param], required=()) as pool:
        chosen = [program for program in PROGRAMS if program.name in programs_of(request.param)]
        chosen = [program for program in chosen if is_contained(program, pool.sandbox)]
        programs = [SandboxJob(filled(program.text, machine), limits=program.limits) for program in chosen]
        results = dict(zip([program.name for program in chosen], pool.run_many(programs), strict=True))
        again = pool.run(SandboxJob('print(6 * 7)', limits=AMPLE))
        sandbox = pool.sandbox
        left = settled(process, others)
        held = sum(psutil.Process(number).memory_info().rss for number in left)
    after = {
        'caught': caught,
        'own process': (process.num_fds(), threading.active_count()),
        'children': descendants(process, others),
        'workers': len(left),
        'memory of a worker': held / WORKERS,
        'again': (again.status, again.stdout),
    }
    signal.signal(signal.SIGTERM, before)
    return {'results': results, 'after': after, 'before': (files, threads), 'sandbox': sandbox}


def test_names_of_programs_are_unique():
    assert len(set(NAMES)) == len(NAMES) >= 130
    assert set(NAMES) > ANYWHERE


@pytest.mark.parametrize('name', NAMES)
def test_a_hostile_program_is_contained(name, outcome):
    program = PROGRAMS[NAMES.index(name)]
    if name not in outcome['results']:
        # The program behaves the same everywhere, or the sandbox reports the missing mechanism.
        if name in ANYWHERE:
            return
        missing = outcome['sandbox'].missing
        assert program.needs in missing or program.needs == 'own user' not in outcome['sandbox'].mechanisms
        return
    result = outcome['results'][name]
    assert result.status in program.statuses, result
    assert 'ESCAPED' not in result.stdout, result.stdout
    assert 'secret canary' not in result.stdout + result.stderr
    assert len(result.stdout) <= program.limits.output_bytes
    assert len(result.stderr) < 10_000
    if ATTEMPT in program.text:
        assert 'contained' in result.stdout + result.stderr, result


def test_the_parent_is_unharmed(outcome, machine):
    after = outcome['after']
    assert after['caught'] == []
    assert after['own process'] == outcome['before']
    assert after['children'] == []
    # Each worker has two processes, and no program left a process behind.
    assert after['workers'] == 2 * WORKERS
    assert after['memory of a worker'] < 200 << 20
    assert after['again'] == ('passed', '42\n')
    assert machine['CANARY'].read_text() == 'a canary'
    assert facts(machine['CANARY']) == machine['facts']
    assert sorted(path.name for path in machine['FOLDER'].iterdir()) == ['canary', 'u']
    assert psutil.Process(machine['BYSTANDER']).status() == psutil.STATUS_SLEEPING
    for opened in machine['sockets']:
        with pytest.raises(BlockingIOError):
            opened.recv(9) if opened.type == socket.SOCK_DGRAM else opened.accept()


@pytest.mark.parametrize('name', HARMLESS)
def test_programs_escape_without_the_sandbox(name, machine):
    text = filled(PROGRAMS[NAMES.index(name)].text, machine)
    result = subprocess.run([sys.executable, '-S', '-c', text], capture_output=True, text=True, timeout=60)
    assert 'ESCAPED' in result.stdout
    for opened in machine['sockets']:
        try:
            opened.recv(9) if opened.type == socket.SOCK_DGRAM else opened.accept()[0].close()
        except BlockingIOError:
            continue
