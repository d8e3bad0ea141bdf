"""Tests the limits of tokenizer files: hostile files are one-line errors, published steps load."""

import json

import pytest
import tokenizers
from tokenizers import normalizers

from maxlm.data.tokenizer.limits import expansion
from maxlm.data.tokenizer.limits.expansion import check_limits, expansion_factor
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.tokenizer_files import files_for_import
from tests.data.tokenizer.hostile_files import (
    ACCEPTED,
    CHARACTERS,
    REJECTED,
    A,
    X,
    charsmap,
    decoders,
    load,
    template,
    tokenizer_file,
)
from tests.messages import input_error


@pytest.mark.parametrize('name', REJECTED)
def test_hostile_files_are_one_line_errors(name):
    facts, message = REJECTED[name]
    with pytest.raises(InputError) as info:
        load(facts)
    assert message in str(info.value)
    assert '\n' not in str(info.value)
    assert len(str(info.value)) < 500


@pytest.mark.parametrize('name', ['sequence of replacements', 'exponential time', 'decoders'])
def test_an_import_rejects_hostile_files(tmp_path, name):
    facts, message = REJECTED[name]
    (tmp_path / 'tokenizer.json').write_text(json.dumps(facts))
    with input_error(message):
        files_for_import(tmp_path)


@pytest.mark.parametrize('name', ACCEPTED)
def test_steps_of_published_tokenizers_load(name):
    facts = tokenizer_file(**ACCEPTED[name])
    if 'Precompiled' in json.dumps(facts):
        # The map is not a valid trie, so only the limits are checked.
        check_limits(facts)
        return
    assert len(load(facts).encode_batch(['a 12 a'])[0])


@pytest.mark.parametrize('part', ['normalizer', 'pre_tokenizer', 'decoder', 'post_processor', 'model', 'added_tokens'])
@pytest.mark.parametrize('value', [3, 'x', [], [3], {}, {'type': 'Sequence'}, {'type': 3}, True])
def test_parts_of_other_types_are_one_line_errors(part, value):
    with input_error():
        load({**tokenizer_file(), part: value})


def test_normalizers_expand_no_more_than_their_factors():
    texts = ['ﷺ', 'İ', 'ΐ', '\U0001d160', 'ü', '一', 'a', 'ŉ', 'ﬃ', '㌖', 'Ⱥ']
    for kind, factor in expansion._NORMALIZERS.items():
        if isinstance(factor, float):
            normalizer = getattr(normalizers, kind)()
            grown = max(len(normalizer.normalize_str(text).encode()) / len(text.encode()) for text in texts)
            assert grown <= factor, (kind, grown)
    assert expansion._factor('normalizer', charsmap(64, b'ab', b'abc')) == 3


def test_the_factor_of_a_loaded_tokenizer():
    assert expansion_factor(load(tokenizer_file())._library) == 1
    assert expansion_factor(load(tokenizer_file(**ACCEPTED['Llama 2']))._library) == 12
    assert expansion_factor(load(tokenizer_file(**ACCEPTED['Falcon']))._library) == 2


def test_many_ids_before_a_text_are_an_error(tmp_path):
    for ids in (64, 65):
        (tmp_path / 'tokenizer.json').write_text(json.dumps(tokenizer_file(post_processor=template([X, A], ids=ids))))
        if ids == 64:
            assert len(Tokenizer.load(tmp_path / 'tokenizer.json').beginning_of_document) == 64
    with pytest.raises(InputError, match='puts 65 tokens before a text'):
        Tokenizer.load(tmp_path / 'tokenizer.json')


def test_a_decoder_that_panics_is_an_error():
    class PanicException(BaseException):
        pass

    class Library:
        def decode(self, ids, *, skip_special_tokens):
            raise PanicException('index out of bounds')

    tokenizer = load(tokenizer_file())
    tokenizer._library = Library()
    with pytest.raises(InputError, match='the tokenizer cannot decode ids: the tokenizers library panicked: index out'):
        tokenizer.decode([1])


@pytest.mark.parametrize(('start', 'stop', 'is_rejected'), [(1, 0, False), (9, 0, False), (0, 1, False), (0, 2, True)])
def test_decoders_that_strip_more_than_a_token(start, stop, is_rejected):
    facts = tokenizer_file(decoder=decoders({'type': 'Strip', 'content': 'a', 'start': start, 'stop': stop}))
    if is_rejected:
        with pytest.raises(InputError, match=f'decoder: Strip with start={start} and stop={stop} fails'):
            load(facts)
        # The check is not too strict.
        with pytest.raises(BaseException, match='index out of bounds'):
            tokenizers.Tokenizer.from_str(json.dumps(facts)).decode([CHARACTERS.index('a')])
        return
    tokenizer = load(facts)
    for text in ('a', 'aa', 'b', 'aabaa'):
        tokenizer.decode(tokenizer.encode_batch([text])[0])
