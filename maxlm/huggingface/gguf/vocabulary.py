"""Converts a tokenizer.json to the vocabulary of a GGUF file.

- Byte-level BPE, which llama.cpp calls `gpt2`. The file does not contain the regular expressions that split text into
  words, only the name of a split that llama.cpp knows.
- BPE of SentencePiece, which llama.cpp calls `llama`. The file has a score per token instead of merges, and llama.cpp
  merges the neighbors whose concatenation is the token with the highest score.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, NamedTuple

from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json

# Types of llama.cpp's tokens (llama.h, llama_token_type).
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
# Regular expressions that split text into words, one after the other → their name in llama.cpp (llama-vocab.cpp).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{numbers}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r'\s+(?!\S)|\s+'
)
# The o200k split separates words before an upper-case letter that follows a lower-case letter.
_UPPER, _LOWER, _ENDINGS = r'\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}', r'\p{Ll}\p{Lm}\p{Lo}\p{M}', "(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf'[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{_ENDINGS}|'
    r'\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# The split of Mistral's tokenizers since 2024, which llama.cpp calls tekken.
O200K_WITHOUT_CONTRACTIONS = _O200K.replace(_ENDINGS, '').replace(r'\p{N}{1,3}', r'\p{N}')
_DEEPSEEK = (
    r'\p{N}{1,3}',
    '[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+',
    '[!"#$%&\'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+|'
    ' ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+',
)
GPT2 = 'gpt-2'
SPLITS = {
    (GPT2,): GPT2,
    (r'\p{N}', GPT2): 'starcoder',
    (_WORDS.replace('{numbers}', r'\p{N}{1,3}'),): 'llama-bpe',
    (_WORDS.replace('{numbers}', r'\p{N}'),): 'qwen2',
    (_O200K,): 'gpt-4o',
    _DEEPSEEK: 'deepseek-v3',
}
# Steps of SentencePiece's tokenizers, in which `▁` represents a space.
SPACE = '▁'
REPLACE = {'type': 'Replace', 'pattern': {'String': ' '}, 'content': SPACE}
PREPEND = {'type': 'Sequence', 'normalizers': [{'type': 'Prepend', 'prepend': SPACE}, REPLACE]}
# This step changes nothing, because the normalizer has replaced all spaces.
_AFTER_SPACES = {'type': 'Split', 'pattern': {'String': ' '}, 'behavior': 'MergedWithPrevious', 'invert': False}
BYTES = [f'<0x{byte:02X}>' for byte in range(256)]


class Vocabulary(NamedTuple):
    """Tokenizer fields of a GGUF file.

    Attributes:
        model: llama.cpp's name of the algorithm.
        split: name of the split into words.
        tokens: tokens by id.
        types: token types by id.
        merges: merges in order of priority; empty with scores.
        scores: scores by id; empty with merges.
        add_space: whether texts start with a space.
        unknown_id: id of the token for unknown text; None with merges.
    """

    model: str
    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    scores: list[float]
    add_space: bool
    unknown_id: int | None


def vocabulary(text: str, vocab_size: int, source: str) -> Vocabulary:
    """Returns the vocabulary of a tokenizer.json.

    Args:
        text: content of the file.
        vocab_size: number of ids of the model, at least that of the tokenizer.
        source: name of the file in error messages.

    Raises:
        InputError: llama.cpp does not support the tokenizer.
    """
    tokenizer = parse_json(text)
    model = tokenizer['model']
    if model['type'] != 'BPE':
        raise InputError(
            f'{source}: the tokenizer type is {model["type"]}, but GGUF export supports only BPE (maxlm prepare '
            '--tokenizer=bytes or bpe:N, and the tokenizers of most models); export the model for Transformers instead'
        )
    if model.get('byte_fallback'):
        return _sentencepiece(tokenizer, vocab_size, source)
    merges = [merge if isinstance(merge, str) else ' '.join(merge) for merge in model.get('merges') or []]
    split = _split(tokenizer['pre_tokenizer'], is_split=bool(merges))
    if not split or not _keeps_text(tokenizer['normalizer']):
        raise InputError(
            f'{source}: llama.cpp does not support the pre-tokenizer or normalizer; GGUF export supports those of '
            'GPT-2, StarCoder2, Llama 3, Qwen, DeepSeek-V3 and gpt-oss; export the model for Transformers instead'
        )
    tokens, types = _tokens(tokenizer, vocab_size)
    # The format has no empty lists, so add a merge that never applies, because no word contains its parts.
    merges = merges or [f'{tokens[-1]} {tokens[-1]}']
    return Vocabulary('gpt2', split, tokens, types, merges, scores=[], add_space=False, unknown_id=None)


def _tokens(tokenizer: Mapping[str, Any], vocab_size: int) -> tuple[list[str], list[int]]:
    """Returns the tokens and their types by id."""
    tokens = [f'[PAD{index}]' for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, index in tokenizer['model']['vocab'].items():
        tokens[index], types[index] = token, NORMAL
    for added in tokenizer['added_tokens']:
        tokens[added['id']], types[added['id']] = added['content'], CONTROL if added['special'] else USER_DEFINED
    return tokens, types


def _sentencepiece(tokenizer: Mapping[str, Any], vocab_size: int, source: str) -> Vocabulary:
    """Returns the vocabulary of BPE with byte fallback, as in Llama 2, Mistral and Gemma."""
    model, add_space = tokenizer['model'], _adds_space(tokenizer['normalizer'], tokenizer['pre_tokenizer'])
    vocab, unknown = model['vocab'], model['unk_token']
    tokens, types = _tokens(tokenizer, vocab_size)
    merges = [tuple(merge.split(' ') if isinstance(merge, str) else merge) for merge in model['merges']]
    ids = [vocab.get(token) for token in (*BYTES, unknown)]
    if add_space is None or None in ids or model.get('ignore_merges') or not _are_of_scores(merges, tokenizer):
        raise InputError(
            f'{source}: GGUF export supports BPE with byte_fallback only as converted from SentencePiece, with the '
            'normalizers of Llama 2 and Gemma; export the model for Transformers instead'
        )
    for index in ids[:-1]:
        types[index] = BYTE
    types[ids[-1]] = UNKNOWN
    for index, token in enumerate(tokens):
        # Merges produce these tokens. As user-defined tokens, their text would be printed without spaces.
        if types[index] == USER_DEFINED and SPACE in token:
            types[index] = NORMAL
    ranks: dict[str, int] = {}
    for rank, (left, right) in enumerate(merges):
        ranks.setdefault(left + right, rank)
    scores = [-float(ranks.get(token, len(merges))) for token in tokens]
    return Vocabulary('llama', 'default', tokens, types, [], scores, add_space, ids[-1])


def _are_of_scores(merges: list[tuple[str, ...]], tokenizer: Mapping[str, Any]) -> bool:
    """Returns True if scores express the merges: all merges of a token have one priority, and none is missing."""
    vocab, known = tokenizer['model']['vocab'], set(merges)
    # These tokens are found before merges apply.
    others = {*BYTES, *(added['content'] for added in tokenizer['added_tokens'])}
    produced = [left + right for left, right in merges]
    order = [token for token, _ in itertools.groupby(token for token in produced if token not in others)]
    return len(order) == len(set(order)) and not any(
        token[:stop] in vocab and token[stop:] in vocab and (token[:stop], token[stop:]) not in known
        for token in vocab
        if token not in others
        for stop in range(1, len(token))
    )


def _adds_space(normalizer: Mapping[str, Any] | None, pre_tokenizer: Mapping[str, Any] | None) -> bool | None:
    """Returns whether texts start with a space, or None if llama.cpp does not support the steps."""
    if normalizer is None and pre_tokenizer is not None and pre_tokenizer['type'] == 'Metaspace':
        # llama.cpp also adds the space after each special token and before a leading space.
        first = pre_tokenizer.get('prepend_scheme') in ('first', 'always')
        is_plain = pre_tokenizer['replacement'] == SPACE and pre_tokenizer.get('split') is False
        return True if first and is_plain else None
    if pre_tokenizer not in (None, _AFTER_SPACES):
        return None
    return True if normalizer == PREPEND else False if normalizer == REPLACE else None


def _split(node: Mapping[str, Any] | None, *, is_split: bool) -> str:
    """Returns the name of a pre-tokenizer's split, or ''. Without merges, any split gives the same result."""
    if node is None:
        return ''
    *steps, last = node['pretokenizers'] if node['type'] == 'Sequence' else [node]
    if last['type'] != 'ByteLevel' or last['add_prefix_space']:
        return ''
    if not steps and not is_split:
        return GPT2
    patterns = [_pattern(step) for step in steps] + ([GPT2] if last['use_regex'] else [])
    return SPLITS.get(tuple(patterns), '')


def _pattern(step: Mapping[str, Any]) -> str:
    """Returns the regular expression whose matches are words, or ''."""
    if step['type'] == 'Digits' and step['individual_digits']:
        return r'\p{N}'
    is_plain = step['type'] == 'Split' and step['behavior'] == 'Isolated' and not step['invert']
    pattern: str = step['pattern'].get('Regex', '') if is_plain else ''
    return pattern


def _keeps_text(normalizer: Mapping[str, Any] | None) -> bool:
    # llama.cpp omits the NFC normalization of Qwen's tokenizer; most text is already normalized.
    return normalizer is None or normalizer['type'] == 'NFC' or normalizer.get('normalizers') == []
