"""Tokenizers of nanochat: equal ids, text that begins with `<|bos|>`, and one line for hostile files."""

import json
import os
import pickle
import re

import pytest
import tiktoken
from hypothesis import example, given
from hypothesis import strategies as st

from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, train_bpe
from maxlm.errors import InputError
from maxlm.huggingface.nanochat import tokenizer_pickle
from maxlm.huggingface.nanochat.tokenizer_pickle import read_tokenizer, write_tokenizer
from tests.huggingface.nanochat.files import PATTERN, TEXT, encoding, save_tokenizer


@pytest.fixture(scope='module')
def made(tmp_path_factory):
    path = tmp_path_factory.mktemp('tokenizer') / 'tokenizer.pkl'
    return save_tokenizer(path), read_tokenizer(path), path


def test_ids_special_tokens_and_boundaries(made):
    expected, tokenizer, _ = made
    assert tokenizer.vocab_size == expected.n_vocab == 300
    assert {token.content: i for i, token in tokenizer.special_tokens.items()} == expected._special_tokens
    bos = expected.encode_single_token('<|bos|>')
    assert tokenizer.beginning_of_document == (bos,)
    assert tokenizer.end_of_document == bos
    assert tokenizer.boundaries.stops == (bos, expected.encode_single_token('<|assistant_end|>'))
    assert tokenizer.boundary_names['beginning_of_text_source'] == 'tokenizer.pkl'
    # The text has merged tokens.
    assert len(expected.encode_ordinary(TEXT)) < len(TEXT.encode()) * 0.7


# Characters that the pattern distinguishes.
LETTERS = "'sdmtSRVEreLlv aé你 \t\r\n\x0b\x85\xa0\u2003\u3000123٣!,。🌍ſK<|bos>"


@given(st.text(alphabet=LETTERS, max_size=40))
@example(TEXT)
@example("<|bos|>'S 're're  \n\n 12345 x" + 3 * ' ')
def test_ids_are_those_of_tiktoken(made, text):
    expected, tokenizer, _ = made
    (ids,) = tokenizer.encode_batch([text])
    assert ids.tolist() == expected.encode_ordinary(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ('pattern', 'text'),
    [
        # A possessive interval of tiktoken, as in cl100k_base, is a repeated one in the library.
        (r'\p{N}{1,3}+|[^\p{N}]', '1234567'),
        # The end of the text is the end of a line in the library.
        (r'\p{L}++$|\p{L}|[^\p{L}]', 'the'),
        # tiktoken drops what the pattern does not match.
        (r'\p{L}+', '1234567'),
        # Only the library has this name of a grapheme.
        (r'\X|.', 'is not usable'),
    ],
)
def test_a_pattern_that_splits_otherwise_is_refused(tmp_path, pattern, text):
    ranks = {**{bytes([byte]): byte for byte in range(256)}, b'34': 256, b'th': 257}
    made = tiktoken.Encoding('x', pat_str='.', mergeable_ranks=ranks, special_tokens={'<|bos|>': 258})
    made._pat_str = pattern
    path = tmp_path / 'tokenizer.pkl'
    path.write_bytes(pickle.dumps(made))
    with pytest.raises(InputError, match=re.escape(text)):
        read_tokenizer(path)


def test_the_pattern_matters(made):
    expected, tokenizer, _ = made
    fields = json.loads(tokenizer.to_json())
    assert fields['pre_tokenizer']['pretokenizers'][0]['pattern'] == {'Regex': PATTERN}
    fields['pre_tokenizer']['pretokenizers'][0]['pattern'] = {'Regex': r'\s+|\S+'}
    other = Tokenizer.from_json(json.dumps(fields), name='other')
    (ids,) = other.encode_batch([TEXT])
    assert ids.tolist() != expected.encode_ordinary(TEXT)


def test_a_written_file_is_that_of_nanochat(made):
    expected, tokenizer, _ = made
    loaded = pickle.loads(write_tokenizer(tokenizer))
    assert isinstance(loaded, tiktoken.Encoding)
    for name in ('_mergeable_ranks', '_special_tokens', '_pat_str', 'n_vocab'):
        assert getattr(loaded, name) == getattr(expected, name), name


def test_a_tokenizer_json_with_the_token_begins_texts_with_it(made, tmp_path):
    _, tokenizer, _ = made
    (tmp_path / 'tokenizer.json').write_text(tokenizer.to_json())
    assert Tokenizer.load(tmp_path / 'tokenizer.json').beginning_of_document == ()
    loaded = read_tokenizer(tmp_path / 'tokenizer.json')
    assert loaded.boundaries[:3] == tokenizer.boundaries[:3]
    bytes_tokenizer().save(tmp_path / 'tokenizer.json')
    assert read_tokenizer(tmp_path / 'tokenizer.json').beginning_of_document == ()


@pytest.mark.parametrize('tokenizer', [bytes_tokenizer(), train_bpe([TEXT], 270)], ids=['bytes', 'without the token'])
def test_other_tokenizers_are_not_written(tokenizer):
    with pytest.raises(InputError, match='only a byte-level BPE tokenizer with the token <|bos|>'.replace('|', r'\|')):
        write_tokenizer(tokenizer)


class Forged:
    def __reduce__(self):
        return os.system, ('touch executed',)


BYTES = {bytes([byte]): byte for byte in range(256)}
BOS = {'<|bos|>': 256}


@pytest.mark.parametrize(
    ('changes', 'reason'),
    [
        ({'mergeable_ranks': Forged()}, r'names \w+.system, which is not allowed and was not run'),
        ({'special_tokens': {'<|end|>': 256}}, r'has no special token <\|bos\|>'),
        ({'mergeable_ranks': {**BYTES, b'ab': 300}}, 'not numbered from 0 to 257'),
        ({'mergeable_ranks': {**BYTES, b'ab': 0}}, 'not numbered'),
        ({'mergeable_ranks': {**BYTES, b'ab': 257.0}}, 'not numbered'),
        ({'mergeable_ranks': {**BYTES, b'ab': '257'}}, 'not numbered'),
        ({'mergeable_ranks': {**BYTES, 'ab': 257}}, 'not numbered'),
        ({'mergeable_ranks': {**BYTES, b'': 257}}, 'not numbered'),
        ({'mergeable_ranks': {b'ab' if token == b'c' else token: rank for token, rank in BYTES.items()}}, 'byte 99'),
        ({'mergeable_ranks': {**BYTES, b'abcd': 257}}, 'token 257 of tokenizer.pkl is not a pair of earlier tokens'),
        ({'mergeable_ranks': {**BYTES, b'a' * 20_000: 257}}, 'its tokens are too long'),
        ({'pat_str': 5}, 'contains no encoding'),
        ({'pat_str': r'(a+)+$'}, 'regular expression'),
        ({'pat_str': '('}, 'regular expression'),
        ({'special_tokens': {'<|bos|>': 256, 'x\ud800': 257}}, 'tokenizer.pkl'),
    ],
)
def test_hostile_and_damaged_encodings_are_refused(tmp_path, monkeypatch, changes, reason):
    path = tmp_path / 'tokenizer.pkl'
    content = {'name': 'rustbpe', 'pat_str': PATTERN, 'mergeable_ranks': BYTES, 'special_tokens': BOS}
    monkeypatch.setattr(tiktoken.Encoding, '__getstate__', lambda self: {**content, **changes})
    monkeypatch.chdir(tmp_path)
    path.write_bytes(pickle.dumps(encoding()))
    with pytest.raises(InputError, match=reason):
        read_tokenizer(path)
    assert not (tmp_path / 'executed').exists()
    # Without the changes, the file is valid.
    monkeypatch.setattr(tiktoken.Encoding, '__getstate__', lambda self: content)
    path.write_bytes(pickle.dumps(encoding()))
    assert read_tokenizer(path).vocab_size == 257


@pytest.mark.parametrize(
    ('value', 'reason'),
    [
        ({'a': 1}, 'contains no encoding of tiktoken'),
        (Forged(), 'which is not allowed and was not run'),
        (b'bytes', 'contains no encoding of tiktoken'),
    ],
)
def test_other_pickles_are_refused(tmp_path, value, reason):
    (tmp_path / 'tokenizer.pkl').write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match=reason):
        read_tokenizer(tmp_path / 'tokenizer.pkl')


def test_an_encoding_of_tiktoken_by_name_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(tiktoken.Encoding, '__getstate__', lambda self: 'cl100k_base')
    (tmp_path / 'tokenizer.pkl').write_bytes(pickle.dumps(encoding()))
    with pytest.raises(InputError, match="is the encoding 'cl100k_base' of tiktoken"):
        read_tokenizer(tmp_path / 'tokenizer.pkl')


def test_the_size_is_limited(made, monkeypatch):
    monkeypatch.setattr(tokenizer_pickle, 'MAX_BYTES', 100)
    with pytest.raises(InputError, match='more than the limit of 100'):
        read_tokenizer(made[2])
