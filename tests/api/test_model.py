"""`maxlm.Model`: the same text, losses and logits as the commands and Transformers."""

import dataclasses
import subprocess
import sys
import typing

import jax
import numpy as np
import pytest

import maxlm
from maxlm.api.sampling_options import SamplingOptions
from maxlm.cli.models import generate
from maxlm.data.chat.template import CHATML
from maxlm.data.tokenizer.tokenizer import bytes_tokenizer
from maxlm.errors import EXIT_DONE, InputError, exit_code
from maxlm.inference.sampling import Sampling
from tests.serving.fake_engine import chat_tokenizer
from tests.starting import make_start

TEXT = 'A license is a text.'


@pytest.fixture(scope='module')
def workdir(tmp_path_factory):
    folder = tmp_path_factory.mktemp('api')
    bytes_tokenizer().save(folder / 'tokenizer.json')
    make_start(folder / 'run', folder / 'tokenizer.json', data__seq_len=96)
    return folder / 'run'


@pytest.fixture(scope='module')
def model(workdir):
    return maxlm.load(workdir)


def test_it_describes_the_checkpoint(model):
    assert isinstance(model, maxlm.Model)
    assert (model.step, model.config.model.family, model.tokenizer.vocab_size) == (5, 'llama', 257)
    assert repr(model).startswith("Model('")
    num_parameters = sum(leaf.size for leaf in jax.tree.leaves(model.params))
    assert f': step 5, {num_parameters:,} parameters, context 96, ' in repr(model)


def test_sampling_options_are_the_fields_of_the_settings():
    fields = {field.name: field.type for field in dataclasses.fields(Sampling)}
    assert {name: hint.__name__ for name, hint in typing.get_type_hints(SamplingOptions).items()} == fields


def test_generation_equals_the_command(model, workdir, capsys):
    settings = ['--max-tokens=12', '--temperature=0.8', '--top-k=20', '--seed=3']
    assert exit_code(generate.main, [f'--checkpoint={workdir}', f'--prompt={TEXT}', *settings]) == EXIT_DONE
    text = model.generate(TEXT, max_tokens=12, temperature=0.8, top_k=20, seed=3)
    assert capsys.readouterr().out.rstrip('\n') == (TEXT + text).rstrip('\n')
    # Control: another seed gives another text.
    assert model.generate(TEXT, max_tokens=12, temperature=0.8, top_k=20, seed=4) != text


def test_a_stop_string_is_not_a_list_of_characters(model):
    settings = {'max_tokens': 24, 'temperature': 5.0, 'seed': 3}
    text = model.generate(TEXT, **settings)
    stop = text[5:8]
    before = text[: text.index(stop)]
    assert model.generate(TEXT, stop=stop, **settings) == model.generate(TEXT, stop=[stop], **settings) == before
    # Control: its characters occur earlier.
    assert len(model.generate(TEXT, stop=list(stop), **settings)) <= len(before)
    assert model.generate(TEXT, stop='', **settings) == text


def test_a_draft_model_does_not_change_the_text(model, workdir):
    drafting = maxlm.load(workdir, draft_model=workdir, num_draft_tokens=2)
    for settings in ({'temperature': 0}, {'temperature': 0.8, 'seed': 3}):
        assert drafting.generate(TEXT, max_tokens=12, **settings) == model.generate(TEXT, max_tokens=12, **settings)
    # The model accepts what it drafts itself: two of three tokens of each pass.
    state = drafting._engine.state
    assert state.draft_tokens == state.accepted_tokens > state.passes


def test_a_stream_yields_the_parts_of_the_continuation(model):
    parts = list(model.stream(TEXT, max_tokens=12, temperature=0))
    assert ''.join(parts) == model.generate(TEXT, max_tokens=12, temperature=0)
    # A stream that is not read to its end does not affect the next one.
    next(model.stream(TEXT, max_tokens=40))
    assert ''.join(model.stream(TEXT, max_tokens=12, temperature=0)) == ''.join(parts)


def test_the_loss_is_that_of_the_logits(model):
    ids = model.tokenizer.encode_batch([TEXT])[0]
    inputs = np.concatenate([[model.tokenizer.end_of_document], ids[:-1]])
    logits = model.logits(inputs)
    assert (logits.shape, logits.dtype) == ((len(ids), 257), np.float32)
    log_probs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    assert model.loss(TEXT) == pytest.approx(-log_probs[np.arange(len(ids)), ids].mean(), rel=1e-5)
    # Control: the loss of other targets.
    assert model.loss(TEXT) != pytest.approx(-log_probs[np.arange(len(ids)), ids[::-1]].mean(), rel=1e-3)


def test_the_module_computes_the_logits_from_the_parameters(model):
    ids = np.arange(96, dtype=np.int32)
    hidden, _, _ = model.module(ids[None])
    np.testing.assert_allclose((hidden[0] @ model.module.output_kernel())[:, :257], model.logits(ids), atol=1e-3)
    params = model.params
    assert params['blocks']['attention']['query']['kernel'].shape[0] == model.config.model.num_layers
    # Parameters can be changed without a change of the model.
    changed = {**params, 'embedding': 0 * params['embedding']}
    assert np.abs(changed['embedding']).max() == 0 < np.abs(model.params['embedding']).max()


def test_padding_does_not_change_logits(model):
    """65 tokens are padded to the context of 96, and 64 are not padded."""
    ids = np.arange(65) % 250
    np.testing.assert_allclose(model.logits(ids)[:64], model.logits(ids[:64]), atol=1e-5)
    assert np.abs(model.logits(ids)[:64] - model.logits(ids[::-1][:64])).max() > 1e-2


def test_a_saved_model_has_the_same_logits_and_loads_again(model, tmp_path):
    torch = pytest.importorskip('torch', reason="needs the extra 'dev'")
    transformers = pytest.importorskip('transformers', reason="needs the extra 'dev'")
    model.save_pretrained(tmp_path / 'hf', dtype='float32')
    ids = model.tokenizer.encode_batch([TEXT])[0]
    peer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / 'hf', dtype=torch.float32)
    expected = peer(torch.tensor(ids[None].astype(np.int64))).logits[0].detach().numpy()
    np.testing.assert_allclose(model.logits(ids), expected[:, :257], atol=1e-4)
    np.testing.assert_allclose(maxlm.load(tmp_path / 'hf').logits(ids), expected[:, :257], atol=1e-4)
    with pytest.raises(InputError, match='already exists'):
        model.save_pretrained(tmp_path / 'hf')


def test_a_chat_model_answers(tmp_path):
    chat_tokenizer().save(tmp_path / 'tokenizer.json')
    make_start(tmp_path / 'run', tmp_path / 'tokenizer.json', data__seq_len=96)
    (tmp_path / 'run/chat_template.jinja').write_text(CHATML)
    model = maxlm.load(tmp_path / 'run')
    messages = [{'role': 'user', 'content': 'Hi'}]
    answer = model.chat(messages, max_tokens=8, temperature=0)
    assert answer == ''.join(model.stream(messages, max_tokens=8, temperature=0))
    text = '<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n'
    settings = {'max_tokens': 8, 'temperature': 5.0, 'seed': 1}
    assert model.generate(text, parse_special=True, **settings) == model.chat(messages, **settings)
    # Control: by default, the names of the special tokens are text. The sampling key depends on the length.
    assert model.generate(text, **settings) != model.chat(messages, **settings)
    with pytest.raises(InputError, match='parse_special: applies to texts'):
        model.chat(messages, parse_special=True)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (
            lambda model: model.generate(TEXT, temperatur=0),
            "'temperatur' is not a sampling setting; use temperature, top_k",
        ),
        (lambda model: model.generate(TEXT, top_p=2), 'top_p=2: must be above 0'),
        (lambda model: model.generate(TEXT, max_tokens=900), 'the context length is 96'),
        (lambda model: model.generate(''), 'the prompt is empty'),
        (lambda model: model.chat([{'role': 'user', 'content': 'Hi'}]), 'chat_template'),
        (lambda model: model.loss(''), 'the text is empty'),
        (lambda model: model.logits([]), 'must be a sequence of 1 to 96 ids'),
        (lambda model: model.logits([1, 257]), 'found 1 to 257'),
        (lambda model: model.logits([1, 2**40]), 'found 1 to 1099511627776'),
        (lambda model: model.logits([1.5]), 'tokens of type float64: must be integers'),
        (lambda model: model.chat('Hi'), "messages='Hi': is a text; use generate"),
        (lambda model: model.generate(TEXT, top_k=2.5), 'top_k=2.5: must be an integer'),
        (lambda model: model.generate(TEXT, seed=0.5), 'seed=0.5: must be an integer'),
        (lambda model: model.generate(TEXT, max_tokens=None), 'max_tokens=None: must be an integer'),
        (lambda model: maxlm.load('nowhere'), 'nowhere'),
    ],
)
def test_wrong_arguments(model, call, message):
    with pytest.raises(InputError, match=message):
        call(model)


def test_importing_the_package_imports_nothing_else():
    program = (
        'import sys, maxlm; assert "load" in dir(maxlm); print([m for m in sys.modules if "jax" in m or "api" in m])'
    )
    done = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == '[]'
    with pytest.raises(AttributeError, match="no attribute 'lod'"):
        maxlm.__getattr__('lod')
