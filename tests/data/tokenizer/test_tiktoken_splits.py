"""Tokenizers with the splits of nanochat and GPT-4: tiktoken gives the ids of the library for every text."""

import itertools
import random
import re
import sys
import unicodedata

import pytest
import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from maxlm.data.tokenizer import tokenizer as tokenizer_module
from maxlm.data.tokenizer.tiktoken_bpe import SPLITS, byte_pair_encoder
from maxlm.data.tokenizer.tokenizer import Tokenizer
from maxlm.errors import InputError
from maxlm.huggingface.nanochat.tokenizer_pickle import read_tokenizer
from tests.conftest import ROOT
from tests.huggingface.nanochat.files import PATTERN, SPECIAL, save_tokenizer

PIECES = (
    *(
        "'s",
        "'LL",
        "'vE",
        "'ſ",
        "'m",
        ' ',
        '  ',
        '\t',
        '\n',
        '\r\n',
        '\n \n',
        '\x0b',
        '\x85',
        '\xa0',
        '\u2003',
        '\u200b',
    ),
    *('1', '23', '456', '٣', '½', '²', 'Ⅷ', 'the', ' the', 'The', 'é', 'e\u0301', 'İ', 'ﬆ', 'K'),
    *('漢字', '한글', 'नमस्ते', 'العربية', 'עברית', 'ไทย', 'ქართული', '👩\u200d👧', '🏳\ufe0f\u200d🌈', '𝒜', '𐍈'),
    *('!', '...', '_', '-->', '\x00', '\ufeff', '\U0010ffff', '<|bos|>', '<|user_start|>', '<|'),
)


def trained(split):
    """Returns byte-level BPE of the library with a split, trained on a page and on PIECES."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(split), 'isolated'), pre_tokenizers.ByteLevel(False, use_regex=False)]
    )
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=900,
        special_tokens=['<|bos|>'],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator([(ROOT / 'README.md').read_text(), *PIECES * 20], trainer)
    return library


@pytest.fixture(scope='module', params=SPLITS, ids=['gpt2', 'nanochat', 'digit', 'two_digits', 'three_digits'])
def tokenizer(request):
    return Tokenizer(trained(request.param))


def assert_same(tokenizer, texts):
    encode = byte_pair_encoder(tokenizer._library)
    for text, ids in zip(texts, tokenizer.encode_batch_by_library(texts), strict=True):
        assert encode(text).tolist() == ids.tolist(), repr(text[:100])


def test_random_texts_of_all_scripts(tokenizer):
    rng = random.Random(0)
    assert_same(tokenizer, [''.join(rng.choices(PIECES, k=rng.randrange(40))) for _ in range(1000)])


def test_characters_where_categories_change(tokenizer):
    everything = [chr(i) for i in range(1, sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]
    categories = [unicodedata.category(character)[0] for character in everything]
    edges = {
        i + k for i, (first, second) in enumerate(itertools.pairwise(categories)) if first != second for k in (0, 1)
    }
    assert_same(
        tokenizer, [''.join(f"a{c}1{c}.{c} '{c}'r{c}\n{c}" for c in map(everything.__getitem__, sorted(edges)))]
    )


@pytest.mark.parametrize('text', ['a', '=', '7', '🦙', ' ', ' x', '\n', ' \n', '\t\r', "'s", '<|bos|>'])
def test_very_long_words(tokenizer, text):
    assert_same(tokenizer, [text * n for n in (7, 501, 20_000)])


def test_invalid_surrogates_are_refused(tokenizer):
    with pytest.raises(InputError, match='not valid UTF-8 at character 1'):
        tokenizer.encode_batch(['before', 'x\ud800y'])


def test_the_pickle_of_nanochat_is_encoded_by_tiktoken(tmp_path, monkeypatch):
    expected, tokenizer = save_tokenizer(tmp_path / 'tokenizer.pkl'), read_tokenizer(tmp_path / 'tokenizer.pkl')
    assert SPLITS[1] == PATTERN
    texts = [''.join(SPECIAL), 'I\'m <|bos|> "12345"\n\n  the end ']
    monkeypatch.setattr(tokenizer_module, 'encode_long', lambda *_: pytest.fail('the library encodes'))
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [expected.encode_ordinary(x) for x in texts]


@pytest.mark.parametrize('split', [SPLITS[-1].replace('{1,3}', '{1,3}+'), r'\s+|\S+', re.escape(SPLITS[0])])
def test_other_splits_use_the_library(split):
    assert byte_pair_encoder(trained(split)) is None
