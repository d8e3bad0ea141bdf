import pytest

from maxlm.data.parts.share import ALL, Share, parse_share
from maxlm.errors import InputError
from tests.preparing import run


@pytest.mark.parametrize(('count', 'number'), [(1, 7), (3, 7), (8, 7)])
def test_shares_cover_all_tasks_once(count, number):
    shares = [parse_share(f'{index}/{count}', {}).of(range(number)) for index in range(count)]
    assert sorted(task for share in shares for task in share) == list(range(number))
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_the_share_of_an_array():
    array = {'SLURM_ARRAY_TASK_ID': '5', 'SLURM_ARRAY_TASK_MIN': '3', 'SLURM_ARRAY_TASK_MAX': '7'}
    assert parse_share('', array) == Share(2, 5)
    assert parse_share('0/2', array) == Share(0, 2)
    assert parse_share('', {'SLURM_JOB_ID': '9'}) == ALL


def _array(index, first, last, step):
    names = ('ID', 'MIN', 'MAX', 'STEP')
    values = (index, first, last, step)
    return {f'SLURM_ARRAY_TASK_{name}': value for name, value in zip(names, values, strict=True) if value is not None}


def test_the_shares_of_an_array_with_a_step():
    # sbatch --array=3-13:4 submits the indices 3, 7 and 11.
    shares = [parse_share('', _array(index, '3', '11', '4')) for index in ('3', '7', '11')]
    assert shares == [Share(0, 3), Share(1, 3), Share(2, 3)]


@pytest.mark.parametrize(
    'values',
    [
        ('5', None, None, None),
        ('5', None, '7', None),
        ('2', '3', '7', '1'),
        ('8', '3', '7', '1'),
        ('4', '3', '7', '2'),
        ('3', '3', '7', '0'),
        ('x', '3', '7', '1'),
        ('5', '-3', '7', '1'),
    ],
)
def test_contradictory_variables_of_an_array(values):
    with pytest.raises(
        InputError, match=f'^SLURM_ARRAY_TASK_ID={values[0]}, .*: not the task of an array; give --task I/N'
    ):
        parse_share('', _array(*values))


@pytest.mark.parametrize('text', ['2/2', '-1/2', '1', '0/0', 'a/b', '1/2/3', '٣/٤'])
def test_bad_shares(text):
    with pytest.raises(InputError, match=f'--task={text}: must be I/N with I from 0 to N-1, for example 0/8'):
        parse_share(text, {})


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['--task', '0/2'], '--task=0/2 requires --stage=scan or --stage=shards'),
        (['--task', '0/2', '--stage', 'plan'], '--task=0/2 requires --stage=scan or --stage=shards'),
        (['--task', '2/2', '--stage', 'scan'], '--task=2/2: must be I/N'),
        (['--stage', 'scan', '--skip-failed'], '--skip-failed does not work with --stage=scan'),
        (['--stage', 'scan', '--stream'], '--stream does not work with --stage=scan'),
        (['--executor', 'ray', '--stream'], '--stream does not work with --executor=ray and a bucket'),
    ],
)
def test_options_that_do_not_work_together(tmp_path, capsys, words, message):
    (tmp_path / 'x.txt').write_text('text')
    assert run('--input', tmp_path / 'x.txt', '--output', 'gs://bucket/web', *words) == 2
    error = capsys.readouterr().err
    assert error.startswith(f'error: {message}')
    assert error.count('\n') == 1
