"""Tests which tokenizers llama.cpp supports, by their pre-tokenization and the token that starts a text."""

import json

import pytest

from maxlm.data.tokenizer.tokenizer import bytes_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.gguf.vocabulary import vocabulary
from tests.huggingface.sentencepiece_tokenizer import PIECES, REPLACE, sentencepiece_tokenizer

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r'\s+(?!\S)|\s+'
)
# Regular expressions from the tokenizer.json files of gpt-oss and DeepSeek-V3.
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
    r'\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
DEEPSEEK = (
    r'\p{N}{1,3}',
    '[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+',
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|"""
    '[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+',
)
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
    digits = {'type': 'Digits', 'individual_digits': True}
    steps = {'type': 'Sequence', 'pretokenizers': [digits, facts['pre_tokenizer']]}
    assert found(facts, pre_tokenizer=steps).split == 'starcoder'
    assert found(facts, **split_by(facts, O200K)).split == 'gpt-4o'
    deepseek = split_by(facts, DEEPSEEK[0])['pre_tokenizer']
    others = [split_by(facts, pattern)['pre_tokenizer']['pretokenizers'][0] for pattern in DEEPSEEK[1:]]
    deepseek['pretokenizers'][1:1] = others
    assert (
        found(facts, pre_tokenizer=deepseek, normalizer={'type': 'Sequence', 'normalizers': []}).split == 'deepseek-v3'
    )
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


def test_kinds_of_tokens(facts):
    added = {**facts['added_tokens'][0], 'id': 260, 'content': '<tool>', 'special': False}
    vocabulary_of = found(facts, added_tokens=[*facts['added_tokens'], added])
    assert [vocabulary_of.types[index] for index in (0, 1, 260, 261)] == [3, 1, 4, 5]
    assert (vocabulary_of.tokens[260], vocabulary_of.tokens[261]) == ('<tool>', '[PAD261]')


def sentencepiece(**changed):
    facts = sentencepiece_tokenizer()
    size = len(facts['model']['vocab']) + 2
    return vocabulary(json.dumps({**facts, **changed}), size, 'tokenizer.json')


def test_scores_follow_the_merges():
    found = sentencepiece()
    assert (found.model, found.unknown_id, found.merges) == ('llama', 0, [])
    assert [found.types[index] for index in (0, 1, 2, 3, 258, 259, -1)] == [2, 3, 3, 6, 6, 1, 5]
    scores = dict(zip(found.tokens, found.scores, strict=True))
    assert sorted(PIECES, key=lambda piece: -scores[piece]) == list(PIECES)
    assert max(scores[token] for token in ('<s>', 't', '[PAD285]') if token in scores) < min(map(scores.get, PIECES))


METASPACE = {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'first', 'split': False}
GEMMA_SPLIT = {'type': 'Split', 'pattern': {'String': ' '}, 'behavior': 'MergedWithPrevious', 'invert': False}


def test_spaces_before_texts():
    assert sentencepiece().add_space
    assert not sentencepiece(normalizer=REPLACE, pre_tokenizer=GEMMA_SPLIT).add_space
    assert sentencepiece(normalizer=None, pre_tokenizer=METASPACE).add_space


def test_added_tokens_of_spaces_are_merged():
    facts = sentencepiece_tokenizer()
    index = facts['model']['vocab']['▁▁']
    flags = {**facts['added_tokens'][0], 'special': False}
    added = [{**flags, 'id': index, 'content': '▁▁'}, {**flags, 'id': index + 1, 'content': 'he'}]
    found = sentencepiece(added_tokens=[*facts['added_tokens'], *added])
    assert (found.types[index], found.types[index + 1]) == (1, 4)


def changed_model(change):
    model = sentencepiece_tokenizer()['model']
    change(model)
    return {'model': model}


@pytest.mark.parametrize(
    'changed',
    [
        {'normalizer': None},
        {'normalizer': {'type': 'NFC'}},
        {'pre_tokenizer': {'type': 'Whitespace'}},
        {'normalizer': None, 'pre_tokenizer': {**METASPACE, 'split': True}},
        {'normalizer': None, 'pre_tokenizer': {**METASPACE, 'prepend_scheme': 'never'}},
        changed_model(lambda model: model.update(ignore_merges=True)),
        changed_model(lambda model: model['vocab'].pop('<0x41>')),
        # Trained BPE has one merge per token.
        changed_model(lambda model: model['merges'].remove(['▁', 'the'])),
        # Two priorities of one token.
        changed_model(lambda model: model['merges'].append(model['merges'].pop(5))),
    ],
)
def test_other_byte_fallback_is_refused(changed):
    with pytest.raises(InputError, match='only as converted from SentencePiece'):
        sentencepiece(**changed)
