from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import tokenizers

from maxlm.data.tokenizer import END_OF_DOCUMENT, Tokenizer, bytes_tokenizer, chars_tokenizer, make_tokenizer, train_bpe
from maxlm.errors import InputError

NASTY = [
    '',
    'plain words, and  two  spaces ',
    'line\r\nline\n\n\ttab\x0b\x85\u2028end',
    '\x00 NUL \x00',
    'emoji 👩‍👩‍👧‍👦🏳️‍🌈 and ḋ̶ combining',
    f'spelled {END_OF_DOCUMENT} inside',
    f'{END_OF_DOCUMENT}',
    '<|unk|><s></s>',
    '\ufeffbom \ufffd \U0010ffff',
    'ÀÿĀŃ¡¬\xad®',
    ''.join(map(chr, range(256))),
]
CORPUS = [*NASTY, 'the quick brown fox jumps over the lazy dog. ' * 50]


@pytest.fixture(params=['bytes', 'chars', 'bpe:300'])
def tokenizer(request):
    return make_tokenizer(request.param, CORPUS)


def test_round_trip(tokenizer):
    for text, ids in zip(NASTY, tokenizer.encode_batch(NASTY), strict=True):
        assert ids.dtype == np.uint32
        assert tokenizer.decode(ids) == text
        assert tokenizer.end_of_document not in ids
        assert ids.max(initial=0) < tokenizer.vocab_size
    assert tokenizer.decode([tokenizer.end_of_document]) == END_OF_DOCUMENT


def test_fast_path_equals_the_library(tokenizer):
    texts = [*NASTY, 'unseen: 漢字 ж']
    fast, slow = tokenizer.encode_batch(texts), tokenizer.encode_batch_by_library(texts)
    for text, one, other in zip(texts, fast, slow, strict=True):
        np.testing.assert_array_equal(one, other, err_msg=repr(text))
    assert fast[1].tolist() != slow[2].tolist()


def test_a_loaded_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save(tmp_path / 'tokenizer.json')
    loaded = Tokenizer.load(tmp_path / 'tokenizer.json')
    assert (loaded.kind, loaded.vocab_size, loaded.end_of_document, loaded.sha256) == (
        tokenizer.kind,
        tokenizer.vocab_size,
        tokenizer.end_of_document,
        tokenizer.sha256,
    )
    for one, other in zip(loaded.encode_batch(NASTY), tokenizer.encode_batch(NASTY), strict=True):
        np.testing.assert_array_equal(one, other)


def test_bytes_are_their_own_ids():
    tokenizer = bytes_tokenizer()
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ('bytes', 257, 256)
    assert tokenizer.encode_batch(['aé'])[0].tolist() == list('aé'.encode())


def test_chars_are_sorted_and_know_the_unknown():
    tokenizer = chars_tokenizer(['cab', 'b'])
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ('chars', 5, 3)
    assert tokenizer.encode_batch(['abcx\U0010ffff!'])[0].tolist() == [0, 1, 2, 4, 4, 4]
    assert tokenizer.decode([0, 4]) == 'a<|unk|>'
    assert chars_tokenizer(['a']).encode_batch(['\x00'])[0].tolist() == [2]


def test_bpe_learns_and_is_deterministic():
    tokenizer = train_bpe(CORPUS, 300)
    assert (tokenizer.kind, tokenizer.vocab_size, tokenizer.end_of_document) == ('library', 300, 0)
    text = CORPUS[-1]
    assert len(tokenizer.encode_batch([text])[0]) < len(text) / 2
    script = (
        'import json, sys; from maxlm.data.tokenizer import train_bpe; '
        'print(train_bpe(json.load(sys.stdin), 300).sha256)'
    )
    again = subprocess.run(
        [sys.executable, '-c', script], input=json.dumps(CORPUS), capture_output=True, text=True, check=True
    )
    assert again.stdout.strip() == tokenizer.sha256
    assert train_bpe(CORPUS, 290).sha256 != tokenizer.sha256


@pytest.mark.parametrize('name', ['</s>', '<|end_of_text|>', '<eos>', '<|eos|>'])
def test_a_tokenizer_from_elsewhere(tmp_path, name):
    library = tokenizers.Tokenizer(tokenizers.models.WordLevel({'a': 0, '?': 1}, unk_token='?'))
    library.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    library.save(str(tmp_path / 'none.json'))
    with pytest.raises(InputError) as info:
        make_tokenizer(str(tmp_path / 'none.json'), [])
    assert name in str(info.value)
    assert 'none.json' in str(info.value)
    library.add_special_tokens([name])
    library.save(str(tmp_path / 'some.json'))
    tokenizer = make_tokenizer(str(tmp_path / 'some.json'), [])
    assert (tokenizer.kind, tokenizer.end_of_document, tokenizer.vocab_size) == ('library', 2, 3)
    assert tokenizer.encode_batch([f'a {name} a'])[0].tolist().count(2) == 0


@pytest.mark.parametrize('spec', ['bpe', 'bpe:', 'bpe:256', 'bpe:-1', 'bpe:1e4', 'bpe:²', 'word', '', 'Bytes', '.'])
def test_bad_specs(spec):
    with pytest.raises(InputError, match=r'bpe:N'):
        make_tokenizer(spec, ['text'])


@pytest.mark.parametrize('content', [b'', b'{}', b'[1, 2]', b'\xff', b'{"model": 3}'])
def test_a_file_that_is_no_tokenizer(tmp_path, content):
    path = tmp_path / 'tokenizer.json'
    path.write_bytes(content)
    with pytest.raises(InputError) as info:
        make_tokenizer(str(path), [])
    assert str(path) in str(info.value)
    assert '\n' not in str(info.value)
