"""Checkpoints of nanochat as the model of a command: imported on the fly, or refused with the command of the import."""

import dataclasses

import jax
import numpy as np
import pytest

from maxlm.checkpoint.fetch import find_local_step
from maxlm.checkpoint.frozen_models import with_frozen_models
from maxlm.checkpoint.manager import find_step
from maxlm.errors import InputError
from maxlm.huggingface.nanochat.import_checkpoint import find_checkpoint, import_checkpoint
from maxlm.inference.load import load_model
from maxlm.inference.resolve_model import resolved_checkpoint
from maxlm.workdir.model_directory import HUGGING_FACE, NANOCHAT, model_format
from tests.huggingface.nanochat.files import Reference, save, save_tokenizer
from tests.messages import input_error
from tests.small import small_config


@pytest.fixture(scope='module')
def directory(tmp_path_factory):
    """Returns the directory of a checkpoint with its tokenizer."""
    directory = tmp_path_factory.mktemp('d2')
    wide = Reference('first')
    for name in ('transformer.wte.weight', 'lm_head.weight'):
        wide.weights[name] = np.resize(wide.weights[name], (320, 16))
    save(directory, wide, config={'vocab_size': 300})
    save_tokenizer(directory / 'tokenizer.pkl')
    return directory


@pytest.mark.parametrize('name', ['', 'model_000010.pt'])
def test_the_server_and_the_python_api_import_it(directory, name, tmp_path):
    with resolved_checkpoint(str(directory / name)) as checkpoint:
        model = load_model(checkpoint, num_devices=1)
    imported = import_checkpoint(find_checkpoint(str(directory)), str(tmp_path / 'run'), tokenizer='', show=False)
    expected = load_model(str(imported.workdir), num_devices=1)
    assert all(jax.tree.leaves(jax.tree.map(np.array_equal, model.params, expected.params)))
    assert model.chat is not None
    assert model.tokenizer.vocab_size == 300


def test_a_missing_tokenizer_is_named_with_the_command(tmp_path):
    save(tmp_path, Reference('first'))
    with pytest.raises(InputError, match=r'maxlm hf import --input \S+ --tokenizer=FILE') as info:
        resolved_checkpoint(str(tmp_path)).__enter__()
    assert str(info.value).startswith(f'--checkpoint={tmp_path}: the tokenizer is not beside the model')


@pytest.mark.parametrize('name', ['', 'model_000010.pt'])
def test_other_commands_name_the_import(directory, name):
    given = str(directory / name)
    with input_error(f'in the format of nanochat; import it with `maxlm hf import --input={given} --output='):
        find_local_step(given)


@pytest.mark.parametrize('key', ['train.init_from', 'distill.teacher'])
def test_config_keys_name_the_import(directory, key):
    config = small_config()
    for checkpoint in (str(directory), 'hf:org/name'):
        distill = dataclasses.replace(config.distill, teacher=checkpoint)
        with_teacher = dataclasses.replace(config, distill=distill)
        with pytest.raises(InputError) as info:
            find_step(checkpoint, key=key) if key == 'train.init_from' else with_frozen_models(with_teacher)
        assert str(info.value).startswith(f'{key}={checkpoint}: contains a model in the format of ')
        assert f'`maxlm hf import --input={checkpoint} --output=WORKDIR`' in str(info.value)


def test_formats(directory, tmp_path):
    assert model_format(str(directory)) == NANOCHAT
    assert model_format(str(tmp_path)) == model_format('gs://bucket/run') == ''
    (tmp_path / 'model_best.pt').touch()
    assert model_format(str(tmp_path)) == ''
    (tmp_path / 'model_000001.pt').touch()
    assert model_format(str(tmp_path)) == NANOCHAT
    (tmp_path / 'config.json').touch()
    (tmp_path / 'model.safetensors').touch()
    assert model_format(str(tmp_path)) == HUGGING_FACE
    (tmp_path / 'checkpoints').mkdir()
    assert model_format(str(tmp_path)) == ''
