"""Tests launch/gpu_node.sh: its processes, their environment, and their common exit."""

import os
import pty
import signal
import subprocess

import pytest

from tests.conftest import ROOT
from tests.messages import assert_error_line

pytestmark = pytest.mark.multiprocess

NODE = 'launch/gpu_node.sh'
JOIN = ('MAXLM_COORDINATOR', 'MAXLM_NUM_PROCESSES', 'MAXLM_PROCESS_ID', 'MAXLM_LOCAL_DEVICES')


def arguments(tmp_path, *more):
    return ('--', '--config=configs/tiny.py', f'--workdir={tmp_path / "run"}', *more)


def joined(call):
    return tuple(call['environment'].get(name) for name in JOIN)


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize(
    ('options', 'expected'),
    [
        # A single process joins no group.
        ([], [(None,) * 4]),
        (['--gpus', '3'], [(None,) * 4]),
        (['--per-gpu', '--gpus', '1'], [(None,) * 4]),
        (['--nodes', '4', '--node-rank', '2', '--coordinator', 'node0:1234'], [('node0:1234', '4', '2', None)]),
        (['--per-gpu', '--gpus', '2'], [('127.0.0.1:8476', '2', '0', '0'), ('127.0.0.1:8476', '2', '1', '1')]),
        (
            ['--nodes=2', '--node-rank=1', '--coordinator=node0:1234', '--per-gpu', '--gpus=2'],
            [('node0:1234', '4', '2', '0'), ('node0:1234', '4', '3', '1')],
        ),
        (
            ['--platform', 'cpu', '--devices', '4', '--per-gpu', '--gpus', '2'],
            [('127.0.0.1:8476', '2', '0', None), ('127.0.0.1:8476', '2', '1', None)],
        ),
    ],
)
def test_processes_join(programs, tmp_path, options, expected):
    programs.plan()
    done = programs.run(NODE, *options, *arguments(tmp_path, '--config.train.num_steps=2'))
    assert done.returncode == 0, done.stderr
    calls = [call for call in programs.calls('python') if 'ready' not in call]
    assert sorted(map(joined, calls), key=str) == expected
    for call in calls:
        assert call['arguments'] == [
            '-m',
            'maxlm.train',
            '--config=configs/tiny.py',
            f'--workdir={tmp_path / "run"}',
            '--config.train.num_steps=2',
        ]


def test_elastic_nodes(programs, tmp_path):
    config = ('--config.mesh.fsdp=1', '--config.mesh.data=-1', '--config.train.global_batch_size=24')
    options = ('--nodes=3', '--min-nodes=2', '--address=127.0.0.1', '--host-timeout=2', '--per-gpu', '--gpus=2')
    programs.plan(attempts={'': [{'seconds': 60}] * 6})
    hosts = [programs.start(NODE, *options, *arguments(tmp_path, *config)) for _ in range(3)]
    calls = programs.wait_for(6, ready=True)
    assert len({joined(call)[0] for call in calls}) == 1
    # The ranks and the coordinator come from maxlm.cli.runs.supervise.
    assert sorted(joined(call)[1:] for call in calls) == [('6', str(rank), str(rank % 2)) for rank in range(6)]
    for host in hosts:
        host.terminate()
    for host in hosts:
        done = programs.finish(host)
        assert done.returncode == 75, done.stderr
        assert 'of 3 hosts' in done.stderr
    dry = programs.run(NODE, '--dry-run', *options, *arguments(tmp_path, *config))
    assert (
        'maxlm.supervise --address 127.0.0.1 --host-timeout 2 --hosts 3 --min-hosts 2 --devices-per-host 2'
        in dry.stdout
    )


def test_gpus_are_counted(programs, tmp_path):
    listed = 'GPU 0: NVIDIA H100 (UUID: GPU-1)\n  MIG 1g.10gb Device 0: (UUID: MIG-1)\nGPU 1: NVIDIA H100 (UUID: G-2)\n'
    programs.plan(replies=[{'match': 'nvidia-smi -L', 'stdout': listed}])
    assert programs.run(NODE, '--once', '--per-gpu', *arguments(tmp_path)).returncode == 0
    assert len(programs.lines('python')) == 2
    programs.forget()
    assert programs.run(NODE, '--once', '--per-gpu', *arguments(tmp_path), CUDA_VISIBLE_DEVICES='1,5,6').returncode == 0
    assert {joined(call)[3] for call in programs.calls('python')} == {'0', '1', '2'}


def test_environment_variables_replace_options(programs, tmp_path):
    variables = {'MAXLM_COORDINATOR': 'job-0.job:8476', 'MAXLM_NUM_PROCESSES': '2', 'MAXLM_PROCESS_ID': '1'}
    programs.plan(attempts={'1': [{}]})
    assert programs.run(NODE, *arguments(tmp_path), **variables).returncode == 0
    assert joined(programs.calls('python')[0]) == ('job-0.job:8476', '2', '1', None)
    # The only pod of a job joins no group.
    programs.forget()
    variables |= {'MAXLM_NUM_PROCESSES': '1', 'MAXLM_PROCESS_ID': '0'}
    assert programs.run(NODE, *arguments(tmp_path), **variables).returncode == 0
    assert joined(programs.calls('python')[0]) == (None,) * 4


def settings(programs, tmp_path, *options, **environment):
    programs.forget()
    programs.plan()
    assert programs.run(NODE, '--once', *options, *arguments(tmp_path), **environment).returncode == 0
    seen = programs.calls('python')[0]['environment']
    return {name: value for name, value in seen.items() if not name.startswith('MAXLM_')}


def test_settings(programs, tmp_path):
    alone = settings(programs, tmp_path)
    assert alone == {
        'XLA_PYTHON_CLIENT_MEM_FRACTION': '.92',
        'CUDA_DEVICE_MAX_CONNECTIONS': '1',
        'XLA_FLAGS': '--xla_gpu_enable_latency_hiding_scheduler=true',
        'NCCL_DEBUG': 'WARN',
    }
    several = settings(programs, tmp_path, '--nodes=2', '--coordinator=a:1')
    assert several == {**alone, 'NCCL_IB_TIMEOUT': '22'}
    cpu = settings(programs, tmp_path, '--platform', 'cpu', '--devices', '4', XLA_FLAGS='--xla_dump_to=x')
    assert cpu == {
        'JAX_PLATFORMS': 'cpu',
        'JAX_CPU_COLLECTIVES_IMPLEMENTATION': 'gloo',
        'XLA_FLAGS': '--xla_dump_to=x --xla_force_host_platform_device_count=4',
    }
    assert settings(programs, tmp_path, '--gpus', '2')['CUDA_VISIBLE_DEVICES'] == '0,1'
    assert settings(programs, tmp_path, '--gpus', '2', CUDA_VISIBLE_DEVICES='3,5,7')['CUDA_VISIBLE_DEVICES'] == '3,5'


def test_user_settings_are_kept(programs, tmp_path):
    mine = {
        'XLA_PYTHON_CLIENT_MEM_FRACTION': '.5',
        'CUDA_DEVICE_MAX_CONNECTIONS': '8',
        'XLA_FLAGS': '--xla_gpu_enable_latency_hiding_scheduler=false',
        'NCCL_DEBUG': '',
        'NCCL_IB_TIMEOUT': '18',
    }
    assert settings(programs, tmp_path, '--nodes=2', '--coordinator=a:1', **mine) == mine


def test_logs(programs, tmp_path):
    options = ('--nodes=2', '--node-rank=1', '--coordinator=a:1', '--per-gpu', '--gpus=2', '--once')
    programs.plan()
    done = programs.run(NODE, *options, *arguments(tmp_path))
    assert done.stdout.count('training') == 1
    logs = tmp_path / 'run/logs'
    assert [path.name for path in logs.iterdir()] == ['process-3.log']
    # A second start appends to the log.
    programs.run(NODE, *options, *arguments(tmp_path))
    assert (logs / 'process-3.log').read_text().count('training') == 2
    # Logs are not written to a bucket.
    done = programs.run(ROOT / NODE, *options, '--', '--workdir=gs://bucket/run', cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / 'logs/process-3.log').exists()


@pytest.mark.parametrize(
    ('dying', 'others', 'code'),
    [
        # The exit code is that of the failed process, independent of the codes of other processes on SIGTERM.
        ({'code': 1}, {'on_term': 75}, 1),
        ({'code': 75}, {'on_term': 75}, 75),
        ({'code': 2}, {'on_term': 75}, 2),
        # The process is killed, as by the kernel if memory is exhausted. Code 75 of another process requests a restart.
        ({'signal': signal.SIGKILL}, {'on_term': 75}, 75),
        ({'signal': signal.SIGKILL}, {'on_term': 0}, 137),
        # Only a later process detects bad input.
        ({'code': 75}, {'on_term': 2}, 2),
        # A device of the node computes wrong results, which another process may notice first.
        ({'code': 74}, {'on_term': 75}, 74),
        ({'code': 75}, {'on_term': 74}, 74),
        ({'code': 2}, {'on_term': 74}, 2),
    ],
)
def test_other_processes_end_after_a_process_dies(programs, tmp_path, dying, others, code):
    # The process exits when the other processes are ready for signals.
    attempts = {'0': [{'seconds': 60, **others}], '1': [{'after': 3, **dying}], '2': [{'seconds': 60, **others}]}
    programs.plan(attempts=attempts)
    done = programs.run(NODE, '--once', '--per-gpu', '--gpus=3', *arguments(tmp_path))
    assert done.returncode == code, done.stderr
    assert 'process 1 ended with exit code' in done.stderr
    terminated = programs.calls('python', signal='SIGTERM')
    assert {call['environment']['MAXLM_PROCESS_ID'] for call in terminated} == {'0', '2'}
    assert not any(alive(call['pid']) for call in programs.calls('python'))


def test_process_that_ignores_sigterm_is_killed(programs, tmp_path):
    programs.plan(attempts={'0': [{'seconds': 60, 'on_term': 'ignore'}], '1': [{'after': 2, 'code': 5}]})
    done = programs.run(NODE, '--once', '--grace', '1', '--per-gpu', '--gpus=2', *arguments(tmp_path))
    assert done.returncode == 5
    assert 'still running 1 s after SIGTERM: killed' in done.stderr
    assert len(programs.calls('python', signal='SIGTERM')) == 1
    assert not any(alive(call['pid']) for call in programs.calls('python'))


def test_finished_process_ends_no_other_process(programs, tmp_path):
    programs.plan(attempts={'0': [{}], '1': [{'seconds': 0.5}]})
    done = programs.run(NODE, '--once', '--grace', '0', '--per-gpu', '--gpus=2', *arguments(tmp_path))
    assert done.returncode == 0
    assert programs.calls('python', signal='SIGTERM') == []


@pytest.mark.parametrize(('number', 'processes'), [(signal.SIGTERM, 1), (signal.SIGTERM, 2), (signal.SIGINT, 2)])
def test_a_signal_reaches_each_process_once(programs, tmp_path, number, processes):
    # The save takes longer than the grace period, which applies only after a process has died.
    programs.plan(attempts={name: [{'seconds': 60, 'saving': 0.5}] for name in ('', '0', '1')})
    options = ('--grace', '0', '--per-gpu', f'--gpus={processes}')
    process = programs.start(NODE, *options, *arguments(tmp_path))
    programs.wait_for(processes, ready=True)
    process.send_signal(number)
    done = programs.finish(process)
    assert done.returncode == 75, done.stderr
    assert 'killed' not in done.stderr
    assert len(programs.calls('python', signal='SIGTERM')) == processes
    # The supervisor started nothing afterwards.
    assert len(programs.lines('python')) == processes


@pytest.mark.parametrize(
    ('options', 'processes'),
    [((), 1), ((), 2), (('--once',), 2), (('--monitor',), 1), (('--monitor', '--once'), 2)],
)
def test_a_closed_terminal_saves(programs, tmp_path, options, processes):
    programs.plan(attempts={name: [{'seconds': 60, 'saving': 0.5}] for name in ('', '0', '1')})
    master, slave = pty.openpty()
    command = ['bash', NODE, *options, '--per-gpu', f'--gpus={processes}', *arguments(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=programs.environment, stdin=slave, stdout=slave, stderr=slave)
    programs.wait_for(processes, ready=True)
    os.close(slave)
    os.close(master)
    process.send_signal(signal.SIGHUP)
    assert process.wait(120) == 75
    assert len(programs.calls('python', signal='SIGTERM')) == processes
    assert len(programs.calls('python', ready=True)) == processes
    assert not any(alive(call['pid']) for call in programs.calls('python'))


def test_messages_to_a_closed_terminal_do_not_change_the_exit_code(programs, tmp_path):
    programs.plan(attempts={'0': [{'seconds': 60}], '1': [{'after': 2, 'seconds': 0.5, 'code': 5}]})
    master, slave = pty.openpty()
    command = ['bash', NODE, '--once', '--per-gpu', '--gpus=2', *arguments(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, env=programs.environment, stdin=slave, stdout=slave, stderr=slave)
    programs.wait_for(2, ready=True)
    os.close(slave)
    os.close(master)
    assert process.wait(120) == 5
    assert not any(alive(call['pid']) for call in programs.calls('python'))


def test_detached_runs(programs, tmp_path):
    programs.plan(attempts=[{'code': 2}])
    done = programs.run(NODE, '--detach', '--max-failures=2', *arguments(tmp_path))
    # It waits for the start of the run, which fails.
    assert (done.returncode, done.stdout) == (2, '')
    assert 'supervise: bad input (exit code 2): not restarted' in done.stderr
    assert len(programs.lines('python')) == 1
    assert not (tmp_path / 'run').exists()


def test_all_processes_of_a_node_restart(programs, tmp_path):
    first = {'after': 2, 'code': 75}
    programs.plan(attempts={'0': [{'seconds': 60}, {}], '1': [first, {}]})
    done = programs.run(NODE, '--per-gpu', '--gpus=2', *arguments(tmp_path))
    assert done.returncode == 0, done.stderr
    assert len(programs.lines('python')) == 4
    assert 'supervise: preempted' in done.stderr
    # Control: without restarts, the exit code is returned.
    programs.forget()
    programs.plan(attempts={'0': [{'seconds': 60}, {}], '1': [first, {}]})
    assert programs.run(NODE, '--once', '--per-gpu', '--gpus=2', *arguments(tmp_path)).returncode == 75
    assert len(programs.lines('python')) == 2


def test_dry_run(programs, tmp_path):
    options = ('--dry-run', '--nodes=2', '--node-rank=1', '--coordinator=a:1', '--per-gpu', '--gpus=2')
    done = programs.run(NODE, *options, *arguments(tmp_path))
    assert done.returncode == 0
    assert done.stdout.count('would run: env MAXLM_COORDINATOR=a:1 MAXLM_NUM_PROCESSES=4') == 2
    assert 'would set: NCCL_IB_TIMEOUT=22' in done.stdout
    assert programs.calls() == []
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--nodes=2'], '--coordinator is missing'),
        (['--nodes=2', '--coordinator=host'], '--coordinator=host: give HOST:PORT'),
        (['--nodes=2', '--coordinator=host:port'], '--coordinator=host:port'),
        (['--nodes=2', '--node-rank=2', '--coordinator=a:1'], 'give 0 to 1'),
        (['--nodes=0'], '--nodes=0'),
        (['--nodes=2', '--min-nodes=two', '--gpus=1'], '--min-nodes=two'),
        (['--nodes=2', '--min-nodes=3', '--gpus=1'], '--min-hosts=3: must be at most --hosts=2'),
        (['--nodes=2', '--min-nodes=1'], 'no GPU found'),
        (['--nodes=2', '--min-nodes=1', '--once'], '--coordinator is missing'),
        (['--nodes=two'], '--nodes=two'),
        (['--per-gpu'], 'no GPU found'),
        (['--per-gpu', '--gpus=0'], '--gpus=0'),
        (['--platform=tpu'], '--platform=tpu'),
        (['--platform=cpu', '--per-gpu'], 'needs --gpus'),
        (['--devices=4'], '--devices is for --platform cpu'),
        (['--config=configs/tiny.py'], 'come after --'),
        (['--detach', '--once'], '--detach does not work with --once'),
        (['--detach', '--monitor'], '--detach does not work with --monitor'),
    ],
)
def test_bad_options(programs, tmp_path, options, words):
    programs.plan(replies=[{'match': 'nvidia-smi', 'code': 9}])
    done = programs.run(NODE, *options, *arguments(tmp_path))
    assert done.returncode == 2
    assert_error_line(done.stderr, words)
    assert programs.calls('python') == []


def test_workdir_is_required(programs):
    done = programs.run(NODE, '--', '--config=configs/tiny.py')
    assert done.returncode == 2
    assert '--workdir is missing' in done.stderr


@pytest.mark.parametrize('code', [0, 75])
def test_the_monitor_runs_on_the_terminal_and_the_run_writes_a_log(programs, tmp_path, code):
    programs.plan(attempts=[{'seconds': 0.2, 'code': code}])
    master, slave = pty.openpty()
    command = ['bash', NODE, '--monitor', '--once', *arguments(tmp_path)]
    done = subprocess.run(
        command, cwd=ROOT, env=programs.environment, stdout=slave, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(slave)
    os.close(master)
    assert done.returncode == code, done.stderr
    assert f'python -m maxlm.monitor {tmp_path}/run' in programs.lines('python')
    log = tmp_path / 'run/logs/node.log'
    assert 'training --config=configs/tiny.py' in log.read_text()
    assert str(log) in done.stderr
    # After a failure, the terminal shows the end of the log.
    assert ('training --config' in done.stderr) == (code != 0)


def test_the_monitor_needs_a_terminal(programs, tmp_path):
    done = programs.run(NODE, '--monitor', *arguments(tmp_path))
    assert (done.returncode, programs.lines('python')) == (2, [])
    assert 'needs a terminal' in done.stderr
    assert not (tmp_path / 'run').exists()
