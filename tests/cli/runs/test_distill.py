"""`maxlm distill`: stored outputs equal the teacher's, resume after an interruption, and one-line errors."""

import dataclasses
import json
import pickle

import jax
import numpy as np
import pytest

from maxlm.cli.runs import distill
from maxlm.config.loading import build, default
from maxlm.data.loader import teacher_outputs
from maxlm.data.loader.dataset import open_training_data
from maxlm.data.loader.teacher_outputs import output_file
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_BAD_INPUT, EXIT_DONE, InputError, exit_code
from maxlm.inference import teacher_pass
from maxlm.inference.load import load_model
from maxlm.training.forward import make_forward
from tests.huggingface.workdirs import MODELS, make_workdir
from tests.messages import assert_error_line, input_error

TOP_K, T = 5, 32
VOCAB = bytes_tokenizer().vocab_size + 3


@pytest.fixture(scope='module')
def teacher(tmp_path_factory):
    workdir = tmp_path_factory.mktemp('teacher') / 'run'
    make_workdir(workdir, MODELS['llama'])
    return workdir


def run(dataset, teacher, output, *options):
    argv = [f'--data={dataset}', f'--teacher={teacher}', f'--output={output}', f'--top-k={TOP_K}', f'--seq-len={T}']
    return exit_code(distill.main, [*argv, '--temperature=2', *options])


@pytest.fixture(scope='module')
def stored(dataset, teacher, tmp_path_factory):
    output = tmp_path_factory.mktemp('outputs') / 'teacher'
    assert run(dataset, teacher, output, '--quiet', '--batch-size=7') == EXIT_DONE
    return output


def config_of(dataset, output, **keys):
    values = default()
    values.model.update(num_layers=1, dim=8, num_heads=1, vocab_size=VOCAB)
    values.data.update(path=str(dataset), seq_len=T)
    values.train.update(num_steps=1, global_batch_size=1)
    values.distill.update(logits_dir=str(output), top_k=TOP_K, temperature=2.0)
    for key, value in keys.items():
        section, name = key.split('__')
        values[section][name] = value
    return build(values)


def test_batches_contain_the_most_likely_tokens_of_the_teacher(dataset, teacher, stored):
    config = config_of(dataset, stored)
    corpus = open_training_data(config.data)
    outputs = corpus.teacher_outputs(config)
    batch = pickle.loads(pickle.dumps(corpus.train_batches(4, teacher=outputs)))[3]
    model = load_model(str(teacher), num_devices=1)
    alone = dataclasses.replace(
        model.config,
        data=dataclasses.replace(model.config.data, seq_len=T),
        train=dataclasses.replace(model.config.train, global_batch_size=4, per_device_batch_size=4),
    )
    hidden, decoder, _ = make_forward(alone, model.layout)(model.params, None, batch, None)
    log_probs = np.asarray(jax.nn.log_softmax(decoder.logits(hidden) / 2))
    # The last window of a shard may have padding.
    there = batch['segments'] > 0
    found = np.take_along_axis(log_probs, batch['teacher_ids'], axis=-1)
    assert batch['teacher_ids'].shape == (4, T, TOP_K)
    np.testing.assert_allclose(batch['teacher_log_probs'][there], found[there], atol=5e-3)
    np.testing.assert_allclose(found[there], np.sort(log_probs)[..., : -TOP_K - 1 : -1][there], atol=5e-3)
    # Control: another window has other tokens.
    assert (batch['teacher_ids'][0] != batch['teacher_ids'][1]).any()


def test_an_interrupted_pass_continues(dataset, teacher, stored, tmp_path, monkeypatch):
    output, make_outputs = tmp_path / 'outputs', teacher_pass.make_outputs
    calls = []

    def counted(*arguments):
        inner = make_outputs(*arguments)

        def outputs(batch):
            calls.append(batch)
            if len(calls) == 5:
                raise InputError('interrupted')
            return inner(batch)

        return outputs

    monkeypatch.setattr(teacher_pass, 'make_outputs', counted)
    monkeypatch.setattr(teacher_pass, 'WINDOWS_PER_FILE', 100)
    monkeypatch.setattr(teacher_outputs, 'WINDOWS_PER_FILE', 100)
    assert run(dataset, teacher, output, '--batch-size=40') == EXIT_BAD_INPUT
    # The first file is complete after 3 batches of 40 windows; the second one was interrupted.
    assert sorted(path.name for path in output.iterdir()) == ['teacher.json', 'windows-0000000000.npy']
    config = config_of(dataset, output)
    with pytest.raises(InputError, match=r'windows-0000000100\.npy: missing'):
        open_training_data(config.data).teacher_outputs(config)
    calls.clear()
    monkeypatch.setattr(teacher_pass, 'make_outputs', make_outputs)
    assert run(dataset, teacher, output, '--batch-size=40') == EXIT_DONE
    files = sorted(output.glob('*.npy'))
    assert len(files) == 3
    whole = np.load(stored / 'windows-0000000000.npy')
    np.testing.assert_array_equal(np.concatenate([np.load(file)['id'] for file in files]), whole['id'])
    # Files are found by the number of the window.
    reader = open_training_data(config.data).teacher_outputs(config)
    np.testing.assert_array_equal(reader.batch([205, None])['teacher_ids'][0], whole['id'][205])
    assert not reader.batch([205, None])['teacher_log_probs'][1].any()


@pytest.mark.parametrize(
    ('options', 'words'),
    [
        (['--top-k=0'], ['--top-k=0', 'at least 1']),
        (['--top-k=100000'], ['--top-k=100000', str(VOCAB)]),
        (['--seq-len=1'], ['--seq-len=1', 'at least 2']),
        (['--temperature=0'], ['--temperature=0', 'from 0.01 to 1000']),
        (['--batch-size=0'], ['--batch-size=0']),
        (['--top-k=4'], ['top_k=5', '4', 'choose another directory']),
    ],
)
def test_bad_options(dataset, teacher, stored, capsys, options, words):
    assert run(dataset, teacher, stored, *options) == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, *words)


def test_a_teacher_with_another_tokenizer(dataset, tmp_path, capsys):
    make_workdir(tmp_path / 'run', MODELS['llama'], tokenizer=bytes_tokenizer().with_special_tokens(['<|x|>']))
    assert run(dataset, tmp_path / 'run', tmp_path / 'out') == EXIT_BAD_INPUT
    assert_error_line(capsys.readouterr().err, 'another tokenizer than the teacher')
    assert not (tmp_path / 'out').exists()


@pytest.mark.parametrize(
    ('keys', 'words'),
    [
        ({'data__seq_len': 16}, 'data.seq_len=32'),
        ({'data__document_mask': False}, 'data.document_mask=True'),
        ({'distill__temperature': 1.0}, 'distill.temperature=2.0'),
        ({'model__vocab_size': 0}, f'model.vocab_size={VOCAB}'),
        ({'distill__top_k': 6}, 'distill.top_k=6; set it to 1 … 5'),
        ({'distill__top_k': 0}, 'distill.top_k=0; set it to 1 … 5'),
        ({'distill__teacher': 'runs/x'}, 'set only one of them'),
        ({'data__seq_len_schedule': ((16, 0.5),)}, 'set data.seq_len_schedule=()'),
        ({'train__objective': 'dpo', 'train__init_from': 'x'}, 'only next_token can be distilled'),
    ],
)
def test_runs_that_the_outputs_do_not_fit(dataset, stored, keys, words):
    def open_outputs():
        config = config_of(dataset, stored, **keys)
        open_training_data(config.data).teacher_outputs(config)

    with input_error(words):
        open_outputs()


def test_damaged_and_foreign_outputs(dataset, stored, tmp_path):
    config = config_of(dataset, tmp_path)
    corpus = open_training_data(config.data)
    facts = json.loads((stored / 'teacher.json').read_text())
    file = output_file(tmp_path, 0)
    for text, words in (
        ('{}', 'not a valid manifest'),
        (json.dumps({**facts, 'dataset': 'x'}), 'another data set'),
        (json.dumps(facts), 'cannot be read'),
    ):
        (tmp_path / 'teacher.json').write_text(text)
        file.write_bytes(b'damaged')
        with pytest.raises(InputError, match=words):
            corpus.teacher_outputs(config)
    np.save(file, np.zeros((1, T, TOP_K)))
    with pytest.raises(InputError, match='does not fit the data'):
        corpus.teacher_outputs(config)
