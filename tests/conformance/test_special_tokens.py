"""Tests that the beginning and the end of a text are those of the files of a model."""

import json
import subprocess
import sys

import gguf
import numpy as np
import pytest
import torch
import transformers

import maxlm
from maxlm.config.schema import DataConfig
from maxlm.data.loader.dataset import check_same_tokenizer, open_training_data
from maxlm.data.tokenizer.extension import boundary_change
from maxlm.data.tokenizer.text_boundaries import BY_NAME, TEXT_BOUNDARIES_FILE, describe_boundaries
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.export_model import export_model
from maxlm.huggingface.gguf.export_gguf import export_gguf
from maxlm.huggingface.import_model import import_model
from maxlm.trainer.run_context import RunContext
from tests.conformance.special_tokens import ID, Files, make_library, write_model, write_tokenizer

BOS, EOS, TEXT_END, TURN_END = (ID[name] for name in ('<s>', '</s>', '<|endoftext|>', '<|im_end|>'))
FROM_BOS = (('<s>',), ())
ENDS = {
    # The name of the tokenizer's configuration, as text or as an object, wins over all others.
    'eos_token': (Files({'eos_token': '</s>'}), [EOS]),
    'object': (Files({'eos_token': {'content': '<|im_end|>', 'lstrip': False}}), [TURN_END]),
    'not special': (Files({'eos_token': '[EOS]'}), [ID['[EOS]']]),
    'eos_token and numbers': (
        Files({'eos_token': '</s>'}, generation_config={'eos_token_id': [TURN_END, EOS]}),
        [EOS, TURN_END],
    ),
    'map': (Files(special_tokens_map={'eos_token': '</s>'}), [EOS]),
    'configuration before map': (Files({'eos_token': '</s>'}, {'eos_token': '<|im_end|>'}), [EOS]),
    'null': (Files({'eos_token': None}, generation_config={'eos_token_id': EOS}), [EOS]),
    'number': (Files(generation_config={'eos_token_id': TURN_END}), [TURN_END]),
    'numbers': (Files(generation_config={'eos_token_id': [TURN_END, EOS]}), [TURN_END, EOS]),
    'number of the model': (Files(config={'model_type': 'llama', 'eos_token_id': TURN_END}), [TURN_END]),
    'numbers of the model': (Files(config={'model_type': 'llama', 'eos_token_id': [EOS, TURN_END]}), [EOS, TURN_END]),
    'text_config': (Files(config={'model_type': 'gemma3', 'text_config': {'eos_token_id': EOS}}), [EOS]),
    'model before text_config': (
        Files(config={'model_type': 'gemma3', 'eos_token_id': [EOS, TURN_END], 'text_config': {'eos_token_id': BOS}}),
        [EOS, TURN_END],
    ),
    'null in text_config': (
        Files(config={'model_type': 'gemma3', 'eos_token_id': EOS, 'text_config': {'eos_token_id': None}}),
        [EOS],
    ),
    'generation before model': (
        Files(generation_config={'eos_token_id': EOS}, config={'model_type': 'llama', 'eos_token_id': TURN_END}),
        [EOS],
    ),
    # Without a name, config classes have a default that may be any token.
    'default that is a letter': (Files(config={'model_type': 'llama', 'eos_token_id': 99}), [TEXT_END]),
    'default of a derived file': (
        Files(generation_config={'_from_model_config': True, 'eos_token_id': 99}),
        [TEXT_END],
    ),
    'letter beside a name': (
        Files({'eos_token': '</s>'}, config={'model_type': 'llama', 'eos_token_id': 99}),
        [EOS],
    ),
    'not special, only number': (
        Files(generation_config={'eos_token_id': ID['[EOS]']}, special=('<s>',)),
        [ID['[EOS]']],
    ),
    # These name no token.
    'unknown name': (Files({'eos_token': '<eos>'}), [TEXT_END]),
    'ids without a token': (Files(generation_config={'eos_token_id': [-1, 10**9]}), [TEXT_END]),
    'run': (Files(config={'model': {'eos_token_id': EOS}, 'eos_token_id': EOS}), [TEXT_END]),
    'no other file': (Files(), [TEXT_END]),
}
BEGINNINGS = {
    'none': (Files({'bos_token': '<s>'}), ()),
    'post-processor': (Files(post=FROM_BOS), (BOS,)),
    'post-processor with an end': (Files({'bos_token': '<s>'}, post=(('<s>',), ('</s>',))), (BOS,)),
    'only an end': (Files({'bos_token': '<s>'}, post=((), ('</s>',))), ()),
    'two tokens': (Files(post=(('<pre>', '<s>'), ()), special=('<|endoftext|>', '<s>', '<pre>')), (ID['<pre>'], BOS)),
    'flag': (Files({'bos_token': '<s>', 'add_bos_token': True}), (BOS,)),
    'flag and post-processor': (Files({'bos_token': '<s>', 'add_bos_token': True}, post=FROM_BOS), (BOS,)),
    'flag of another token': (Files({'bos_token': '<|im_end|>', 'add_bos_token': True}, post=FROM_BOS), (TURN_END,)),
    'switched off': (Files({'bos_token': '<s>', 'add_bos_token': False}, post=FROM_BOS), ()),
    'flag with a number': (Files({'add_bos_token': True}, generation_config={'bos_token_id': BOS}), (BOS,)),
    'flag with the number of the model': (
        Files({'add_bos_token': True}, config={'model_type': 'llama', 'bos_token_id': BOS}),
        (BOS,),
    ),
    'flag without a token': (Files({'add_bos_token': True}), ()),
    'null': (Files({'bos_token': None, 'add_bos_token': None}, post=FROM_BOS), (BOS,)),
}


@pytest.mark.parametrize('case', ENDS)
def test_end_of_text(tmp_path, case):
    files, expected = ENDS[case]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / 'a', files) / 'tokenizer.json')
    assert list(tokenizer.boundaries.stops) == expected
    assert tokenizer.end_of_document == expected[0]
    # A text never becomes the token.
    assert expected[0] not in tokenizer.encode_batch([tokenizer.special_tokens[expected[0]].content])[0]


@pytest.mark.parametrize('case', BEGINNINGS)
def test_beginning_of_text(tmp_path, case):
    files, expected = BEGINNINGS[case]
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / 'a', files) / 'tokenizer.json')
    assert tokenizer.beginning_of_document == expected
    assert bool(tokenizer.boundaries.beginning_source) == bool(expected)
    if 'flag' in case or case == 'switched off':
        # Transformers 5 ignores the key if there is a tokenizer.json; llama.cpp's converter and Transformers 4 do not.
        return
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / 'a' / 'tokenizer.json'))
    ids = theirs('ab')['input_ids']
    assert tuple(ids[: ids.index(theirs.convert_tokens_to_ids('a'))]) == expected


def test_sources_are_named(tmp_path):
    files = Files({'bos_token': '<s>', 'add_bos_token': True}, generation_config={'eos_token_id': EOS})
    boundaries = Tokenizer.load(write_tokenizer(tmp_path / 'a', files) / 'tokenizer.json').boundaries
    assert boundaries.end_source == 'generation_config.json: eos_token_id'
    assert boundaries.beginning_source == 'tokenizer_config.json: add_bos_token'
    assert Tokenizer(make_library(Files())).boundaries.end_source == BY_NAME


def test_an_unknown_end_is_reported(tmp_path):
    tokenizer = Tokenizer.load(write_tokenizer(tmp_path / 'a', Files({'eos_token': '<eot>'})) / 'tokenizer.json')
    assert tokenizer.boundaries.end == TEXT_END
    assert describe_boundaries(tokenizer.boundary_names) == {
        'end of text': '`<|endoftext|>` (the names in tokenizer.json, which lacks the eos_token <eot>)'
    }


def test_a_tokenizer_without_an_end_is_refused(tmp_path):
    path = write_tokenizer(tmp_path / 'a', Files(special=('<s>',))) / 'tokenizer.json'
    with pytest.raises(InputError, match=r'tokenizer\.json: the tokenizer has no token that ends a document; name it'):
        Tokenizer.load(path)


@pytest.mark.parametrize('content', ['{', '[]', 'null', '\xff'])
def test_damaged_files_are_refused(tmp_path, content):
    directory = write_tokenizer(tmp_path / 'a', Files())
    (directory / 'tokenizer_config.json').write_bytes(content.encode('latin-1'))
    with pytest.raises(InputError, match=r'tokenizer_config\.json: .*fix or replace the file'):
        Tokenizer.load(directory / 'tokenizer.json')


SAVED = {
    'truncation': {'truncation': {'direction': 'Right', 'max_length': 5, 'strategy': 'LongestFirst', 'stride': 0}},
    'padding': {
        'padding': {
            'strategy': {'Fixed': 50},
            'direction': 'Right',
            'pad_to_multiple_of': None,
            'pad_id': 0,
            'pad_type_id': 0,
            'pad_token': '<s>',
        }
    },
    'dropout': {'model': {'dropout': 0.9, 'vocab': None}},
}


@pytest.mark.parametrize('case', SAVED)
def test_saved_options_are_no_part_of_a_tokenizer(tmp_path, case):
    extra = json.loads(json.dumps(SAVED[case]))
    if case == 'dropout':
        del extra['model']['vocab']
    directory = write_tokenizer(tmp_path / 'a', Files(extra=extra))
    plain = write_tokenizer(tmp_path / 'b', Files())
    texts = ['hello world, this is a long document', 'x', '']
    ours, expected = (Tokenizer.load(path / 'tokenizer.json') for path in (directory, plain))
    for one, other in zip(ours.encode_batch(texts), expected.encode_batch(texts), strict=True):
        assert one.tolist() == other.tolist()
    assert ours.to_json() == expected.to_json()


def greedy(model_directory, text):
    """Returns the text that Transformers generates."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(model_directory)
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory)
    inputs = tokenizer(text, return_tensors='pt', return_token_type_ids=False)
    with torch.no_grad():
        output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return output[0, inputs['input_ids'].shape[1] :].tolist(), tokenizer


def loss(model_directory, ids, prefix):
    model = transformers.AutoModelForCausalLM.from_pretrained(model_directory)
    with torch.no_grad():
        logits = model(torch.tensor([[*prefix, *ids]])).logits[0, len(prefix) - 1 : -1]
    return float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids)))


@pytest.fixture(scope='module')
def imported(tmp_path_factory):
    """Returns the directories of a model whose tokenizer adds `<s>`, and of its import."""
    root = tmp_path_factory.mktemp('imported')
    files = Files({'eos_token': '</s>', 'bos_token': '<s>'}, generation_config={'eos_token_id': [EOS, TURN_END]})
    source = write_model(root / 'source', files._replace(post=FROM_BOS))
    import_model(str(source), str(root / 'workdir'), show=False)
    return source, root / 'workdir'


def test_an_import_continues_a_text_as_transformers_does(imported):
    source, workdir = imported
    model = maxlm.load(workdir)
    theirs, tokenizer = greedy(source, 'ab')
    stops = [place for place, index in enumerate(theirs) if index in (EOS, TURN_END)]
    expected = tokenizer.decode(theirs[: stops[0]] if stops else theirs)
    assert model.generate('ab', max_tokens=12, temperature=0) == expected
    ids = tokenizer('ab', add_special_tokens=False)['input_ids']
    assert model.loss('ab') == pytest.approx(loss(source, ids, [BOS]), abs=1e-4)
    # Control: without the beginning of text, the loss is another one.
    assert abs(model.loss('ab') - loss(source, ids, [EOS])) > 1e-2
    assert model.special_tokens['end_of_text'] == ['</s>', '<|im_end|>']
    assert model.special_tokens['beginning_of_text'] == ['<s>']
    assert model.special_tokens['end_of_text_source'] == 'tokenizer_config.json: eos_token'
    assert '<s>' in repr(model)


def test_an_export_has_the_same_boundaries(imported, tmp_path):
    _, workdir = imported
    export_model(
        str(workdir), str(tmp_path / 'export'), architecture='auto', dtype='float32', max_shard_size=10**9, show=False
    )
    for name in ('tokenizer_config.json', 'generation_config.json'):
        assert (tmp_path / 'export' / name).read_text() == (imported[0] / name).read_text()
    assert not (tmp_path / 'export' / TEXT_BOUNDARIES_FILE).exists()
    again = Tokenizer.load(tmp_path / 'export' / 'tokenizer.json').boundaries
    assert again == Tokenizer.load(workdir / 'tokenizer.json').boundaries
    ids = transformers.AutoTokenizer.from_pretrained(tmp_path / 'export')('ab')['input_ids']
    assert ids[0] == BOS
    assert 'tokenizer_config.json: eos_token' in (tmp_path / 'export' / 'README.md').read_text()


def test_other_boundaries_than_those_of_the_initial_model_are_named(tmp_path):
    old, new = (
        Tokenizer.load(write_tokenizer(tmp_path / name, files) / 'tokenizer.json')
        for name, files in {'old': Files({'eos_token': '</s>'}, post=FROM_BOS), 'new': Files()}.items()
    )
    assert boundary_change(new, old) == 'end of text <|endoftext|>, not </s>; beginning of text none, not <s>'
    assert boundary_change(old, old) == ''


def test_mixtures_need_equal_boundaries(tmp_path):
    first, *others = [
        prepared(tmp_path / name, write_tokenizer(tmp_path / f'{name}-tokenizer', Files(config)), 'ab').manifest
        for name, config in {
            'a': {'eos_token': '</s>', 'bos_token': '<s>', 'add_bos_token': True},
            'b': {'eos_token': '<|im_end|>', 'bos_token': '<s>', 'add_bos_token': True},
            'c': {'eos_token': '</s>', 'bos_token': '<|im_end|>', 'add_bos_token': True},
            'none': {'eos_token': '</s>'},
        }.items()
    ]
    for other in others:
        if other.path.name == 'none':
            # Data sets of earlier versions have no beginning of text.
            check_same_tokenizer(first, other)
            continue
        with pytest.raises(InputError, match='begin or end documents with different tokens; prepare one with'):
            check_same_tokenizer(first, other)


def prepared(directory, tokenizer, text):
    (directory.parent / 'text.jsonl').write_text(json.dumps({'text': text}) + '\n' + json.dumps({'text': 'x'}) + '\n')
    arguments = ['--input', str(directory.parent / 'text.jsonl'), '--output', str(directory)]
    command = [sys.executable, '-m', 'maxlm.prepare', *arguments, '--tokenizer', str(tokenizer / 'tokenizer.json')]
    subprocess.run([*command, '--validation-fraction=0', '--quiet'], check=True, capture_output=True)
    return maxlm.Dataset.open(directory)


@pytest.mark.parametrize(
    ('named', 'kept'),
    [
        ({'bos_token': '<s>', 'eos_token': '</s>'}, ''),
        ({'bos_token': {'__type': 'AddedToken', 'content': '<s>'}, 'eos_token': '</s>'}, ''),
        # Transformers renders `bos_token` as an empty text.
        ({'eos_token': '</s>', 'unk_token': '<unk>'}, ''),
        # Transformers would render an empty text where `text_boundaries.json` names a token.
        ({'bos_token': '<s>'}, '{%- set eos_token = "<|endoftext|>" %}\n'),
    ],
)
def test_exports_have_the_template_and_all_ends(tmp_path, named, kept):
    template = '{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}{{ pad_token }}'
    ends = {'eos_token_id': [ID['<|endoftext|>'], ID['</s>'], ID['<|im_end|>']]}
    source = write_model(tmp_path / 'source', Files(tokenizer_config=named, generation_config=ends))
    (source / 'chat_template.jinja').write_text(template)
    import_model(str(source), str(tmp_path / 'workdir'), show=False)
    settings = {'architecture': 'auto', 'dtype': 'auto', 'max_shard_size': 10**9, 'show': False}
    export_model(str(tmp_path / 'workdir'), str(tmp_path / 'export'), **settings)
    assert (tmp_path / 'workdir/chat_template.jinja').read_text() != template
    assert (tmp_path / 'export/chat_template.jinja').read_text() == kept + template
    chat = [{'role': 'user', 'content': 'a'}]
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / 'export')
    if not kept:
        theirs = transformers.AutoTokenizer.from_pretrained(source)
        assert again.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    export_gguf(str(tmp_path / 'workdir'), str(tmp_path / 'model.gguf'), dtype='f32', show=False)
    keys = gguf.GGUFReader(tmp_path / 'model.gguf').fields
    written = [keys[f'tokenizer.ggml.{key}_token_id'].contents() for key in ('eos', 'eot', 'eom')]
    assert written == ends['eos_token_id']


@pytest.mark.parametrize('has_several', [False, True])
def test_an_export_keeps_templates_in_the_tokenizer_config(tmp_path, has_several):
    templates = [{'name': 'default', 'template': '{{ messages[0].content + eos_token }}'}]
    templates.append({'name': 'tool_use', 'template': 'with tools'})
    named = {'eos_token': '</s>', 'chat_template': templates if has_several else templates[0]['template']}
    source = write_model(tmp_path / 'source', Files(tokenizer_config=named))
    import_model(str(source), str(tmp_path / 'workdir'), show=False)
    settings = {'architecture': 'auto', 'dtype': 'auto', 'max_shard_size': 10**9, 'show': False}
    export_model(str(tmp_path / 'workdir'), str(tmp_path / 'export'), **settings)
    theirs, ours = map(transformers.AutoTokenizer.from_pretrained, (source, tmp_path / 'export'))
    assert ours.chat_template == theirs.chat_template
    assert isinstance(ours.chat_template, dict) == has_several
    chat, tool = [{'role': 'user', 'content': 'a'}], {'type': 'function', 'function': {'name': 'f'}}
    rendered = ours.apply_chat_template(chat, tools=[tool], tokenize=False)
    assert rendered == ('with tools' if has_several else 'a</s>')


def test_prepared_documents_begin_and_end_as_the_files_say(imported, tmp_path):
    source, workdir = imported
    expected = transformers.AutoTokenizer.from_pretrained(source)('ab')['input_ids'] + [EOS, BOS]
    streams = []
    for tokenizer in (source, workdir):
        dataset = prepared(tmp_path / tokenizer.name, tokenizer, 'ab')
        assert dataset.manifest.end_of_document == EOS
        assert dataset.manifest.beginning_of_document == (BOS,)
        # A run copies the file from the data set.
        assert Tokenizer.load(dataset.manifest.tokenizer_path).boundaries.stops == (EOS, TURN_END)
        (shard,) = dataset.manifest.splits['train'].shards
        from maxlm.data.dataset.token_reader import TokenReader

        reader = TokenReader(dataset.manifest, (shard,))
        streams.append(np.asarray(reader.read(0, 0, shard.tokens)).tolist())
    assert streams[0] == streams[1]
    assert streams[0][: len(expected)] == expected


def test_data_sets_of_earlier_versions_keep_their_boundaries(tmp_path):
    """A data set without boundaries has documents without a beginning, which end with a token found by name."""
    directory = write_tokenizer(tmp_path / 'a', Files(post=FROM_BOS))
    assert Tokenizer.load(directory / 'tokenizer.json').beginning_of_document == (BOS,)
    (directory / 'dataset.json').write_text('{}')
    assert Tokenizer.load(directory / 'tokenizer.json').boundaries == ((TEXT_END, (TEXT_END,), (), BY_NAME, ''))


def test_a_mixture_needs_documents_with_the_same_end(tmp_path):
    directories = []
    for name, files in {'a': Files({'eos_token': '</s>'}), 'b': Files({'eos_token': '<|im_end|>'})}.items():
        tokenizer = write_tokenizer(tmp_path / f'tokenizer-{name}', files)
        directories.append(prepared(tmp_path / name, tokenizer, 'ab').manifest.path)
    data = DataConfig(sources=tuple((str(path), 1.0) for path in directories), seq_len=4)
    with pytest.raises(InputError, match='begin or end documents with different tokens'):
        open_training_data(data)
    # Control: either data set alone is usable.
    assert open_training_data(DataConfig(path=str(directories[1]), seq_len=4)).first.end_of_document == TURN_END


@pytest.mark.parametrize('same', [True, False])
def test_a_run_keeps_the_files_of_its_initial_model(imported, tmp_path, same):
    source, workdir = imported
    for name in ('tokenizer.json', TEXT_BOUNDARIES_FILE):
        (tmp_path / name).write_bytes((workdir / name).read_bytes())
    if not same:
        (tmp_path / TEXT_BOUNDARIES_FILE).write_text('{}')
    context = RunContext(tmp_path, tmp_path, None, None)
    context._keep_original(str(workdir))
    for name in ('tokenizer_config.json', 'generation_config.json'):
        assert (tmp_path / name).exists() == same
        assert not same or (tmp_path / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / 'hf_config.json').read_bytes() == (workdir / 'hf_config.json').read_bytes()
    # A run whose initial model was deleted continues.
    context._keep_original(str(tmp_path / 'missing'))
