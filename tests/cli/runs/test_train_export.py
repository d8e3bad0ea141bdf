"""Runs that export their final parameters in the format of Hugging Face (`export.at_end`)."""

import dataclasses
import json

import numpy as np
import pytest
import torch
import transformers
from flax import traverse_util

from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, InputError
from maxlm.huggingface import final_export
from maxlm.runtime.preemption import StopRequest
from maxlm.telemetry.events import read_events
from maxlm.workdir.files import read_config
from tests.cli.runs.test_train import CONSTANT, params_of, run
from tests.messages import assert_error_line
from tests.parameters import decoder_graph, logits

pytestmark = pytest.mark.usefixtures('shared_steps')

SETTINGS = {
    **CONSTANT,
    'train__num_steps': 2,
    'eval__interval': 0,
    'optimizer__warmup_steps': 0,
    'optimizer__ema_decay': 0.5,
    'export__at_end': 'true',
}
FILES = {
    'README.md',
    'config.json',
    'generation_config.json',
    'model.safetensors',
    'special_tokens_map.json',
    'tokenizer.json',
    'tokenizer_config.json',
}


def kinds(workdir):
    return [event['kind'] for event in read_events(workdir).lines if event['kind'] in ('export', 'exported')]


def our_logits(workdir, step, item, tokens):
    """Returns the logits of a checkpoint in float32, after rounding its parameters to bfloat16 as the export does."""
    flat = traverse_util.flatten_dict(params_of(workdir, step, item))
    rounded = {path: torch.from_numpy(np.array(a)).bfloat16().float().numpy() for path, a in flat.items()}
    config = dataclasses.replace(read_config(workdir).model, dtype='float32')
    return logits(decoder_graph(config), traverse_util.unflatten_dict(rounded), tokens)


def test_the_export_equals_the_last_checkpoint(dataset, tmp_path, capsys):
    workdir = tmp_path / 'run'
    assert run(dataset, workdir, **SETTINGS) == EXIT_DONE
    assert f'to {workdir}/hf' in (workdir / 'run.log').read_text()
    assert {path.name for path in (workdir / 'hf').iterdir()} == FILES
    assert '# run\n' in (workdir / 'hf' / 'README.md').read_text()
    tokens = np.arange(48, dtype=np.int32).reshape(4, 12)
    model = transformers.AutoModelForCausalLM.from_pretrained(workdir / 'hf', dtype='float32')
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    np.testing.assert_allclose(our_logits(workdir, 2, 'ema', tokens), theirs, atol=1e-5)
    # Negative control: the parameters differ from their average.
    assert np.abs(our_logits(workdir, 2, 'params', tokens) - theirs).max() > 1e-3

    # A finished run is not exported again, unless its export is gone. A longer run replaces its export.
    capsys.readouterr()
    written = (workdir / 'hf' / 'model.safetensors').stat().st_mtime_ns
    assert run(dataset, workdir, **SETTINGS) == EXIT_DONE
    assert 'the model of step 2 is already exported' in capsys.readouterr().out
    assert (workdir / 'hf' / 'model.safetensors').stat().st_mtime_ns == written
    (workdir / 'hf' / 'config.json').unlink()
    assert run(dataset, workdir, **SETTINGS) == EXIT_DONE
    assert (workdir / 'hf' / 'config.json').is_file()
    assert run(dataset, workdir, **{**SETTINGS, 'train__num_steps': 3}) == EXIT_DONE
    assert '| steps | 3 |' in (workdir / 'hf' / 'README.md').read_text()
    assert kinds(workdir) == ['export', 'exported'] * 3
    # The workdir can be moved.
    workdir.rename(tmp_path / 'moved')
    assert run(dataset, tmp_path / 'moved', **{**SETTINGS, 'train__num_steps': 3}) == EXIT_DONE
    assert kinds(tmp_path / 'moved') == ['export', 'exported'] * 3


def test_an_export_that_fails_keeps_the_run_and_is_completed(dataset, tmp_path, capsys, monkeypatch):
    workdir = tmp_path / 'run'
    settings = {**SETTINGS, 'export__to': tmp_path / 'model'}
    export_model = final_export.export_model

    def fail(*words, **options):
        (tmp_path / '.model.7.partial').mkdir()
        raise InputError('the disk is full')

    monkeypatch.setattr(final_export, 'export_model', fail)
    assert run(dataset, workdir, **settings) == EXIT_BAD_INPUT
    assert_error_line(
        capsys.readouterr().err, 'the disk is full; the run is complete and its checkpoint of step 2 is saved'
    )
    assert (workdir / 'checkpoints' / '2').is_dir()
    monkeypatch.setattr(final_export, 'export_model', export_model)
    assert run(dataset, workdir, **settings) == EXIT_DONE
    assert kinds(workdir) == ['export', 'export', 'exported']
    assert {path.name for path in (tmp_path / 'model').iterdir()} == FILES
    assert sorted(path.name for path in tmp_path.iterdir()) == ['model', 'run']
    # Another run does not replace it.
    assert run(dataset, tmp_path / 'other', **settings) == EXIT_BAD_INPUT
    assert f'export.to={tmp_path}/model: already exists' in capsys.readouterr().err
    assert not (tmp_path / 'other' / 'checkpoints').exists()


def test_files_of_others_are_not_replaced(dataset, tmp_path, capsys, monkeypatch):
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'notes.txt').write_text('mine')
    settings = {**SETTINGS, 'export__to': tmp_path / 'model'}
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_BAD_INPUT
    assert not (tmp_path / 'run' / 'checkpoints').exists()
    # They may also appear during the run.
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, 'should_stop', lambda self: (tmp_path / 'model' / 'notes.txt').write_text('') and 0)
        (tmp_path / 'model' / 'notes.txt').unlink()
        assert run(dataset, tmp_path / 'run', **settings) == EXIT_BAD_INPUT
    assert 'the run is complete' in capsys.readouterr().err
    assert [path.name for path in (tmp_path / 'model').iterdir()] == ['notes.txt']
    (tmp_path / 'model' / 'notes.txt').unlink()
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    assert {path.name for path in (tmp_path / 'model').iterdir()} == FILES


def test_only_a_complete_run_is_exported(dataset, tmp_path, change_batches, monkeypatch):
    workdir = tmp_path / 'run'
    with monkeypatch.context() as patch:
        patch.setattr(StopRequest, 'should_stop', lambda self: True)
        assert run(dataset, workdir, **SETTINGS) == EXIT_PREEMPTED
    assert not (workdir / 'hf').exists()
    assert run(dataset, workdir, **SETTINGS) == EXIT_DONE
    assert (workdir / 'hf').exists()
    change_batches(poisoned=range(9))
    diverges = {'guard__max_consecutive_skips': 1, 'guard__max_rollbacks': 0}
    assert run(dataset, tmp_path / 'diverged', **SETTINGS, **diverges) == EXIT_FAILED
    assert not (tmp_path / 'diverged' / 'hf').exists()


@pytest.mark.parametrize(
    ('settings', 'part'),
    [
        ({'model__activation': 'relu2'}, 'export.at_end=True: model.activation=relu2'),
        ({'export__to': 's3://'}, 'export.to=s3://'),
        ({'export__to': 'az://bucket/x'}, 'az:// is not supported'),
    ],
)
def test_models_and_targets_that_are_refused_at_the_start(dataset, tmp_path, capsys, settings, part):
    assert run(dataset, tmp_path / 'run', **SETTINGS, **settings) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, part)
    assert not (tmp_path / 'run').exists()


def test_exports_in_buckets(dataset, tmp_path, s3, capsys):
    def remote(prefix):
        listed = s3.list_objects_v2(Bucket='bucket', Prefix=prefix).get('Contents', [])
        return {entry['Key'].removeprefix(prefix): (entry['ETag'], entry['LastModified']) for entry in listed}

    # The export in the workdir is also in the bucket of the run.
    settings = {**SETTINGS, 'data__cache_dir': tmp_path / 'cache', 'checkpoint__remote_dir': 's3://bucket/run'}
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    assert f'to {tmp_path}/run/hf and s3://bucket/run/hf' in capsys.readouterr().out
    before = remote('run/hf/')
    assert set(before) == FILES == {path.name for path in (tmp_path / 'run' / 'hf').iterdir()}
    body = s3.get_object(Bucket='bucket', Key='run/hf/model.safetensors')['Body'].read()
    assert body == (tmp_path / 'run' / 'hf' / 'model.safetensors').read_bytes()
    assert run(dataset, tmp_path / 'run', **settings) == EXIT_DONE
    assert remote('run/hf/') == before

    # A run in a bucket can have its export elsewhere.
    settings = {**SETTINGS, 'data__cache_dir': tmp_path / 'cache', 'export__to': 's3://bucket/models/one'}
    assert run(dataset, 's3://bucket/two', **settings) == EXIT_DONE
    assert set(remote('models/one/')) == FILES
    assert not remote('two/hf/')
    card = s3.get_object(Bucket='bucket', Key='models/one/README.md')['Body'].read().decode()
    assert '# one\n' in card
    # A longer run replaces it.
    assert run(dataset, 's3://bucket/two', **{**settings, 'train__num_steps': 3}) == EXIT_DONE
    assert '| steps | 3 |' in s3.get_object(Bucket='bucket', Key='models/one/README.md')['Body'].read().decode()
    assert json.loads(s3.get_object(Bucket='bucket', Key='models/one/config.json')['Body'].read())['model_type']
    # By default it is below the workdir.
    assert run(dataset, 's3://bucket/three', **{**settings, 'export__to': ''}) == EXIT_DONE
    assert set(remote('three/hf/')) == FILES
