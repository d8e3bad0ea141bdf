"""User errors of `maxlm train`: each is a one-line error, and leaves no files that disturb later runs."""

import json
import os
import shutil
import subprocess
import sys

import pytest

from maxlm.cli.runs import train
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.telemetry.metrics import read_metrics
from tests.cli.runs.test_train import arguments
from tests.conftest import ROOT
from tests.cpu import cpu_flags
from tests.messages import assert_error_line

STEPS = 2


# Files that a refused run may add to a workdir; the next run appends to them.
LOGS = {'config.json', 'events.jsonl', 'goodput.jsonl', 'metrics.jsonl', 'report.html', 'run.log', 'tokenizer.json'}


@pytest.fixture
def data(dataset, tmp_path):
    """Returns a copy of the data set that a test may damage."""
    shutil.copytree(dataset, tmp_path / 'data')
    return tmp_path / 'data'


@pytest.fixture
def workdir(tmp_path):
    return tmp_path / 'run'


@pytest.fixture(scope='module')
def finished(dataset, tmp_path_factory):
    """Returns the workdir of a run of two steps by the command that other tests modify."""
    workdir = tmp_path_factory.mktemp('finished') / 'run'
    succeeds(dataset, workdir)
    return workdir


@pytest.fixture
def trained(finished, workdir):
    """Returns a copy of `finished` that a test may damage."""
    shutil.copytree(finished, workdir)
    return workdir


def command(data, workdir, **overrides):
    return arguments(data, workdir, **{'train__num_steps': STEPS, 'eval__interval': 0, **overrides})


@pytest.fixture
def refused(capfd):
    """Returns a function that runs a failing command and checks that stderr is one line with the given parts."""

    def refused(argv, *parts):
        capfd.readouterr()
        assert exit_code(train.main, [str(word) for word in argv]) == EXIT_BAD_INPUT
        err = capfd.readouterr().err
        assert_error_line(err, *parts)

    return refused


def succeeds(data, workdir):
    """Checks that the correct command succeeds afterwards."""
    assert exit_code(train.main, command(data, workdir)) == EXIT_DONE
    assert [line['step'] for line in read_metrics(workdir)] == [1, 2]
    assert (workdir / 'checkpoints' / str(STEPS)).is_dir()
    assert not list(workdir.rglob('*tmp*'))


def state(workdir):
    """Returns the files that determine how a run resumes, with their contents."""
    files = (path for path in workdir.rglob('*') if path.is_file())
    logs = LOGS - {'config.json'}
    return {path: path.read_bytes() for path in files if str(path.relative_to(workdir)) not in logs}


def record_file(data):
    (path,) = data.glob('train-*.arrayrecord')
    return path


def test_the_command_without_a_mistake_succeeds(finished):
    # Negative control: the unmodified command is valid and writes JSON.
    assert json.loads((finished / 'config.json').read_text())['train']['num_steps'] == STEPS


def test_an_empty_data_directory(data, workdir, refused):
    shutil.rmtree(data)
    data.mkdir()
    refused(command(data, workdir), data, 'contains no data set', 'maxlm prepare')
    assert not workdir.exists()


def test_no_data_directory(tmp_path, workdir, refused):
    refused(command(tmp_path / 'nothing', workdir), tmp_path / 'nothing', 'contains no data set')
    assert not workdir.exists()


def test_a_truncated_record_file(data, workdir, refused):
    path = record_file(data)
    path.write_bytes(path.read_bytes()[:-100])
    refused(command(data, workdir), path, 'truncated')
    assert not workdir.exists()


def test_a_missing_record_file(data, workdir, refused):
    path = record_file(data)
    path.unlink()
    refused(command(data, workdir), path, 'No such file')
    assert not workdir.exists()


@pytest.mark.parametrize('content', ['{', '[]', '\x00', '{"format_version": 99}'])
def test_a_garbled_manifest(data, workdir, refused, content):
    (data / 'dataset.json').write_text(content)
    refused(command(data, workdir), data / 'dataset.json')
    assert not workdir.exists()


def test_no_tokenizer(data, workdir, refused):
    (data / 'tokenizer.json').unlink()
    refused(command(data, workdir), data / 'tokenizer.json')
    assert not workdir.exists()


def test_files_of_refused_runs_do_not_disturb_later_runs(data, workdir, refused):
    """Makes three mistakes that are detected after the workdir exists, and then none."""
    workdir.mkdir()
    (workdir / 'config.json').write_text('{')
    refused(command(data, workdir), workdir / 'config.json', 'not a valid config')
    (workdir / 'config.json').unlink()

    (workdir / 'metrics.jsonl').write_text('{"step": 1}\nnot json\n')
    refused(command(data, workdir), workdir / 'metrics.jsonl')
    (workdir / 'metrics.jsonl').unlink()

    path = record_file(data)
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 4]) + content[middle + 1 :])
    refused(command(data, workdir), path, 'is damaged')
    path.write_bytes(content)
    assert {path.name for path in workdir.rglob('*') if path.is_file()} <= LOGS
    succeeds(data, workdir)


def test_a_checkpoint_of_another_model_in_the_workdir(dataset, trained, refused):
    (trained / 'config.json').unlink()
    before = state(trained)
    params = trained / 'checkpoints' / '2' / 'params'
    refused(command(dataset, trained, model__dim=32), params, '(1, 16', '(1, 32', '--workdir')
    # The refused run has not replaced the config, so the correct model finds its checkpoint.
    assert state(trained) == before


def test_a_checkpoint_of_another_model_to_resume_from(dataset, finished, tmp_path, refused):
    argv = [*command(dataset, tmp_path / 'new', model__dim=32), f'--resume={finished}']
    refused(argv, f'--resume={finished} has model.dim=16, but the config has model.dim=32')
    refused([*argv, f'--resume={finished}@7'], f'{finished}@7', "step '7' does not exist; available steps: 2")
    assert not (tmp_path / 'new').exists()


def test_a_workdir_of_another_model(dataset, trained, refused):
    before = state(trained)
    refused(command(dataset, trained, model__num_layers=2), trained, 'model.num_layers=1', '2')
    assert state(trained) == before


def test_a_workdir_with_other_data(dataset, trained, refused):
    before = state(trained)
    refused(command(dataset, trained, data__seed=3, train__num_steps=4), 'seed was 0 and is 3')
    assert state(trained) == before


def test_a_workdir_that_cannot_be_written_to(dataset, tmp_path, refused):
    (tmp_path / 'file').write_text('mine')
    refused(command(dataset, tmp_path / 'file' / 'run'), f'--workdir={tmp_path / "file" / "run"}', 'Not a directory')
    refused(command(dataset, tmp_path / 'file'), f'--workdir={tmp_path / "file"}')
    assert (tmp_path / 'file').read_text() == 'mine'
    assert os.listdir(tmp_path) == ['file']


@pytest.mark.parametrize(
    ('override', 'parts'),
    [
        ('--config.optimizer.learning_rte=1', ['optimizer.learning_rte', "did you mean 'learning_rate'?"]),
        ('--config.optimiser.learning_rate=1', ['optimiser', "did you mean 'optimizer'?"]),
        ('--config.train.num_steps=many', ['train.num_steps', 'many', 'an integer']),
        ('--config.train.num_steps=2.5', ['train.num_steps', '2.5', 'an integer']),
        ('--config.optimizer.learning_rate=fast', ['optimizer.learning_rate', 'fast', 'a number']),
        ('--config.optimizer.learning_rate=nan', ['optimizer.learning_rate', 'nan']),
        ('--config.metrics.tensorboard=maybe', ['metrics.tensorboard', 'maybe', 'true or false']),
        ('--config.train.global_batch_size=6', ['train.global_batch_size=6', '8 devices', 'nearest: 8']),
        ('--config.train.global_batch_size=-8', ['train.global_batch_size=-8', 'at least 0']),
        ('--config.train.per_device_batch_size=3', ['train.per_device_batch_size=3']),
        ('--config.mesh.fsdp=3', ['mesh', 'fsdp=3', '8']),
        ('--config.model.vocab_size=100', ['model.vocab_size=100', '257']),
        ('--config.model.num_heads=3', ['model.num_heads=3', 'model.dim=16']),
        ('--confg.model.num_heads=2', ['--confg.model.num_heads=2']),
        ('extra', ['extra']),
    ],
)
def test_keys_and_values(dataset, workdir, refused, override, parts):
    refused([*command(dataset, workdir), override], *parts)
    assert not workdir.exists()


def test_no_config_is_given(dataset, workdir, refused):
    argv = [word for word in command(dataset, workdir) if not word.startswith('--config=')]
    refused(argv, '--config', '--help')
    assert not workdir.exists()


def test_no_workdir_is_given(dataset, finished, tmp_path, monkeypatch, capfd):
    shutil.copytree(finished, tmp_path / 'runs' / 'tiny')
    monkeypatch.chdir(tmp_path)
    argv = [word for word in command(dataset, finished) if not word.startswith('--workdir=')]
    assert exit_code(train.main, argv) == EXIT_DONE
    first, *rest = capfd.readouterr().out.splitlines()
    assert first == 'workdir: runs/tiny (choose another with --workdir)'
    # It resumes the run in that workdir.
    assert any('nothing to do' in line for line in rest)


def test_no_config_file(dataset, workdir, refused):
    argv = [word for word in command(dataset, workdir) if not word.startswith('--config=')]
    refused([*argv, f'--config={ROOT}/configs/tyni.py'], 'tyni.py', 'tiny.py')


def damage(workdir, item):
    """Overwrites the largest array of a checkpoint item and returns the checkpoint's directory."""
    step = workdir / 'checkpoints' / str(STEPS)
    largest = max((step / item).rglob('*'), key=lambda path: path.stat().st_size * ('/d/' in str(path)))
    largest.write_bytes(b'no array')
    return step


def test_damaged_moments(dataset, trained, refused):
    step = damage(trained, 'optimizer')
    refused(command(dataset, trained, train__num_steps=4), step)
    shutil.rmtree(step)
    succeeds(dataset, trained)


@pytest.mark.multiprocess
def test_damaged_parameters(dataset, trained):
    step = damage(trained, 'params')
    # A separate process, because background warnings of libraries would follow the error.
    environment = {**os.environ, 'XLA_FLAGS': cpu_flags(1)}
    argv = [str(word) for word in command(dataset, trained, train__num_steps=4)]
    argv = [sys.executable, '-m', 'maxlm.train', *argv]
    process = subprocess.run(argv, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert process.returncode == EXIT_BAD_INPUT
    assert_error_line(process.stderr, step)


def test_messages_with_names_of_any_length_are_shortened(capsys):
    def fail(argv):
        raise InputError('long\n' + 'x' * 10**6)

    assert exit_code(fail, []) == EXIT_BAD_INPUT
    written = capsys.readouterr().err
    assert written.startswith('error: long xxx')
    assert len(written) < 5000
