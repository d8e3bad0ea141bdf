"""Tests the loading of draft models: formats, tokenizers, contexts and errors."""

import shutil

import jax
import numpy as np
import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer, chars_tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.export_model import export_model
from maxlm.inference import resolve_model
from maxlm.inference.drafting.load_draft import load_draft
from maxlm.inference.load import load_model
from maxlm.log import Console
from tests.inference.saved_models import write
from tests.parameters import random_params
from tests.small import small_config
from tests.starting import make_start


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('draft')
    bytes_tokenizer().save(folder / 'tokenizer.json')
    make_start(folder / 'run', folder / 'tokenizer.json')
    return folder / 'run'


@pytest.fixture(scope='module')
def model(workdir):
    return load_model(str(workdir), num_devices=1)


@pytest.fixture
def with_tokenizer(workdir, tmp_path):
    """Returns a function that copies the workdir and gives the copy another tokenizer."""

    def copy(tokenizer):
        shutil.copytree(workdir, tmp_path / 'other')
        tokenizer.save(tmp_path / 'other/tokenizer.json')
        return str(tmp_path / 'other')

    return copy


def test_no_draft_model(model):
    assert load_draft('', model) is None


def test_a_model_of_transformers_or_of_the_hub(workdir, model, tmp_path, monkeypatch):
    exported = tmp_path / 'exported'
    export_model(str(workdir), str(exported), architecture='auto', dtype='float32', max_shard_size=10**9, show=False)
    monkeypatch.setattr(resolve_model, 'download_model', {'ORG/NAME@main': exported}.__getitem__)
    for name in (str(exported), 'hf:ORG/NAME@main'):
        draft = load_draft(name, model)
        equal = jax.tree.map(np.array_equal, jax.device_get(draft.params), jax.device_get(model.params))
        assert all(jax.tree.leaves(equal))


def test_padded_vocabularies_are_the_same(model, with_tokenizer):
    padded = with_tokenizer(model.tokenizer.with_special_tokens(['[PAD257]', '[PAD258]']))
    draft = load_draft(padded, model)
    assert draft.tokenizer.vocab_size == model.tokenizer.vocab_size + 2
    assert load_draft(padded, model._replace(tokenizer=draft.tokenizer)) is not None


@pytest.mark.parametrize(
    ('tokenizer', 'fragment'),
    [
        (chars_tokenizer(['abc']), "id 0 is 'a', and "),
        (bytes_tokenizer().with_special_tokens([f'[PAD{i}]' for i in range(300)]), 'only 257 of 557 ids are the same'),
    ],
)
def test_another_tokenizer_is_an_error(model, with_tokenizer, tokenizer, fragment):
    other = with_tokenizer(tokenizer)
    with pytest.raises(InputError) as info:
        load_draft(other, model)
    assert str(info.value).startswith(f'--draft-model={other}: has another tokenizer than the model: {fragment}')


def test_a_missing_model_names_the_option(model):
    with pytest.raises(InputError, match=r'^--draft-model=nowhere: no checkpoint in') as info:
        load_draft('nowhere', model)
    assert '--checkpoint' not in str(info.value)


def test_a_shorter_context_is_reported(workdir, model, tmp_path, capsys):
    context = model.config.model.max_positions
    make_start(tmp_path / 'run', workdir / 'tokenizer.json', model__max_positions=context // 2)
    with Console():
        load_draft(str(tmp_path / 'run'), model)
        assert f'a context of {context // 2:,} tokens, and the model one of {context:,}' in capsys.readouterr().out
        load_draft(str(workdir), model)
        assert 'context' not in capsys.readouterr().out


def test_devices_that_do_not_divide_the_heads(tmp_path):
    """The error would otherwise be one of the model."""
    for name, heads in {'model': 4, 'draft': 3}.items():
        keys = {'model__dim': 12, 'model__num_heads': heads, 'model__vocab_size': 257}
        config = small_config(**keys)
        write(tmp_path / name, config, random_params(config))
    model = load_model(str(tmp_path / 'model'), num_devices=2, share_layers=True)
    with pytest.raises(InputError, match=r'^--draft-model=.*draft: .*model\.num_heads=3'):
        load_draft(str(tmp_path / 'draft'), model, share_layers=True)
