"""Converts a tokenizer.json to the vocabulary of a GGUF file: byte-level BPE, which llama.cpp calls `gpt2`.

The file does not contain the regular expression that splits text into words, only the name of a split that llama.cpp
knows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json

# Types of llama.cpp's tokens (llama.h, llama_token_type).
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# Regular expression that splits text into words → its name in llama.cpp (llama-vocab.cpp).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{numbers}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r'\s+(?!\S)|\s+'
)
_SPLITS = {_WORDS.replace('{numbers}', r'\p{N}{1,3}'): 'llama-bpe', _WORDS.replace('{numbers}', r'\p{N}'): 'qwen2'}
_GPT2 = 'gpt-2'


class Vocabulary(NamedTuple):
    """Tokenizer fields of a GGUF file.

    Attributes:
        split: name of the split into words.
        tokens: tokens by id.
        types: token types by id.
        merges: merges in order of priority.
        add_bos: whether texts start with the BOS token.
    """

    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    add_bos: bool


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
    merges = [merge if isinstance(merge, str) else ' '.join(merge) for merge in model.get('merges') or []]
    if model['type'] != 'BPE' or model.get('byte_fallback'):
        kind = 'BPE with byte_fallback' if model['type'] == 'BPE' else model['type']
        raise InputError(
            f'{source}: the tokenizer type is {kind}, but GGUF export supports only byte-level BPE (maxlm.prepare '
            '--tokenizer=bytes or bpe:N, and the tokenizers of GPT-2, Llama 3 and Qwen); export the model for '
            'Transformers instead'
        )
    split = _split(tokenizer['pre_tokenizer'], is_split=bool(merges))
    if not split or not _keeps_text(tokenizer['normalizer']):
        raise InputError(
            f'{source}: llama.cpp does not support the pre-tokenizer or normalizer; GGUF export supports those of '
            'GPT-2, Llama 3 and Qwen; export the model for Transformers instead'
        )
    tokens = [f'[PAD{index}]' for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, index in model['vocab'].items():
        tokens[index], types[index] = token, NORMAL
    for added in tokenizer['added_tokens']:
        tokens[added['id']], types[added['id']] = added['content'], CONTROL if added['special'] else USER_DEFINED
    # The format has no empty lists, so add a merge that never applies, because no word contains its parts.
    merges = merges or [f'{tokens[-1]} {tokens[-1]}']
    return Vocabulary(split, tokens, types, merges, _adds_bos(tokenizer.get('post_processor')))


def _split(node: Mapping[str, Any] | None, *, is_split: bool) -> str:
    """Returns the name of a pre-tokenizer's split, or ''. Without merges, any split gives the same result."""
    if node is None:
        return ''
    steps = node['pretokenizers'] if node['type'] == 'Sequence' else [node]
    if steps[-1]['type'] != 'ByteLevel' or steps[-1]['add_prefix_space']:
        return ''
    if len(steps) == 1:
        return _GPT2 if steps[-1]['use_regex'] or not is_split else ''
    first = steps[0]
    if len(steps) > 2 or steps[-1]['use_regex'] or first['type'] != 'Split' or first['behavior'] != 'Isolated':
        return ''
    return '' if first['invert'] else _SPLITS.get(first['pattern'].get('Regex', ''), '')


def _keeps_text(normalizer: Mapping[str, Any] | None) -> bool:
    # llama.cpp omits the NFC normalization of Qwen's tokenizer; most text is already normalized.
    return normalizer is None or normalizer['type'] == 'NFC'


def _adds_bos(processor: Mapping[str, Any] | None) -> bool:
    """Returns True if a post-processor prepends a special token."""
    if processor is None:
        return False
    if processor['type'] == 'Sequence':
        return any(_adds_bos(step) for step in processor['processors'])
    return processor['type'] == 'TemplateProcessing' and 'SpecialToken' in processor['single'][0]
