"""Tests that AutoTokenizer gives the ids and texts of maxlm's tokenizers, and that imported files are kept."""

import json
import shutil

import pytest
import tokenizers
import transformers
from tokenizers import processors

from maxlm.data.chat.encoder import ChatEncoder
from maxlm.data.chat.template import CHATML, ChatTemplate
from maxlm.data.tokenizer.tokenizer import END_OF_DOCUMENT, Tokenizer, bytes_tokenizer, chars_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.architectures.table import ARCHITECTURES
from maxlm.huggingface.config_conversion import choose_architecture, to_config
from maxlm.huggingface.tokenizer_files import files_for_export, files_for_import
from maxlm.workdir.files import EXPORT_FILES
from tests.conftest import ROOT
from tests.huggingface.expert_models import EXPERT_MODELS
from tests.huggingface.test_state_dict import random_model
from tests.small import small_config

LICENSE = (ROOT / 'LICENSE').read_text()
TOKENIZERS = {
    'bytes': bytes_tokenizer(),
    'chars': chars_tokenizer([LICENSE]),
    'bpe': train_bpe([LICENSE], 400),
}
TEXTS = [
    LICENSE[:3000],
    "  two  spaces , and . marks\n\n\tI 'm  don't ",
    'é 漢字 🦙 \x00 \x7f',
    f'before {END_OF_DOCUMENT} after',
    END_OF_DOCUMENT,
    '',
]
MODEL = small_config(model__family='llama').model


def exported(tmp_path, tokenizer, kind='llama', **files):
    """Returns the directory of an export without weights."""
    workdir, output = tmp_path / 'workdir', tmp_path / 'output'
    for folder in (workdir, output):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
    tokenizer.save(workdir / 'tokenizer.json')
    for name, content in files.items():
        (workdir / name.replace('__', '.')).write_text(json.dumps(content))
    text = files_for_export(workdir, MODEL)
    for name, content in text.files.items():
        (output / name).write_bytes(content)
    model = random_model(f'{kind} with experts' if kind in EXPERT_MODELS else kind, 0)
    (output / 'config.json').write_text(json.dumps({**to_config(model, kind), **text.ids}))
    return output


@pytest.mark.parametrize('kind', ARCHITECTURES)
@pytest.mark.parametrize('name', TOKENIZERS)
def test_ids_equal_transformers(tmp_path, name, kind):
    tokenizer = TOKENIZERS[name]
    # For Qwen2, AutoTokenizer ignores the class in tokenizer_config.json.
    loader = transformers.PreTrainedTokenizerFast if kind == 'qwen2' else transformers.AutoTokenizer
    theirs = loader.from_pretrained(exported(tmp_path, tokenizer, kind))
    ours = [ids.tolist() for ids in tokenizer.encode_batch(TEXTS)]
    assert theirs(TEXTS)['input_ids'] == ours
    assert [theirs.decode(ids) for ids in ours] == [tokenizer.decode(ids) for ids in ours]
    assert len(theirs) == tokenizer.vocab_size
    assert theirs.eos_token_id == theirs.bos_token_id == tokenizer.end_of_document
    assert theirs.decode([theirs.eos_token_id]) == END_OF_DOCUMENT
    assert theirs.pad_token == END_OF_DOCUMENT
    batch = theirs(TEXTS, padding=True)
    assert {len(ids) for ids in batch['input_ids']} == {max(map(len, ours))}
    real = [[i for i, m in zip(*row, strict=True) if m] for row in zip(*batch.values(), strict=True)]
    assert real == ours
    # The inputs that `generate` accepts.
    assert set(theirs(TEXTS)) == {'input_ids', 'attention_mask'}
    # Control: tokenizer.json alone parses special tokens in texts.
    (tmp_path / 'output' / 'tokenizer_config.json').unlink()
    plain = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / 'output')
    assert plain(TEXTS)['input_ids'] != ours


def test_end_ids_of_texts(tmp_path):
    output = exported(tmp_path, TOKENIZERS['bpe'])
    end = TOKENIZERS['bpe'].end_of_document
    generation = transformers.GenerationConfig.from_pretrained(output)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (end, end, end)
    config = transformers.AutoConfig.from_pretrained(output)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (end, end, None)


def test_without_a_tokenizer_there_are_no_ids(tmp_path):
    text = files_for_export(tmp_path, MODEL)
    assert text.ids == {'bos_token_id': None, 'eos_token_id': None, 'pad_token_id': None}
    assert set(text.files) == {'generation_config.json'}
    # The ids must be given, since the default is the id of another tokenizer.
    assert transformers.AutoConfig.for_model(**to_config(MODEL)).eos_token_id == 2
    assert transformers.AutoConfig.for_model(**to_config(MODEL), **text.ids).eos_token_id is None


def test_kept_files_are_written_unchanged(tmp_path):
    kept = {
        'tokenizer_config__json': {'eos_token': {'content': 'the'}, 'pad_token': END_OF_DOCUMENT, 'mine': 1},
        'generation_config__json': {'eos_token_id': [3, 4], 'temperature': 0.5},
        'special_tokens_map__json': {'eos_token': 'the'},
    }
    output = exported(tmp_path, TOKENIZERS['bpe'], **kept)
    for name, content in kept.items():
        assert json.loads((output / name.replace('__', '.')).read_text()) == content
    config = json.loads((output / 'config.json').read_text())
    # The end ids come from the generation config and the padding id from the tokenizer; there is no start id.
    assert config['eos_token_id'] == [3, 4]
    assert config['pad_token_id'] == TOKENIZERS['bpe'].end_of_document
    assert config['bos_token_id'] is None


def test_ids_of_a_kept_tokenizer_config(tmp_path):
    output = exported(tmp_path, TOKENIZERS['bpe'], tokenizer_config__json={'eos_token': {'content': 'e'}})
    index = tokenizers.Tokenizer.from_file(str(output / 'tokenizer.json')).token_to_id('e')
    generation = json.loads((output / 'generation_config.json').read_text())
    assert generation == {'bos_token_id': None, 'eos_token_id': index, 'pad_token_id': index}


def test_a_damaged_kept_file(tmp_path):
    (tmp_path / 'generation_config.json').write_text('{')
    with pytest.raises(InputError, match=r'generation_config\.json: not valid JSON'):
        files_for_export(tmp_path, MODEL)


# --- files kept by an import


@pytest.fixture
def model_directory(tmp_path):
    directory = tmp_path / 'input'
    directory.mkdir()
    TOKENIZERS['bpe'].save(directory / 'tokenizer.json')
    for name in EXPORT_FILES:
        (directory / name).write_text('{"a": 1}')
    (directory / 'modeling_x.py').write_text('print(1)')
    return directory


def test_files_of_an_import(model_directory):
    files, remark, _ = files_for_import(model_directory)
    assert set(files) == {*EXPORT_FILES, 'tokenizer.json', 'text_boundaries.json'}
    assert remark == ''
    # The tokenizer is stored in the format of maxlm prepare, whatever the format of the file.
    path = model_directory / 'tokenizer.json'
    path.write_text(json.dumps(json.loads(path.read_text())))
    assert path.read_bytes() != files['tokenizer.json']
    assert files_for_import(model_directory).files['tokenizer.json'] == files['tokenizer.json']


@pytest.mark.parametrize(
    ('found', 'parts'),
    [
        ([], ['has no tokenizer.json', 'generate']),
        (['tokenizer.model'], ['has tokenizer.model but no tokenizer.json', 'save_pretrained']),
        (['vocab.json', 'merges.txt'], ['has vocab.json but no tokenizer.json', 'save_pretrained']),
    ],
)
def test_a_missing_tokenizer_json_gives_a_remark(model_directory, found, parts):
    (model_directory / 'tokenizer.json').unlink()
    for name in found:
        (model_directory / name).write_text('x')
    files, remark, _ = files_for_import(model_directory)
    assert 'tokenizer.json' not in files
    for part in [str(model_directory), *parts]:
        assert part in remark


def test_a_tokenizer_that_maxlm_cannot_use_is_kept_with_a_remark(model_directory):
    path = model_directory / 'tokenizer.json'
    content = path.read_bytes().replace(END_OF_DOCUMENT.encode(), b'<|begin|>')
    path.write_bytes(content)
    files, remark, _ = files_for_import(model_directory)
    assert files['tokenizer.json'] == content
    assert 'ends a document' in remark
    # The export contains no ids, since they are unknown.
    shutil.rmtree(model_directory)
    model_directory.mkdir()
    path.write_bytes(content)
    assert set(files_for_export(model_directory, MODEL).ids.values()) == {None}


@pytest.mark.parametrize('name', ['tokenizer.json', 'tokenizer_config.json', 'generation_config.json'])
def test_a_damaged_file(model_directory, name):
    (model_directory / name).write_text('[')
    with pytest.raises(InputError, match=rf'{name}(: not valid JSON| is not a tokenizer\.json)'):
        files_for_import(model_directory)


def test_an_imported_tokenizer_keeps_its_rules(model_directory, tmp_path):
    # This tokenizer prepends a token to each text, as Llama's does. Its config keeps this rule, and its ids stay the
    # same.
    library = tokenizers.Tokenizer.from_file(str(model_directory / 'tokenizer.json'))
    library.post_processor = processors.TemplateProcessing(
        single=f'{END_OF_DOCUMENT} $A', special_tokens=[(END_OF_DOCUMENT, 0)]
    )
    library.save(str(model_directory / 'tokenizer.json'))
    settings = {'tokenizer_class': 'PreTrainedTokenizerFast', 'eos_token': END_OF_DOCUMENT}
    (model_directory / 'tokenizer_config.json').write_text(json.dumps(settings))
    (model_directory / 'special_tokens_map.json').write_text('{}')
    original = transformers.AutoTokenizer.from_pretrained(model_directory)
    files = files_for_import(model_directory).files
    kept = {name.replace('.', '__'): json.loads(files[name]) for name in EXPORT_FILES if name.endswith('.json')}
    (tmp_path / 'tokenizer.json').write_bytes(files['tokenizer.json'])
    output = exported(tmp_path, Tokenizer.load(tmp_path / 'tokenizer.json'), **kept)
    again = transformers.AutoTokenizer.from_pretrained(output)
    assert again(TEXTS)['input_ids'] == original(TEXTS)['input_ids']
    assert again('x')['input_ids'][0] == 0


def test_the_models_of_this_file_are_llama():
    assert choose_architecture(MODEL).model_type == 'llama'


def test_conversations_are_encoded_with_special_tokens(tmp_path):
    tokenizer = TOKENIZERS['bpe'].with_special_tokens(['<|im_start|>', '<|im_end|>'])
    messages = [{'role': 'user', 'content': 'a'}, {'role': 'assistant', 'content': 'b'}]
    output = exported(tmp_path, tokenizer)
    (tmp_path / 'workdir' / 'chat_template.jinja').write_text(CHATML)
    for name, content in files_for_export(tmp_path / 'workdir', MODEL).files.items():
        (output / name).write_bytes(content)
    theirs = transformers.AutoTokenizer.from_pretrained(output)
    chat = ChatEncoder(tokenizer, ChatTemplate(CHATML, name='chatml'))
    ours = [*chat.encode_prompt(messages).tolist()]
    prompt = theirs.apply_chat_template(messages, add_generation_prompt=True)
    assert (prompt if isinstance(prompt, list) else prompt['input_ids']) == ours
    assert chat.end_of_turn in ours


CHAT = TOKENIZERS['bpe'].with_special_tokens(['<|im_start|>', '<|im_end|>'])
END, END_OF_TURN = CHAT.end_of_document, CHAT.vocab_size - 1


@pytest.mark.parametrize(
    ('kept', 'ends'),
    [
        (None, [END, END_OF_TURN]),
        ({'eos_token_id': END, 'a': 1}, [END, END_OF_TURN]),
        ({'eos_token_id': [7, END]}, [7, END, END_OF_TURN]),
        # Without an end id, the tokenizer's counts.
        ({'temperature': 0.5}, [END, END_OF_TURN]),
        ({}, [END, END_OF_TURN]),
    ],
)
def test_a_turn_ends_generation_too(tmp_path, kept, ends):
    workdir = tmp_path / 'workdir'
    kept_files = {} if kept is None else {'generation_config__json': kept}
    before = json.loads((exported(tmp_path, CHAT, **kept_files) / 'generation_config.json').read_text())
    # Control: without a chat template, only the end of a document ends generation.
    assert before == ({'bos_token_id': END, 'eos_token_id': END, 'pad_token_id': END} if kept is None else kept)
    (workdir / 'chat_template.jinja').write_text(CHATML)
    text = files_for_export(workdir, MODEL)
    assert text.ids['eos_token_id'] == ends
    assert json.loads(text.files['generation_config.json']) == {**before, 'eos_token_id': ends}
    assert text.files['chat_template.jinja'] == CHATML.encode()
    # A config that lists the end of turn is unchanged byte for byte; the id stays with another kind of template.
    listed = json.dumps({'eos_token_id': [END_OF_TURN], 'a': 1})
    (workdir / 'generation_config.json').write_text(listed)
    assert files_for_export(workdir, MODEL).files['generation_config.json'] == listed.encode()
    (workdir / 'generation_config.json').write_text('{"eos_token_id": 3}')
    (workdir / 'chat_template.jinja').write_text('{% for m in messages %}{{ m.content }}{% endfor %}')
    assert files_for_export(workdir, MODEL).ids['eos_token_id'] == 3


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role + ':' + m.content + '<|im_end|>' }}{% endfor %}"
TEMPLATE += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"


@pytest.mark.parametrize('place', ['file', 'config', 'list'])
def test_an_import_keeps_a_template_with_its_variables(model_directory, tmp_path, place):
    CHAT.save(model_directory / 'tokenizer.json')
    config = {'tokenizer_class': 'PreTrainedTokenizerFast', 'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>'}
    (model_directory / 'chat_template.jinja').unlink()
    (model_directory / 'special_tokens_map.json').unlink()
    if place == 'file':
        (model_directory / 'chat_template.jinja').write_text(TEMPLATE)
    else:
        listed = [{'name': 'tools', 'template': 'no'}, {'name': 'default', 'template': TEMPLATE}]
        config['chat_template'] = TEMPLATE if place == 'config' else listed
    (model_directory / 'tokenizer_config.json').write_text(json.dumps(config))
    messages = [{'role': 'user', 'content': 'a b'}]
    expected = transformers.AutoTokenizer.from_pretrained(model_directory).apply_chat_template(
        messages, add_generation_prompt=True, tokenize=False
    )
    files, remark, _ = files_for_import(model_directory)
    assert remark == ''
    workdir = tmp_path / 'imported'
    workdir.mkdir()
    for name, content in files.items():
        (workdir / name).write_bytes(content)
    chat = ChatEncoder.load(workdir)
    assert chat.tokenizer.decode(chat.encode_prompt(messages)) == expected == '<|im_start|>user:a b<|im_end|>assistant:'
    assert chat.end_of_turn == END_OF_TURN
    # The import is exported again.
    output = tmp_path / 'again'
    output.mkdir()
    for name, content in files_for_export(workdir, MODEL).files.items():
        (output / name).write_bytes(content)
    (output / 'config.json').write_text(json.dumps(to_config(random_model('llama', 0), 'llama')))
    again = transformers.AutoTokenizer.from_pretrained(output)
    assert again.apply_chat_template(messages, add_generation_prompt=True, tokenize=False) == expected


def test_an_unusable_template_is_kept_unchanged(model_directory):
    (model_directory / 'chat_template.jinja').write_text('{% if %}')
    files, remark, _ = files_for_import(model_directory)
    assert (files['chat_template.jinja'], remark) == (b'{% if %}', '')


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('tokenizer_config.json', {'eos_token': 5}, 'eos_token=5: must be the text of a token or null'),
        ('tokenizer_config.json', {'eos_token': {'content': 5}}, 'must be the text of a token or null'),
        ('tokenizer_config.json', {'bos_token': []}, r'bos_token=\[\]: must be the text of a token or null'),
        ('tokenizer_config.json', {'add_bos_token': 'yes'}, "add_bos_token='yes': must be true, false or null"),
        ('special_tokens_map.json', {'eos_token': 7}, 'eos_token=7: must be the text of a token or null'),
    ],
)
def test_odd_tokens_are_errors(model_directory, name, content, message):
    (model_directory / name).write_text(json.dumps(content))
    for load in (lambda: files_for_import(model_directory), lambda: Tokenizer.load(model_directory / 'tokenizer.json')):
        with pytest.raises(InputError, match=message) as info:
            load()
        assert str(model_directory / name) in str(info.value)


@pytest.mark.parametrize('value', ['1', 1.5, True, ['a'], [[1]], -2, list(range(65))])
def test_odd_ids_are_errors_at_use(model_directory, value):
    for name in ('generation_config.json', 'config.json'):
        path = model_directory / name
        path.write_text(json.dumps({'model_type': 'llama', 'eos_token_id': value}))
        with pytest.raises(InputError, match=r'eos_token_id=.*: must be an integer from -1 to'):
            Tokenizer.load(model_directory / 'tokenizer.json')
        path.unlink()


def test_ids_without_a_token_are_logged(model_directory, caplog):
    (model_directory / 'generation_config.json').write_text(json.dumps({'eos_token_id': [0, -1, 10**9]}))
    with caplog.at_level('WARNING', logger='maxlm'):
        files_for_import(model_directory)
    (message,) = caplog.messages
    assert 'generation_config.json: eos_token_id: -1, 1000000000 is not the id of a token and is ignored' in message


def test_many_stored_ends_are_an_error(model_directory):
    stored = {'end': 0, 'stops': [0] * 257, 'beginning': [], 'end_source': '', 'beginning_source': ''}
    (model_directory / 'text_boundaries.json').write_text(json.dumps(stored))
    with pytest.raises(InputError, match=r'text_boundaries\.json is damaged or of another tokenizer \(258 ids\)'):
        Tokenizer.load(model_directory / 'tokenizer.json')
