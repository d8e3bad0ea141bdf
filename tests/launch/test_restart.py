"""launch/restart.sh: what it starts again, when it gives up, and what it does with signals."""

import signal

import pytest

pytestmark = pytest.mark.multiprocess

RESTART = 'launch/restart.sh'
TRAIN = ('python', '-m', 'maxlm.train', '--config=configs/tiny.py')


def restart(programs, workdir, lives, *options, **environment):
    programs.plan(lives=lives)
    command = (RESTART, '--backoff', '0', *options, '--', *TRAIN, f'--workdir={workdir}')
    done = programs.run(*command, **environment)
    return done, len(programs.lines('python'))


def ends(*codes):
    return [{'code': code} for code in codes]


@pytest.mark.parametrize(
    ('codes', 'code', 'starts'),
    [
        ([0], 0, 1),
        # Bad input at once, and after other ends.
        ([2], 2, 1),
        ([1, 75, 2], 2, 3),
        # Two without progress are borne, three are not; the code is the last one's.
        ([1, 1, 0], 0, 3),
        ([1, 1, 7, 0], 7, 3),
        ([75, 75, 0], 0, 3),
        # 75 would tell the caller to start again.
        ([75, 75, 75, 0], 1, 3),
        ([75, 1, 75, 0], 1, 3),
    ],
)
def test_ends_without_progress(programs, tmp_path, codes, code, starts):
    done, started = restart(programs, tmp_path / 'run', ends(*codes))
    assert (done.returncode, started) == (code, starts), done.stderr


def test_a_new_checkpoint_forgives(programs, tmp_path):
    lives = [{'code': 75, 'step': step} for step in (10, 20, 30, 40, 50)] + ends(1, 1, 0)
    done, started = restart(programs, tmp_path / 'run', lives)
    assert (done.returncode, started) == (0, 8)
    # Control: the same ends with the same checkpoint each time; the first life's counts as progress.
    lives = [{'code': 75, 'step': 50} for _ in range(5)] + ends(0)
    done, started = restart(programs, tmp_path / 'run', lives)
    assert (done.returncode, started - 8) == (1, 3)


def test_only_complete_and_larger_steps_count(programs, tmp_path):
    # Numbers, not words: 9 comes before 10.
    lives = [{'code': 75, 'step': step} for step in (9, 10, 11)] + ends(75, 75, 0)
    done, started = restart(programs, tmp_path / 'run', lives)
    assert (done.returncode, started) == (0, 6)
    unfinished = [{'code': 75, 'step': f'{step}.orbax-checkpoint-tmp'} for step in (12, 13, 14)]
    done, started = restart(programs, tmp_path / 'run', unfinished + ends(0))
    assert (done.returncode, started - 6) == (1, 3)


def test_steps_in_a_bucket(programs, tmp_path):
    def lists(*steps):
        found = ''.join(f'gs://bucket/run/checkpoints/{step}/commit_success.txt\n' for step in steps)
        return {'match': 'storage ls', 'code': 0, 'stdout': found}

    command = (RESTART, '--max-failures', '2', '--', *TRAIN, '--workdir', 'gs://bucket/run')
    listings = [lists(), lists(10), lists(10, 20), lists(20), lists(20)]
    programs.plan(lives=ends(75, 75, 75, 75, 0), replies=listings)
    assert programs.run(*command).returncode == 1
    assert len(programs.lines('python')) == 4
    assert programs.lines('gcloud')[0] == 'gcloud storage ls gs://bucket/run/checkpoints/*/commit_success.txt'
    # Control: without a listing nothing is taken for progress.
    programs.forget()
    programs.plan(lives=ends(75, 75, 75, 75, 0), replies=[{'match': 'storage ls', 'code': 1, 'times': -1}])
    assert programs.run(*command).returncode == 1
    assert len(programs.lines('python')) == 2


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_handed_on_once_and_ends_the_loop(programs, tmp_path, number):
    # The save takes a while; the lives after it would be done at once.
    programs.plan(lives=[{'seconds': 30, 'saving': 0.5}, {}, {}])
    process = programs.start(RESTART, '--', *TRAIN, f'--workdir={tmp_path}')
    programs.wait_for(1, ready=True)
    process.send_signal(number)
    programs.wait_for(1, signal='SIGTERM')
    process.send_signal(number)
    done = programs.finish(process)
    assert done.returncode == 75
    assert len(programs.calls('python', signal='SIGTERM')) == 1
    assert programs.calls('python', signal='SIGINT') == []
    assert len(programs.lines('python')) == 1


def test_a_signal_ends_with_the_code_of_the_command(programs, tmp_path):
    programs.plan(lives=[{'seconds': 30, 'on_term': 9}])
    process = programs.start(RESTART, '--', *TRAIN, f'--workdir={tmp_path}')
    programs.wait_for(1, ready=True)
    process.terminate()
    assert programs.finish(process).returncode == 9


def test_a_signal_during_the_pause_starts_nothing(programs, tmp_path):
    programs.plan(lives=ends(1))
    process = programs.start(RESTART, '--backoff', '60', '--', *TRAIN, f'--workdir={tmp_path}')
    assert 'again in 60 s' in process.stderr.readline()
    process.terminate()
    assert programs.finish(process).returncode == 75
    assert len(programs.lines('python')) == 1


def test_dry_run(programs, tmp_path):
    done = programs.run(RESTART, '--dry-run', '--', 'python', 'it\'s "it"', '--workdir=x')
    assert done.returncode == 0
    assert done.stdout == """would run: python 'it'\\''s "it"' --workdir=x\n"""
    assert programs.calls() == []


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--max-failures', '0', '--', 'true'], '--max-failures=0'),
        (['--max-failures', 'few', '--', 'true'], '--max-failures=few'),
        (['--max-failures'], '--max-failures needs a value'),
        (['--max-failure', '3', '--', 'true'], 'unknown option --max-failure'),
        (['--backoff=1'], 'no command'),
    ],
)
def test_bad_options(programs, options, words):
    done = programs.run(RESTART, *options)
    assert done.returncode == 2
    assert done.stderr.startswith('error: ')
    assert done.stderr.count('\n') == 1
    assert words in done.stderr
