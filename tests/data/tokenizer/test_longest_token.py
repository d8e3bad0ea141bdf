"""Tests the maximum number of bytes per token, which gives a lower bound for the tokens of a text."""

import random

import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from maxlm.data.tokenizer.longest_token import longest_token
from maxlm.data.tokenizer.special_tokens import END_OF_DOCUMENT
from maxlm.data.tokenizer.tokenizer import Tokenizer, bytes_tokenizer, chars_tokenizer, ids_tokenizer, train_bpe

WORDS = [
    'the ',
    'aaaa',
    '        ',
    'ü',
    'e\u0301',
    '\u1100\u1161\u11a8',
    '🦊',
    '\n\n',
    'x',
    '\u03b1\u0313\u0301\u0345',
]


def with_steps(normalizer=None, pre_tokenizer=None, model=None):
    bpe = train_bpe(WORDS * 20, 300)
    library = tokenizers.Tokenizer.from_str(bpe.to_json())
    library.normalizer = normalizer
    if pre_tokenizer is not None:
        library.pre_tokenizer = pre_tokenizer
    if model is not None:
        library.model = model
    library.add_special_tokens([END_OF_DOCUMENT])
    return Tokenizer(library)


def test_the_bound_holds_for_all_texts():
    draw = random.Random(1)
    composed = with_steps(normalizers.NFC())
    for tokenizer in (bytes_tokenizer(), chars_tokenizer(WORDS), train_bpe(WORDS * 20, 300), composed):
        longest = longest_token(tokenizer)
        texts = [''.join(draw.choices(WORDS, k=draw.randrange(1, 30))) for _ in range(100)] + [w * 50 for w in WORDS]
        for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
            assert len(text.encode()) <= longest * len(ids)
    assert longest_token(bytes_tokenizer()) == 1
    assert longest_token(composed) == 3 * longest_token(with_steps())


def test_tokenizers_that_drop_text_have_no_bound():
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    left_out = [
        with_steps(normalizers.Strip()),
        with_steps(normalizers.Replace('  ', '')),
        with_steps(normalizers.BertNormalizer()),
        with_steps(None, pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), byte_level])),
        with_steps(None, pre_tokenizers.Sequence([pre_tokenizers.Split(' ', 'removed'), byte_level])),
        with_steps(None, None, models.BPE({'a': 0, 'b': 1}, [])),
        ids_tokenizer(9, 8),
    ]
    assert [longest_token(tokenizer) for tokenizer in left_out] == [None] * len(left_out)
