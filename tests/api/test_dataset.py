"""`maxlm.Dataset`: the same data as `maxlm prepare`, and the batches of the training loop."""

import json

import jax
import pytest

import maxlm
from maxlm.cli.setup import prepare
from maxlm.errors import EXIT_DONE, InputError, exit_code
from tests.cli.runs.test_train import SMALL, curve, run


def test_preparation_equals_the_command(tmp_path):
    (tmp_path / 'a.jsonl').write_text('{"text": "one"}\n{"text": "two two"}\n{"text": "three"}\n')
    options = {'tokenizer': 'bytes', 'validation_fraction': 0.0, 'workers': 1}
    made = maxlm.Dataset.prepare(tmp_path / 'a.jsonl', tmp_path / 'made', **options)
    arguments = ['--tokenizer=bytes', '--validation-fraction=0', '--workers=1', '--quiet']
    command = [f'--input={tmp_path}/a.jsonl', f'--output={tmp_path}/by-command', *arguments]
    assert exit_code(prepare.main, command) == EXIT_DONE
    assert made.manifest.fingerprint == maxlm.Dataset.open(tmp_path / 'by-command').manifest.fingerprint
    assert (made.num_tokens, made.vocab_size) == (3 + 7 + 5 + 3, 257)
    # The same call changes nothing; other options are refused.
    assert maxlm.Dataset.prepare(tmp_path / 'a.jsonl', tmp_path / 'made', **options).manifest == made.manifest
    with pytest.raises(InputError, match='choose another'):
        maxlm.Dataset.prepare(tmp_path / 'a.jsonl', tmp_path / 'made', tokenizer='bytes', deduplicate='exact')


def test_packed_data_has_its_own_length(tmp_path):
    messages = [{'role': 'user', 'content': 'hi'}, {'role': 'assistant', 'content': 'hello'}]
    (tmp_path / 'a.jsonl').write_text(json.dumps({'messages': messages}) + '\n')
    options = {'tokenizer': 'bytes', 'pack_seq_len': 64, 'validation_fraction': 0.0, 'workers': 1, 'quiet': True}
    made = maxlm.Dataset.prepare(tmp_path / 'a.jsonl', tmp_path / 'made', **options)
    data = maxlm.Dataset.open(tmp_path / 'made')
    assert data.manifest == made.manifest
    assert data.manifest.packed_window == 64
    assert data.num_windows(maxlm.Config.get('tiny', {'data.seq_len': 64})) == 1
    with pytest.raises(InputError, match=r'packed into sequences of 64 tokens; set data\.seq_len=64'):
        data.num_windows(maxlm.Config.get('tiny', {'data.seq_len': 32}))


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ({'tokeniser': 'bytes'}, "'tokeniser' is not an option of prepare"),
        ({'validation_fraction': 2}, 'validation-fraction=2'),
        ({'output': 'http://host/data'}, 'output=http://host/data: http:// is not supported'),
    ],
)
def test_wrong_options(tmp_path, options, message):
    (tmp_path / 'a.txt').write_text('text')
    with pytest.raises(InputError, match=message):
        maxlm.Dataset.prepare(tmp_path / 'a.txt', options.pop('output', tmp_path / 'out'), **options)
    assert not (tmp_path / 'out').exists()


def test_an_own_loop_has_the_losses_of_the_training_loop(dataset, tmp_path):
    assert run(dataset, tmp_path / 'run', train__num_steps=4) == EXIT_DONE
    data = maxlm.Dataset(dataset)
    config = maxlm.Config.get('tiny', {**SMALL, 'train.num_steps': 4}).resolve(data)
    mesh = maxlm.make_mesh(config)
    train_step = jax.jit(maxlm.make_train_step(config, mesh))
    losses, states = [], [maxlm.init_state(config, mesh)]
    for batch in data.batches(config, mesh):
        state, metrics = train_step(states[-1], batch)
        losses.append(float(metrics['loss']))
        states.append(state)
    assert losses == pytest.approx([line['train/loss'] for line in curve(tmp_path / 'run').values()], rel=1e-6)
    # A loop that resumes reads the next batches.
    resumed = [float(train_step(states[2], next(data.batches(config, mesh, start=2)))[1]['loss'])]
    assert resumed == losses[2:3] != losses[1:2]


def test_a_schedule_of_the_data_is_refused(dataset):
    data = maxlm.Dataset(dataset)
    config = maxlm.Config.get('tiny', {**SMALL, 'data.seq_len_schedule': ((8, 0.5),)}).resolve(data)
    with pytest.raises(InputError, match='need the training loop'):
        data.batches(config, maxlm.make_mesh(config))
