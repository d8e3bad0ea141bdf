"""Hostile `tokenizer.json` files, and published steps that must not be rejected."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

from maxlm.data.tokenizer.tokenizer import Tokenizer

SPECIAL = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
CHARACTERS = ['<unk>', '</s>', *map(chr, range(32, 127)), '▁', 'Ġ', '\n']


def tokenizer_file(**parts: Any) -> dict[str, Any]:
    """Returns a small tokenizer of characters with the given parts. `model` updates the model."""
    model = {
        'type': 'BPE',
        'dropout': None,
        'unk_token': '<unk>',
        'continuing_subword_prefix': None,
        'end_of_word_suffix': None,
        'fuse_unk': False,
        'byte_fallback': False,
        'ignore_merges': False,
        'vocab': {token: index for index, token in enumerate(CHARACTERS)},
        'merges': [],
    }
    empty = dict.fromkeys(('truncation', 'padding', 'normalizer', 'pre_tokenizer', 'post_processor', 'decoder'))
    return {
        'version': '1.0',
        **empty,
        'added_tokens': [{'id': 1, 'content': '</s>', **SPECIAL}, *parts.pop('added', [])],
        'model': parts.pop('model', model),
        **parts,
    }


def replace(old: str, new: str, *, is_regex: bool = False) -> dict[str, Any]:
    return {'type': 'Replace', 'pattern': {'Regex' if is_regex else 'String': old}, 'content': new}


def split(regex: str) -> dict[str, Any]:
    return {'type': 'Split', 'pattern': {'Regex': regex}, 'behavior': 'Isolated', 'invert': False}


def normalizers(*steps: Any) -> dict[str, Any]:
    return {'type': 'Sequence', 'normalizers': list(steps)}


def pre_tokenizers(*steps: Any) -> dict[str, Any]:
    return {'type': 'Sequence', 'pretokenizers': list(steps)}


def decoders(*steps: Any) -> dict[str, Any]:
    return {'type': 'Sequence', 'decoders': list(steps)}


def charsmap(size: int, *replacements: bytes) -> dict[str, Any]:
    content = struct.pack('<I', size) + b'\0' * min(size, 64) + b'\0'.join(replacements) + b'\0'
    return {'type': 'Precompiled', 'precompiled_charsmap': base64.b64encode(content).decode()}


def template(single: Any, ids: int = 1) -> dict[str, Any]:
    token = {'id': 'x', 'ids': [1] * ids, 'tokens': ['</s>'] * ids}
    pair = [{'Sequence': {'id': 'A', 'type_id': 0}}, {'Sequence': {'id': 'B', 'type_id': 0}}]
    return {'type': 'TemplateProcessing', 'single': single, 'pair': pair, 'special_tokens': {'x': token}}


def token(content: str, index: int, **flags: Any) -> dict[str, Any]:
    return {'id': index, 'content': content, **SPECIAL, 'special': False, **flags}


def load(facts: Any) -> Tokenizer:
    return Tokenizer.from_json(json.dumps(facts), name='x')


BYTE_LEVEL = {'type': 'ByteLevel', 'add_prefix_space': True, 'trim_offsets': True, 'use_regex': False}
METASPACE = {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always', 'split': True}
BERT = {
    'type': 'BertNormalizer',
    'clean_text': True,
    'handle_chinese_chars': True,
    'strip_accents': None,
    'lowercase': True,
}
A, X = {'Sequence': {'id': 'A', 'type_id': 0}}, {'SpecialToken': {'id': 'x', 'type_id': 0}}
UNIGRAM = {'type': 'Unigram', 'unk_id': 0, 'byte_fallback': False}
WORDS = {'<unk>': 0, '</s>': 1, 'a': 2, '##a': 3}
WORD_PIECE = {'type': 'WordPiece', 'unk_token': '<unk>', 'continuing_subword_prefix': '##', 'vocab': WORDS}
_nested: dict[str, Any] = replace('a', 'aa')
for _ in range(40):
    _nested = normalizers(_nested)

# Name → (file, part of the message).
REJECTED = {
    'sequence of replacements': (
        tokenizer_file(normalizer=normalizers(*[replace('a', 'a' * 16)] * 12)),
        'normalizer: can expand a text more than 1,000,000,000 times',
    ),
    'one replacement': (
        tokenizer_file(normalizer=replace('a', 'b' * 10**6)),
        'normalizer: can expand a text 1,000,000',
    ),
    'empty pattern': (tokenizer_file(normalizer=normalizers(*[replace('', 'a' * 16)] * 8)), 'normalizer: can expand'),
    'regular expression that matches no character': (
        tokenizer_file(normalizer=normalizers(*[replace('(?=.)', 'a' * 16, is_regex=True)] * 8)),
        'normalizer: can expand',
    ),
    'nested sequences': (tokenizer_file(normalizer=normalizers(*[_nested] * 40)), 'normalizer: has more than 64 steps'),
    'compositions': (
        tokenizer_file(normalizer=normalizers(*[replace(' ا', 'ﷺ'), {'type': 'NFKC'}] * 20)),
        'normalizer: can expand',
    ),
    'prepended text': (
        tokenizer_file(normalizer={'type': 'Prepend', 'prepend': 'b' * 10**5}),
        'can expand a text 100,001',
    ),
    'normalizer of bytes': (
        tokenizer_file(normalizer=normalizers(*[{'type': 'ByteLevel'}] * 30)),
        'normalizer: can expand',
    ),
    'many steps': (tokenizer_file(normalizer=normalizers(*[{'type': 'Nmt'}] * 65)), 'normalizer: has more than 64'),
    'unknown type': (tokenizer_file(normalizer={**replace('a', 'b'), 'type': 'Other'}), "type='Other' is unknown"),
    'no type': (tokenizer_file(normalizer={'pattern': {'String': 'a'}, 'content': 'b'}), 'type=None is unknown'),
    'long pattern': (tokenizer_file(normalizer=replace('b' * 1001, 'b')), 'a pattern has more than 1,000 bytes'),
    'long replacement in a map': (
        tokenizer_file(normalizer=charsmap(64, b'a', b'b' * 5000)),
        'can expand a text 5,000',
    ),
    'map with a false size': (tokenizer_file(normalizer=charsmap(2**31)), 'precompiled_charsmap is damaged'),
    'empty map': (tokenizer_file(normalizer={'type': 'Precompiled', 'precompiled_charsmap': ''}), 'is damaged'),
    'pre-tokenizers of bytes': (
        tokenizer_file(pre_tokenizer=pre_tokenizers(*[BYTE_LEVEL] * 30)),
        'pre_tokenizer: can expand',
    ),
    'spaces before each word': (
        tokenizer_file(pre_tokenizer=pre_tokenizers(*[{**METASPACE, 'replacement': chr(c)} for c in range(200, 230)])),
        'pre_tokenizer: can expand',
    ),
    'decoders': (
        tokenizer_file(decoder=decoders(*[replace('a', 'a' * 16)] * 12)),
        'decoder: can expand a text more than 1,000,000,000',
    ),
    'regular expressions in decoders': (
        tokenizer_file(decoder=decoders({'type': 'Fuse'}, replace('(z+)+y', 'a', is_regex=True))),
        "regular expression '(z+)+y'",
    ),
    'exponential time': (tokenizer_file(pre_tokenizer=split('(a+)+b')), "regular expression '(a+)+b' fails"),
    'exponential time in a normalizer': (
        tokenizer_file(normalizer=replace(r'(?:\d+|0)*[!?]', '', is_regex=True)),
        'regular expression',
    ),
    'exponential time of words': (tokenizer_file(pre_tokenizer=split('(the|quick|fox|the)+$')), 'regular expression'),
    'large regular expression': (
        tokenizer_file(pre_tokenizer=split('|'.join(f'a{i}' for i in range(5000)))),
        'more than 20,000 characters',
    ),
    'invalid regular expression': (tokenizer_file(pre_tokenizer=split('(')), "regular expression '(' fails"),
    'long words': (
        tokenizer_file(model={**WORD_PIECE, 'max_input_chars_per_word': 10**9}),
        'max_input_chars_per_word=1000000000: must be at most 256',
    ),
    'long prefix': (
        tokenizer_file(model={**WORD_PIECE, 'max_input_chars_per_word': 100, 'continuing_subword_prefix': '#' * 65}),
        'continuing_subword_prefix has more than 64 bytes',
    ),
    'long tokens': (
        tokenizer_file(model={**UNIGRAM, 'vocab': [['<unk>', 0.0], ['</s>', 0.0], ['a' * 257, -1.0]]}),
        'model.vocab has a token of 257 characters',
    ),
    'added tokens': (
        tokenizer_file(added=[token(f't{i}', 200 + i) for i in range(2**18)]),
        'added_tokens: has 262,145 tokens',
    ),
    'long added token': (tokenizer_file(added=[token('a' * 2**24, 200)]), 'added_tokens: can have 16,777,220 bytes'),
    'normalized added tokens': (
        tokenizer_file(
            normalizer=replace('a', 'b' * 1000),
            added=[token('a' * 1000 + str(i), 200 + i, normalized=True) for i in range(99)],
        ),
        'added_tokens: can have 99',
    ),
    'repeated text': (tokenizer_file(post_processor=template([A] * 100)), 'post_processor: repeats a text 100 times'),
    'spaces that include spaces': (
        tokenizer_file(added=[token(' ', 200, lstrip=True)]),
        'added_tokens: a token of white space has lstrip',
    ),
    'many pieces': (tokenizer_file(post_processor=template([X] * 100_000)), 'post_processor: has 100,000 pieces'),
    'many ids': (
        tokenizer_file(post_processor=template([X] * 200, ids=1000)),
        'post_processor: has 200 pieces of up to',
    ),
}
# Steps of published tokenizers with the largest factors.
ACCEPTED = {
    'XLNet': {
        'normalizer': normalizers(
            replace('``', '"'),
            replace("''", '"'),
            {'type': 'NFKD'},
            {'type': 'StripAccents'},
            {'type': 'Lowercase'},
            charsmap(64, b'x' * 33),
            replace(' {2,}', ' ', is_regex=True),
        ),
        'pre_tokenizer': METASPACE,
    },
    'NLLB': {
        'normalizer': normalizers(charsmap(64, b'x' * 33), replace(' {2,}', '▁', is_regex=True)),
        'pre_tokenizer': pre_tokenizers({'type': 'WhitespaceSplit'}, METASPACE),
    },
    'BERT': {
        'normalizer': BERT,
        'pre_tokenizer': {'type': 'BertPreTokenizer'},
        'model': {**WORD_PIECE, 'max_input_chars_per_word': 100},
        'decoder': {'type': 'WordPiece', 'prefix': '##', 'cleanup': True},
    },
    'Llama 2': {
        'normalizer': normalizers({'type': 'Prepend', 'prepend': '▁'}, replace(' ', '▁')),
        'decoder': decoders(
            replace('▁', ' '),
            {'type': 'ByteFallback'},
            {'type': 'Fuse'},
            {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0},
        ),
    },
    'Falcon': {
        'pre_tokenizer': pre_tokenizers(
            {'type': 'Punctuation', 'behavior': 'Contiguous'},
            {**BYTE_LEVEL, 'add_prefix_space': False, 'use_regex': True},
            {'type': 'Digits', 'individual_digits': False},
            split('[0-9][0-9][0-9]'),
        ),
        'decoder': BYTE_LEVEL,
    },
    'CLIP': {'normalizer': normalizers({'type': 'NFC'}, replace(r'\s+', ' ', is_regex=True), {'type': 'Lowercase'})},
    # Quadratic in the number of digits, and published.
    'digits from the right': {'pre_tokenizer': split(r'\d{1,3}(?=(?:\d{3})*\b)')},
    'digits from the right, as a separator': {'pre_tokenizer': split(r'(?=(\d{3})+(?!\d))')},
}
