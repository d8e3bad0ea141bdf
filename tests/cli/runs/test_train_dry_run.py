"""Tests `maxlm train --dry-run`, which checks the config and its inputs and starts nothing."""

import subprocess
from types import SimpleNamespace

import pytest

from maxlm.cli.execution import dry_run
from maxlm.cli.execution.dry_run import check_elsewhere, inputs
from maxlm.cli.runs.train import main
from maxlm.config.loading import load
from maxlm.errors import EXIT_DONE, InputError
from maxlm.storage.errors import classify_error
from tests.conftest import ROOT
from tests.shards import write_dataset


def config_of(*overrides):
    return load(str(ROOT / 'configs/tiny.py'), overrides)


@pytest.mark.parametrize(
    ('overrides', 'expected'),
    [
        ((), [('data.path', 'data')]),
        (
            ("data.sources=(('a#x', 0.5), ('gs://b/c', 0.5))", 'distill.teacher=gs://b/run@7'),
            [('data.sources', 'a'), ('data.sources', 'gs://b/c'), ('distill.teacher', 'gs://b/run')],
        ),
        (
            ('data.path=hf:owner/set@main#text', 'distill.logits_dir=logits'),
            [('data.path', 'hf:owner/set@main#text'), ('distill.logits_dir', 'logits')],
        ),
    ],
)
def test_inputs(overrides, expected):
    config = config_of(*overrides)
    assert [(name, value) for name, value in inputs(config)] == expected


def test_inputs_of_reinforcement_learning():
    config = load(str(ROOT / 'configs/arithmetic.py:rl'), [])
    assert [name for name, _ in inputs(config)] == ['grpo.prompts', 'grpo.eval_prompts', 'train.init_from']


def test_paths_of_this_machine_are_refused_elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    subprocess.run(['git', 'init', '--quiet'], check=True)
    (tmp_path / '.gitignore').write_text('ignored\n')
    for name in ('ignored', 'kept'):
        (tmp_path / name).mkdir()
    assert check_elsewhere(config_of('data.path=kept')) == []
    for name in ('ignored', 'missing'):
        with pytest.raises(InputError, match=f'data.path={name}: is not part of the repository'):
            check_elsewhere(config_of(f'data.path={name}'))
    # It may be a disk that the machines share.
    [note] = check_elsewhere(config_of('data.path=/mnt/data'))
    assert note == 'data.path=/mnt/data: cannot be seen from this machine'


@pytest.mark.parametrize(
    ('error', 'is_refused'),
    [
        (FileNotFoundError(), True),
        (PermissionError(), False),
        (ConnectionError(), False),
        (ImportError('gcsfs'), False),
    ],
)
def test_buckets_are_looked_up(monkeypatch, error, is_refused):
    def stat(path):
        raise classify_error(path, error) from error

    monkeypatch.setattr(dry_run, 'stat', stat)
    config = config_of('data.path=gs://bucket/data')
    if is_refused:
        with pytest.raises(InputError, match=r'data\.path: gs://bucket/data'):
            check_elsewhere(config)
    else:
        [note] = check_elsewhere(config)
        assert note.startswith('data.path: gs://bucket/data')
    monkeypatch.setattr(dry_run, 'stat', lambda path: SimpleNamespace())
    assert check_elsewhere(config) == []


def test_nothing_is_written_here(tmp_path, tmp_path_factory, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = [f'--config={ROOT}/configs/tiny.py', '--dry-run']
    data = tmp_path_factory.mktemp('inputs') / 'data'
    write_dataset(data, [['text ' * 50] * 9])
    assert main([*arguments, f'--config.data.path={data}']) == EXIT_DONE
    assert capsys.readouterr().out == 'the config and its inputs are accepted; nothing was started\n'
    with pytest.raises(InputError, match='contains no data set'):
        main([*arguments, f'--config.data.path={tmp_path}/none'])
    assert main([*arguments, '--config.data.path=hf:owner/set', '--config.data.tokenizer=bpe:300']) == EXIT_DONE
    assert 'not checked: data.path=hf:owner/set: is prepared while the run trains' in capsys.readouterr().out
    assert list(tmp_path.iterdir()) == []
