"""Tests incremental detokenization against decoding all tokens at once."""

import numpy as np
import pytest
import tokenizers

from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, train_bpe
from maxlm.inference.detokenizer import TextStream

TEXT = 'naïve café — 日本語 👩🏽‍🚀 and “quotes”\n\ttabs'


def sentencepiece():
    """Returns a tokenizer of words with a leading space, with byte fallback."""
    pieces = ['<unk>', *(f'<0x{byte:02X}>' for byte in range(256)), *'▁abcdefghijklmnopqrstuvwxyz']
    model = tokenizers.models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token='<unk>', byte_fallback=True
    )
    library = tokenizers.Tokenizer(model)
    library.normalizer = tokenizers.normalizers.Sequence(
        [tokenizers.normalizers.Prepend('▁'), tokenizers.normalizers.Replace(' ', '▁')]
    )
    library.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace('▁', ' '),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(content=' ', left=1, right=0),
        ]
    )
    library.add_special_tokens(['</s>'])
    return Tokenizer(library)


TOKENIZERS = {
    'bytes': bytes_tokenizer,
    'bpe': lambda: train_bpe([TEXT * 3, 'some other text'], 300),
    'sentencepiece': sentencepiece,
}


@pytest.fixture(params=TOKENIZERS)
def tokenizer(request):
    return TOKENIZERS[request.param]()


def shown(tokenizer, ids, *, prompt=(), stops=()):
    stream = TextStream(tokenizer, prompt, stops)
    pieces = [stream.add(token) for token in ids]
    return [*pieces, stream.finish()], stream.stopped


def test_bytes_of_characters_wait_for_each_other(tokenizer):
    ids = tokenizer.encode_batch([TEXT])[0].tolist()
    pieces, _ = shown(tokenizer, ids)
    assert ''.join(pieces) == tokenizer.decode(ids) == TEXT
    assert all('�' not in piece for piece in pieces)
    # Text is emitted before the end.
    assert sum(map(bool, pieces)) > 10


@pytest.mark.parametrize('tokenizer', ['bytes', 'bpe'], indirect=True)
def test_incremental_text_equals_decoding_at_once(tokenizer):
    """Tests random ids, whose bytes may not be valid UTF-8."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, tokenizer.vocab_size, 3000).tolist()
    text = ''.join(shown(tokenizer, ids)[0])
    assert text == tokenizer.decode(ids)
    assert '�' in text
    # A finished prefix of any length gives the same text as well.
    for length in range(1, 40):
        assert ''.join(shown(tokenizer, ids[:length])[0]) == tokenizer.decode(ids[:length])


def test_a_continuation_keeps_its_leading_space():
    tokenizer = sentencepiece()
    ids = tokenizer.encode_batch(['some words here'])[0].tolist()
    pieces, _ = shown(tokenizer, ids[5:], prompt=ids[:5])
    assert ''.join(pieces) == ' words here'
    # Control: decoding the tokens alone loses the leading space.
    assert tokenizer.decode(ids[5:]) == 'words here'


@pytest.mark.parametrize(
    ('stops', 'expected'),
    [
        (['“quotes'], 'naïve café — 日本語 👩🏽‍🚀 and '),
        (['zzz', 'é'], 'naïve caf'),
        # The first stop in the text counts, regardless of the order of the stops.
        (['日本', 'café'], 'naïve '),
        (['n'], ''),
        # This stop contains its own beginning.
        (['tabs', '\t\t'], TEXT.removesuffix('tabs')),
    ],
)
def test_a_stop_string_ends_it(tokenizer, stops, expected):
    ids = tokenizer.encode_batch([TEXT])[0].tolist()
    pieces, stopped = shown(tokenizer, ids, stops=stops)
    assert (''.join(pieces), stopped) == (expected, True)


def test_a_possible_stop_string_is_held_back():
    tokenizer = bytes_tokenizer()
    stream = TextStream(tokenizer, [], ['ababc'])
    assert [stream.add(token) for token in b'xababx'] == ['x', '', '', '', '', 'ababx']
    assert [stream.add(token) for token in b'ababab'] == ['', '', '', '', 'ab', '']
    assert stream.add(ord('c')) == ''
    assert stream.stopped
    assert stream.finish() == ''
    # Control: an incomplete stop is emitted at the end.
    stream = TextStream(tokenizer, [], ['ababc'])
    assert [stream.add(token) for token in b'abab'] == [''] * 4
    assert (stream.finish(), stream.stopped) == ('abab', False)
