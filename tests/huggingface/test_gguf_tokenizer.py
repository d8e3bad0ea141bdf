"""Tests which tokenizers llama.cpp supports, by their pre-tokenization and the token that starts a text."""

import json

import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.gguf_tokenizer import vocabulary

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r'\s+(?!\S)|\s+'
)
BEGIN = {'SpecialToken': {'id': '<|endoftext|>', 'type_id': 0}}
TEXT = {'Sequence': {'id': 'A', 'type_id': 0}}


@pytest.fixture(scope='module')
def facts():
    return json.loads(train_bpe(['to be or not to be'], 260).to_json())


def found(facts, **changed):
    return vocabulary(json.dumps({**facts, **changed}), 262, 'tokenizer.json')


def split_by(facts, pattern, **changed):
    first = {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False, **changed}
    steps = [first, {**facts['pre_tokenizer'], 'use_regex': False}]
    return {'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': steps}}


def test_supported_splits(facts):
    assert found(facts).split == 'gpt-2'
    assert found(facts, **split_by(facts, LLAMA3)).split == 'llama-bpe'
    qwen = split_by(facts, LLAMA3.replace('{1,3}', ''))
    assert found(facts, **qwen, normalizer={'type': 'NFC'}).split == 'qwen2'
    # Without merges, the split into words has no effect.
    assert json.loads(bytes_tokenizer().to_json())['pre_tokenizer']['use_regex'] is False
    assert vocabulary(bytes_tokenizer().to_json(), 257, 'tokenizer.json').split == 'gpt-2'


@pytest.mark.parametrize('changed', ['pattern', 'behavior', 'words', 'blank', 'normalizer', 'none'])
def test_unsupported_splits(facts, changed):
    settings = {
        'pattern': split_by(facts, LLAMA3.replace('{1,3}', '{1,2}')),
        'behavior': split_by(facts, LLAMA3, behavior='Removed'),
        'words': {'pre_tokenizer': {**facts['pre_tokenizer'], 'use_regex': False}},
        'blank': {'pre_tokenizer': {**facts['pre_tokenizer'], 'add_prefix_space': True}},
        'normalizer': {'normalizer': {'type': 'Lowercase'}},
        'none': {'pre_tokenizer': None},
    }[changed]
    with pytest.raises(InputError, match='does not support the pre-tokenizer'):
        found(facts, **settings)


def test_tokens_that_start_a_text(facts):
    template = {'type': 'TemplateProcessing', 'single': [BEGIN, TEXT]}
    assert found(facts, post_processor={'type': 'Sequence', 'processors': [{'type': 'ByteLevel'}, template]}).add_bos
    assert not found(facts, post_processor={**template, 'single': [TEXT]}).add_bos
    assert not found(facts).add_bos


def test_kinds_of_tokens(facts):
    added = {**facts['added_tokens'][0], 'id': 260, 'content': '<tool>', 'special': False}
    vocabulary_of = found(facts, added_tokens=[*facts['added_tokens'], added])
    assert [vocabulary_of.types[index] for index in (0, 1, 260, 261)] == [3, 1, 4, 5]
    assert (vocabulary_of.tokens[260], vocabulary_of.tokens[261]) == ('<tool>', '[PAD261]')


def test_byte_fallback_is_refused(facts):
    with pytest.raises(InputError, match='BPE with byte_fallback'):
        found(facts, model={**facts['model'], 'byte_fallback': True})
