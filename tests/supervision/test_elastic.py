"""Elastic runs of several hosts on this machine: they lose a host, continue without it, and grow when it returns."""

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time

import pytest

from maxlm.errors import EXIT_BAD_INPUT, EXIT_DEVICE, EXIT_DONE, EXIT_PREEMPTED
from maxlm.supervision.elastic_hosts import ElasticHosts, quarantined_hosts
from maxlm.supervision.membership import QUARANTINED
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import arguments, curve, run
from tests.conftest import ROOT
from tests.faults import measured
from tests.forking import forking

pytestmark = pytest.mark.multiprocess

GENERATION = r'generation (\d+): rank (\d+) of (\d+) hosts'
# Seconds without a heartbeat after which a host is lost. Long enough for a machine with other load.
TIMEOUT = 4
# Seconds for a training process to start on such a machine.
PATIENCE = 240
# Like `maxlm train`, it exits with 75 after SIGTERM. It also exits if the file `end` exists, and rank 0 then exits with
# the code in it. Rank 0 also exits with the code in the file `once`, and removes the file.
COMMAND = """
import os, pathlib, signal, sys, time
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(75))
print('ready', file=sys.stderr, flush=True)
end, once, is_first = pathlib.Path('end'), pathlib.Path('once'), os.environ['MAXLM_PROCESS_ID'] == '0'
while not end.exists():
    time.sleep(0.02)
    if is_first and once.exists():
        code = int(once.read_text())
        once.unlink()
        sys.exit(code)
sys.exit(int(end.read_text()) if is_first else 75)
"""


class Host:
    """Supervisor of a host."""

    def __init__(self, process, read, started=''):
        """
        Args:
            process: process of the supervisor.
            read: returns its output.
            started: output of a command that can receive signals.
        """
        self.process, self.read = process, read
        self._started = re.compile(f'{GENERATION}.*{started}')

    @property
    def generation(self):
        """Returns the number, the rank and the size of the newest generation of this host."""
        found = self._started.findall(self.read())
        return tuple(map(int, found[-1])) if found else (0, 0, 0)

    def kill(self):
        """Kills the supervisor and its command."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


def wait(hosts, until, seconds=90):
    """Waits until a condition is true, and returns the seconds."""
    began = time.monotonic()
    while not until():
        assert time.monotonic() < began + seconds, '\n'.join(host.read() for host in hosts)
        time.sleep(0.02)
    return time.monotonic() - began


def wait_for_size(hosts, size, since=0, seconds=90):
    """Waits until all hosts are in the same generation of this size, with a number above `since`; returns the seconds.

    Checks the ranks.
    """

    def is_complete():
        numbers, _, sizes = zip(*(host.generation for host in hosts), strict=True)
        return set(sizes) == {size} and len(set(numbers)) == 1 and numbers[0] > since

    taken = wait(hosts, is_complete, seconds)
    assert sorted(host.generation[1] for host in hosts) == list(range(size))
    return taken


def rank_0(hosts):
    return next(host for host in hosts if host.generation[1] == 0)


def options(count, min_hosts, timeout=TIMEOUT):
    counts = [f'--hosts={count}', f'--min-hosts={min_hosts}', '--devices-per-host=1']
    return [*counts, f'--host-timeout={timeout}', '--address=127.0.0.1', '--backoff=0', '--']


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts a host, whose command only waits."""
    with contextlib.ExitStack() as stack:

        def start(number, count=3, min_hosts=1, mesh='data'):
            log = tmp_path / f'host-{number}.log'
            config = [f'--config={ROOT}/configs/tiny.py', '--config.mesh.fsdp=1', f'--config.mesh.{mesh}=-1']
            config += ['--config.train.global_batch_size=6', f'--workdir={tmp_path}/run']
            command = [sys.executable, '-c', COMMAND, *config]
            words = [sys.executable, '-m', 'maxlm.supervise', *options(count, min_hosts, 2), *command]
            environment = {**os.environ, 'PYTHONPATH': str(ROOT)}
            file = stack.enter_context(log.open('w'))
            process = subprocess.Popen(words, cwd=tmp_path, env=environment, stderr=file, process_group=0)
            host = Host(process, log.read_text, '\nready')
            stack.callback(lambda: host.kill() if process.poll() is None else None)
            return host

        yield start


def test_hosts_leave_and_join(start, tmp_path):
    hosts = [start(number) for number in range(3)]
    wait_for_size(hosts, 3)
    # Rank 0 is lost.
    lost = rank_0(hosts)
    lost.kill()
    hosts.remove(lost)
    wait_for_size(hosts, 2)
    hosts.append(start(3))
    wait_for_size(hosts, 3)
    # A host that gets SIGTERM leaves with the exit code of its command.
    leaving = rank_0(hosts)
    leaving.process.terminate()
    assert leaving.process.wait(20) == EXIT_PREEMPTED
    hosts.remove(leaving)
    wait_for_size(hosts, 2)
    hosts.append(start(4))
    wait_for_size(hosts, 3)
    # The other commands fail when rank 0 has completed the run.
    (tmp_path / 'end').write_text('0')
    assert [host.process.wait(20) for host in hosts] == [EXIT_DONE] * 3


@pytest.mark.nightly
def test_hosts_are_killed_in_odd_order(start):
    hosts = [start(number) for number in range(3)]
    wait_for_size(hosts, 3)
    # Rank 0, and then another host before the loss of rank 0 is detected.
    lost = rank_0(hosts)
    lost.kill()
    hosts.remove(lost)
    hosts.pop().kill()
    wait_for_size(hosts, 1)
    # The last host is killed while two new hosts join it.
    hosts += [start(3), start(4)]
    wait(hosts, lambda: 'waiting for hosts' in hosts[1].read() or hosts[1].generation[0])
    hosts.pop(0).kill()
    wait_for_size(hosts, 2, since=2)
    # All hosts at once, and new ones in the same workdir.
    for host in hosts:
        host.kill()
    hosts = [start(number) for number in (5, 6)]
    wait_for_size(hosts, 2, since=3)


def test_hosts_wait_below_the_minimum(start):
    hosts = [start(number, min_hosts=3) for number in range(3)]
    wait_for_size(hosts, 3)
    lost, *others = hosts
    lost.kill()
    wait(others, lambda: all('allowed numbers of hosts: 3' in host.read() for host in others))
    time.sleep(2)
    assert [host.generation[0] for host in others] == [1, 1]
    hosts = [*others, start(3, min_hosts=3)]
    wait_for_size(hosts, 3)


def test_a_host_that_fails_repeatedly_is_left_out(start, tmp_path):
    hosts = [start(number) for number in range(2)]
    third = start(2)
    wait_for_size([*hosts, third], 3)
    code = 7
    (tmp_path / 'end').write_text(str(code))
    # Rank 0 fails, and the other commands end with 75.
    failed = rank_0([*hosts, third])
    assert failed.process.wait(30) == code
    remaining = [host for host in (*hosts, third) if host is not failed]
    assert [host.process.poll() for host in remaining] == [None, None]
    (tmp_path / 'end').unlink()
    wait_for_size(remaining, 2)


def test_a_host_with_a_faulty_device_is_quarantined(start, tmp_path):
    hosts = [start(number) for number in range(3)]
    wait_for_size(hosts, 3)
    faulty = rank_0(hosts)
    (tmp_path / 'once').write_text(str(EXIT_DEVICE))
    # Its supervisor does not restart it, and the others continue without it.
    assert faulty.process.wait(30) == EXIT_DEVICE
    hosts.remove(faulty)
    name = socket.gethostname()
    (state,) = [host for host in ElasticHosts(tmp_path / 'run').hosts() if host.state == QUARANTINED]
    assert state.name == name
    wait_for_size(hosts, 2, since=1)
    for host in hosts:
        assert f'{name} is quarantined\n' in host.read()
    assert quarantined_hosts(tmp_path / 'run') == [name]
    # It cannot come back by itself.
    again = start(3)
    assert again.process.wait(20) == EXIT_DEVICE
    assert 'this host is quarantined' in again.read()
    assert [host.generation[2] for host in hosts] == [2, 2]
    # Negative control: it rejoins after somebody has deleted the file.
    (tmp_path / 'run/elastic' / f'quarantined-{name}').unlink()
    hosts.append(start(4))
    wait_for_size(hosts, 3)


def test_bad_input_after_a_loss_is_tried_again(start, tmp_path):
    hosts = [start(number, count=2) for number in range(2)]
    wait_for_size(hosts, 2)
    lost = rank_0(hosts)
    lost.kill()
    hosts.remove(lost)
    # A process of the lost host may still hold the lock of the workdir.
    (tmp_path / 'once').write_text(str(EXIT_BAD_INPUT))
    wait_for_size(hosts, 1, since=2)
    # Negative control: no host was lost since.
    (tmp_path / 'once').write_text(str(EXIT_BAD_INPUT))
    assert hosts[0].process.wait(20) == EXIT_BAD_INPUT


def test_configs_that_cannot_shrink_are_refused_at_the_start(start):
    host = start(0, mesh='tensor')
    assert host.process.wait(20) == EXIT_BAD_INPUT
    assert host.read().count('\n') == 1
    assert 'mesh tensor=-1 cannot use fewer hosts' in host.read()


# With 1 sequence per device, a smaller number of hosts accumulates more micro-batches.
SETTINGS = {
    'optimizer__schedule': 'constant',
    'model__dropout': 0.0,
    'mesh__fsdp': 1,
    'mesh__data': -1,
    'train__global_batch_size': 24,
    'train__per_device_batch_size': 1,
    'checkpoint__save_interval_steps': 4,
    'eval__interval': 0,
    'train__hang_timeout_seconds': 60,
}


@pytest.mark.timeout(900)
@pytest.mark.parametrize('count', [2, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_run_continues_with_fewer_hosts(dataset, tmp_path, record_property, count):
    workdir = tmp_path / 'run'
    words = [*options(count, 1), *arguments(dataset, workdir, train__num_steps=1_000_000, **SETTINGS)]

    def last_step():
        return max((line['step'] for line in read_metrics(workdir)), default=0) if workdir.exists() else 0

    def wait_for_steps(number):
        last = last_step()
        return wait(hosts, lambda: last_step() >= last + number, PATIENCE)

    with forking('tests.elastic_host', devices=1) as parent:

        def start(number):
            process = parent.start(words, tmp_path / f'host-{number}.log')
            return Host(process, lambda: process.stderr)

        hosts = [start(number) for number in range(count)]
        wait_for_size(hosts, count, seconds=PATIENCE)
        wait(hosts, lambda: last_step() >= 6, PATIENCE)
        # Rank 0 has the coordinator and the lock of the workdir.
        lost = rank_0(hosts)
        lost.kill()
        hosts.remove(lost)
        shrinking = wait_for_size(hosts, count - 1, seconds=PATIENCE) + wait_for_steps(3)
        hosts.append(start(count))
        growing = wait_for_size(hosts, count, since=2, seconds=PATIENCE) + wait_for_steps(3)
        for host in hosts:
            host.process.send_signal(signal.SIGTERM)
        assert [host.process.wait(60) for host in hosts] == [EXIT_PREEMPTED] * count

    def losses(name):
        return {step: line['train/loss'] for step, line in curve(tmp_path / name).items()}

    found = losses('run')
    last = max(found)
    # Each step is there once, and has the loss of an uninterrupted run on other devices.
    assert [line['step'] for line in read_metrics(workdir)] == list(range(1, last + 1))
    assert run(dataset, tmp_path / 'uninterrupted', **SETTINGS, train__num_steps=last) == EXIT_DONE
    expected = losses('uninterrupted')
    assert found == pytest.approx(expected, rel=1e-5)
    # Negative control: a batch that is skipped or used twice would change the loss.
    assert found != pytest.approx({step: expected[step % last + 1] for step in expected}, rel=1e-5)
    times = f'{shrinking:.0f} s after the loss of rank 0, and {growing:.0f} s after the return of a host'
    measured(record_property, 'elastic', f'{count} hosts, --host-timeout={TIMEOUT}: three more steps {times}')
