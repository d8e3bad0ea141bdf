import itertools
import json
import random
import sys
import unicodedata

import pytest
import tokenizers

from maxlm.data.tokenizer.tiktoken_bpe import byte_pair_encoder
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, make_tokenizer, train_bpe
from tests.conftest import ROOT

CORPUS = [path.read_text() for path in sorted((ROOT / 'maxlm').rglob('*.py'))[:40]]


@pytest.fixture(scope='module')
def tokenizer():
    return train_bpe(CORPUS, 4000)


def library_of(tokenizer):
    return tokenizers.Tokenizer.from_str(tokenizer.to_json())


def changed(tokenizer, **changes):
    """Returns a tokenizer with replaced parts of its JSON; `model__x` replaces x of its model."""
    facts = json.loads(tokenizer.to_json())
    for key, value in changes.items():
        *outer, name = key.split('__')
        (facts[outer[0]] if outer else facts)[name] = value
    library = tokenizers.Tokenizer.from_str(json.dumps(facts))
    library.encode_special_tokens = True
    return library


def assert_same(tokenizer, texts):
    encode = byte_pair_encoder(library_of(tokenizer))
    for text, ids in zip(texts, tokenizer.encode_batch_by_library(texts), strict=True):
        assert encode(text).tolist() == ids.tolist(), repr(text)


def test_code_and_prose(tokenizer):
    assert_same(tokenizer, [*CORPUS, *(path.read_text() for path in ROOT.glob('*.md'))])
    # Negative control: other merges give other ids.
    other = train_bpe(CORPUS[:1], 600)
    encode = byte_pair_encoder(library_of(other))
    assert encode(CORPUS[0]).tolist() != tokenizer.encode_batch_by_library(CORPUS[:1])[0].tolist()


def around(characters):
    """Returns each character after a letter, after a digit, and before a space."""
    return ''.join(f'a{c}1{c}.{c} ' for c in characters)


def characters_between(first, last):
    return [chr(i) for i in range(first, last) if not 0xD800 <= i < 0xE000]


def test_characters_where_categories_change(tokenizer):
    """Both libraries must classify the same characters as letters, digits and spaces."""
    everything = characters_between(1, sys.maxunicode + 1)
    categories = [unicodedata.category(character)[0] for character in everything]
    edges = {
        i + k for i, (first, second) in enumerate(itertools.pairwise(categories)) if first != second for k in (0, 1)
    }
    assert_same(tokenizer, [around(everything[i] for i in sorted(edges)), around(characters_between(0, 0x400))])


@pytest.mark.nightly
def test_every_character(tokenizer):
    assert_same(tokenizer, [around(characters_between(first, first + 0x800)) for first in range(0, 0x110000, 0x800)])


@pytest.mark.parametrize('count', [3000, pytest.param(20_000, marks=pytest.mark.nightly)])
def test_random_texts(tokenizer, count):
    rng = random.Random(0)
    alphabets = [
        " \n\t\r'sdmtlvre.",
        'ab \u00a0\u2003\u3000\u200b\x85\x0b\x1c',
        'éüß漢字한글नमस्ते\u0301\u200d👩👧🏳🌈',
        'etaoinshrdlu ',
        ''.join(map(chr, range(0x3000))),
    ]
    alphabets.append(''.join(alphabets[:4]))
    texts = [''.join(rng.choices(rng.choice(alphabets), k=rng.randrange(80))) for _ in range(count)]
    assert_same(tokenizer, texts)


@pytest.mark.parametrize('text', ['a', '=', 'ab', '0', '🦙', ' x', '\n\n    y'])
def test_long_runs(tokenizer, text):
    assert_same(tokenizer, [text * n for n in (7, 501, 20000)])


def test_unsplittable_texts_use_the_library(tokenizer):
    texts = ['before', ' ' * 1_000_000, 'after']
    with pytest.raises(ValueError, match='stack'):
        byte_pair_encoder(library_of(tokenizer))(texts[1])
    for first, second in zip(tokenizer.encode_batch(texts), tokenizer.encode_batch_by_library(texts), strict=True):
        assert first.tolist() == second.tolist()


def test_supported_tokenizers(tokenizer):
    assert byte_pair_encoder(changed(tokenizer)) is not None
    assert byte_pair_encoder(library_of(make_tokenizer('bpe:400', CORPUS[:3], infill=True))) is not None
    # Without merges, NumPy is faster still, and the pre-tokenization differs.
    assert byte_pair_encoder(library_of(bytes_tokenizer())) is None


LOWERCASE = {'type': 'Lowercase'}
WORDS = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True, 'use_regex': True}
PADDING = {
    'strategy': {'Fixed': 9},
    'direction': 'Right',
    'pad_to_multiple_of': None,
    'pad_id': 0,
    'pad_type_id': 0,
    'pad_token': 'x',
}
TRUNCATION = {'direction': 'Right', 'max_length': 5, 'strategy': 'LongestFirst', 'stride': 0}


@pytest.mark.parametrize(
    'changes',
    [
        {'normalizer': LOWERCASE},
        {'truncation': TRUNCATION},
        {'padding': PADDING},
        {'pre_tokenizer': None},
        {'pre_tokenizer': {'type': 'Whitespace'}},
        {'pre_tokenizer': {**WORDS, 'use_regex': False}},
        {'pre_tokenizer': {**WORDS, 'add_prefix_space': True}},
        {'model__dropout': 0.5},
        {'model__ignore_merges': True},
        {'model__byte_fallback': True},
    ],
)
def test_other_options_use_the_library(tokenizer, changes):
    library = changed(tokenizer, **changes)
    assert byte_pair_encoder(library) is None
    # Truncation, padding and dropout are not part of a tokenizer.
    if not changes.keys() & {'truncation', 'padding', 'model__dropout'}:
        expected = library.encode('  Some Text\n', add_special_tokens=False).ids
        assert Tokenizer(library).encode_batch(['  Some Text\n'])[0].tolist() == expected


def test_user_tokens_use_the_library(tokenizer):
    library = changed(tokenizer)
    library.add_tokens(['def main'])
    assert byte_pair_encoder(library) is None
    assert library.token_to_id('def main') in Tokenizer(library).encode_batch(['def main()'])[0]


def merges_of(*pairs):
    """Returns a byte-level BPE of the bytes and the given merges, in the order of their ids."""
    facts = json.loads(bytes_tokenizer().to_json())
    words = facts['model']['vocab']
    for pair in pairs:
        words.setdefault(''.join(pair), len(words))
    facts['model']['merges'] = [list(pair) for pair in pairs]
    facts['pre_tokenizer'] = WORDS
    facts['added_tokens'] = []
    library = tokenizers.Tokenizer.from_str(json.dumps(facts))
    library.add_special_tokens(['<|endoftext|>'])
    return library


def test_merges_that_tiktoken_reads_differently_use_the_library():
    assert byte_pair_encoder(merges_of('ab', ('ab', 'c'), 'de')) is not None
    # Two merges produce the same token.
    assert byte_pair_encoder(merges_of('ab', 'bc', ('ab', 'c'), ('a', 'bc'))) is None
    # Encoding the text of a token does not give the token: `ab` is merged before `bc`, and `ab` and `c` do not merge.
    hidden = merges_of('ab', 'bc', ('a', 'bc'))
    assert hidden.encode('abc').tokens == ['ab', 'c']
    assert byte_pair_encoder(hidden) is None
    # Ids are in a different order than the merges.
    facts = json.loads(merges_of('ab', 'bc').to_str())
    vocab = facts['model']['vocab']
    vocab['ab'], vocab['bc'] = vocab['bc'], vocab['ab']
    assert byte_pair_encoder(tokenizers.Tokenizer.from_str(json.dumps(facts))) is None
    # No merge produces the token.
    facts = json.loads(merges_of('ab').to_str())
    facts['model']['vocab']['xyz'] = 300
    assert byte_pair_encoder(tokenizers.Tokenizer.from_str(json.dumps(facts))) is None
