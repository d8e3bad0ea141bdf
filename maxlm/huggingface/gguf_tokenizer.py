"""A tokenizer.json as the vocabulary of a GGUF file: byte-level BPE, as llama.cpp has it by the name `gpt2`.

The file does not hold the split of text into words, only the name of a split known to llama.cpp.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from maxlm.errors import InputError
from maxlm.storage.json_text import parse_json

# Types of llama.cpp's tokens (llama.h, llama_token_type).
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
# Split of text into words → its name in llama.cpp (llama-vocab.cpp).
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|{numbers}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
    r'\s+(?!\S)|\s+'
)
_SPLITS = {_WORDS.replace('{numbers}', r'\p{N}{1,3}'): 'llama-bpe', _WORDS.replace('{numbers}', r'\p{N}'): 'qwen2'}
_GPT2 = 'gpt-2'


class Vocabulary(NamedTuple):
    """Tokenizer fields of a file: name of the split, tokens and types by id, and merges in order."""

    split: str
    tokens: list[str]
    types: list[int]
    merges: list[str]
    # Whether texts begin with the BOS token.
    add_bos: bool


def vocabulary(text: str, vocab_size: int, source: str) -> Vocabulary:
    """The vocabulary of a tokenizer.json.

    Args:
        text: its content.
        vocab_size: ids of the model, not below those of the tokenizer.
        source: what messages call it.

    Raises:
        InputError: llama.cpp has no such tokenizers.
    """
    tokenizer = parse_json(text)
    model = tokenizer['model']
    merges = [merge if isinstance(merge, str) else ' '.join(merge) for merge in model.get('merges') or []]
    if model['type'] != 'BPE' or model.get('byte_fallback'):
        kind = 'BPE with bytes as a last resort' if model['type'] == 'BPE' else model['type']
        raise InputError(
            f'{source}: a tokenizer of kind {kind}; GGUF is written for byte-level BPE (maxlm.prepare '
            f'--tokenizer=bytes or bpe:N, those of GPT-2, Llama 3 and Qwen); export the model for Transformers instead'
        )
    split = _split(tokenizer['pre_tokenizer'], is_split=bool(merges))
    if not split or not _keeps_text(tokenizer['normalizer']):
        raise InputError(
            f'{source}: splits text into words in a way that llama.cpp has no name for; GGUF is written for the splits '
            f'of GPT-2, Llama 3 and Qwen; export the model for Transformers instead'
        )
    tokens = [f'[PAD{index}]' for index in range(vocab_size)]
    types = [UNUSED] * vocab_size
    for token, index in model['vocab'].items():
        tokens[index], types[index] = token, NORMAL
    for added in tokenizer['added_tokens']:
        tokens[added['id']], types[added['id']] = added['content'], CONTROL if added['special'] else USER_DEFINED
    # The format has no empty lists: a merge that no text has, since what it joins are no parts of words.
    merges = merges or [f'{tokens[-1]} {tokens[-1]}']
    return Vocabulary(split, tokens, types, merges, _adds_bos(tokenizer.get('post_processor')))


def _split(node: Mapping[str, Any] | None, *, is_split: bool) -> str:
    """The name of the split that a pre-tokenizer makes; '' where there is none. Without merges any split will do."""
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
    # llama.cpp leaves out the composition that Qwen's tokenizer begins with; most text is composed already.
    return normalizer is None or normalizer['type'] == 'NFC'


def _adds_bos(processor: Mapping[str, Any] | None) -> bool:
    """Returns whether a post-processor puts a special token before texts."""
    if processor is None:
        return False
    if processor['type'] == 'Sequence':
        return any(_adds_bos(step) for step in processor['processors'])
    return processor['type'] == 'TemplateProcessing' and 'SpecialToken' in processor['single'][0]
