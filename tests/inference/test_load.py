"""Tests which parameters of a checkpoint are loaded, and which files must accompany it."""

import json
import shutil

import jax
import pytest

from maxlm.checkpoint.streaming import write_step
from maxlm.data.chat.template import CHATML
from maxlm.data.dataset.records import load_manifest
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import InputError
from maxlm.inference import load
from maxlm.inference.load import load_model
from maxlm.log import Console
from maxlm.workdir.files import CHAT_TEMPLATE, TOKENIZER, write_run_files
from maxlm.workdir.step_dirs import CHECKPOINTS_DIR
from tests.checkpoint.test_manager import abstract_on, config_on, random_state, same, save
from tests.checkpoint.test_streaming import flatten, streamed


@pytest.fixture(scope='module')
def saved(dataset, tmp_path_factory):
    """Returns workdirs with random parameters at step 7, without and with an EMA, and both sets of arrays."""
    state = random_state(abstract_on(8), step=7, skipped=0)
    average = random_state(abstract_on(8), step=7, skipped=0, seed=1).params
    workdirs = []
    for ema in (None, average):
        workdirs.append(tmp_path_factory.mktemp('saved') / 'run')
        workdirs[-1].mkdir()
        save(workdirs[-1], [state._replace(ema=ema)])
        write_run_files(workdirs[-1], config_on(8), load_manifest(str(dataset)).tokenizer_path)
    return workdirs, jax.device_get(state.params), jax.device_get(average)


@pytest.fixture
def make(saved, tmp_path):
    """Returns a function that copies a workdir with or without an EMA."""
    workdirs, params, average = saved

    def make(*, averaged):
        shutil.copytree(workdirs[averaged], tmp_path / 'run')
        return tmp_path / 'run', params, average

    return make


@pytest.mark.parametrize('num_devices', [1, 2])
def test_the_average_is_loaded(make, num_devices):
    workdir, params, average = make(averaged=True)
    model = load_model(str(workdir), num_devices=num_devices)
    assert same(jax.device_get(model.params), average)
    assert not same(jax.device_get(model.params), params)
    assert model.step == 7


def test_without_an_average_the_parameters_are_loaded(make):
    workdir, params, average = make(averaged=False)
    model = load_model(f'{workdir}@7', num_devices=1)
    assert same(jax.device_get(model.params), params)
    assert not same(jax.device_get(model.params), average)


def test_an_import_is_loaded_like_any_other(make):
    workdir, params, _ = make(averaged=True)
    write_step(workdir, 8, streamed(flatten(params)))
    model = load_model(str(workdir), num_devices=2)
    assert model.step == 8
    assert same(jax.device_get(model.params), params)


def test_a_checkpoint_without_a_tokenizer(make):
    workdir, _, _ = make(averaged=False)
    tokenizer = (workdir / TOKENIZER).read_bytes()
    (workdir / TOKENIZER).unlink()
    for checkpoint in (workdir, f'{workdir}@7', workdir / CHECKPOINTS_DIR / '7'):
        with pytest.raises(InputError) as info:
            load_model(str(checkpoint), num_devices=1)
        assert f'--checkpoint={checkpoint}: tokenizer.json is missing' in str(info.value)
        assert str(workdir / TOKENIZER) in str(info.value)
    # The fix that the message suggests works.
    (workdir / TOKENIZER).write_bytes(tokenizer)
    load_model(str(workdir), num_devices=1)


def test_a_chat_template_comes_with_the_model(make, capsys):
    workdir, _, _ = make(averaged=False)
    plain = load_model(str(workdir), num_devices=1)
    assert (plain.chat, plain.stop_token_ids) == (None, (256,))
    bytes_tokenizer().with_special_tokens(['<|im_start|>', '<|im_end|>']).save(workdir / TOKENIZER)
    (workdir / CHAT_TEMPLATE).write_text(CHATML)
    model = load_model(str(workdir), num_devices=1)
    assert model.stop_token_ids == (256, 258)
    ids = model.chat.encode_prompt([{'role': 'user', 'content': 'a'}]).tolist()
    assert model.tokenizer.decode(ids) == '<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n'
    # A tokenizer that cannot be used does not prevent loading the model.
    bytes_tokenizer().save(workdir / TOKENIZER)
    with Console():
        assert load_model(str(workdir), num_devices=1).chat is None
    assert 'without a chat template' in capsys.readouterr().out


@pytest.mark.parametrize(('stored', 'used'), [('/etc/x', '~/.cache/maxlm/programs'), ('', '')])
def test_a_checkpoint_does_not_choose_the_directory_of_the_compilation_cache(make, monkeypatch, stored, used):
    seen = []
    monkeypatch.setattr(load, 'enable_compilation_cache', seen.append)
    workdir, _, _ = make(averaged=False)
    values = json.loads((workdir / 'config.json').read_text())
    values['train']['compilation_cache_dir'] = stored
    (workdir / 'config.json').write_text(json.dumps(values))
    load_model(str(workdir), num_devices=8)
    assert seen == [used]
