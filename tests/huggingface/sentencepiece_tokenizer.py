"""Provides a small tokenizer.json in the form that Transformers converts SentencePiece models to."""

from typing import Any

SPACE = '▁'
REPLACE = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': SPACE}
PREPEND = {'type': 'Sequence', 'normalizers': [{'type': 'Prepend', 'prepend': SPACE}, REPLACE]}
# Tokens of merges in order of priority. With "then", "th" and "en" are merged before "he".
PIECES = ('th', 'en', '▁▁', 'he', '▁th', '▁the', 'the', 'then', '▁then', 'hen', 'on', '▁on', 'one')
SPECIAL = ('<unk>', '<s>', '</s>')


def sentencepiece_tokenizer(normalizer: dict[str, Any] | None = PREPEND) -> dict[str, Any]:
    """Returns the content of the file. Texts start with the BOS token."""
    characters = sorted(set(''.join(PIECES)))
    tokens = [*SPECIAL, *(f'<0x{byte:02X}>' for byte in range(256)), *characters, *PIECES]
    vocab = {token: index for index, token in enumerate(tokens)}
    splits = [(piece[:stop], piece[stop:]) for piece in PIECES for stop in range(1, len(piece))]
    flags = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': False, 'special': True}
    begin = {'SpecialToken': {'id': '<s>', 'type_id': 0}}
    text = {'Sequence': {'id': 'A', 'type_id': 0}}
    return {
        'version': '1.0',
        'truncation': None,
        'padding': None,
        'added_tokens': [{'id': index, 'content': token, **flags} for index, token in enumerate(SPECIAL)],
        'normalizer': normalizer,
        'pre_tokenizer': None,
        'post_processor': {
            'type': 'TemplateProcessing',
            'single': [begin, text],
            'pair': [begin, text, text],
            'special_tokens': {'<s>': {'id': '<s>', 'ids': [1], 'tokens': ['<s>']}},
        },
        'decoder': {
            'type': 'Sequence',
            'decoders': [
                {'type': 'Replace', 'pattern': {'String': SPACE}, 'content': ' '},
                {'type': 'ByteFallback'},
                {'type': 'Fuse'},
                {'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0},
            ],
        },
        'model': {
            'type': 'BPE',
            'dropout': None,
            'unk_token': '<unk>',
            'continuing_subword_prefix': None,
            'end_of_word_suffix': None,
            'fuse_unk': True,
            'byte_fallback': True,
            'ignore_merges': False,
            'vocab': vocab,
            'merges': [[left, right] for left, right in splits if left in vocab and right in vocab],
        },
    }
