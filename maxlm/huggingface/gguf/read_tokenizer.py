"""Converts the vocabulary of a GGUF file to a tokenizer.json and the files beside it. The inverse of `vocabulary`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from maxlm.errors import InputError
from maxlm.huggingface.gguf.vocabulary import (
    BYTES,
    CONTROL,
    GPT2,
    NORMAL,
    O200K_WITHOUT_CONTRACTIONS,
    PREPEND,
    REPLACE,
    SPACE,
    SPLITS,
    UNUSED,
    USER_DEFINED,
)
from maxlm.workdir.files import CHAT_TEMPLATE, GENERATION, TOKENIZER, TOKENIZER_CONFIG

# Names of the split of Llama 3 whose texts begin with a token if the file does not say whether they do.
_LLAMA3 = ('llama-bpe', 'llama3', 'llama-v3', 'falcon3', 'falcon-h1', 'pixtral', 'lfm2', 'midm-2.0')
# Further names that llama.cpp gives to the same splits (llama-vocab.cpp, `llama_vocab::impl::load`).
_ALIASES = {
    **dict.fromkeys(('gpt2', 'olmo', 'phi-2', 'mpt', 'mellum', 'trillion', 'gigachat', 'a.x-4.0'), GPT2),
    **dict.fromkeys(('smollm', 'refact', 'command-r', 'codeshell', 'exaone', 'minerva-7b'), 'starcoder'),
    **dict.fromkeys((*_LLAMA3, 'dbrx', 'smaug-bpe'), 'llama-bpe'),
    **dict.fromkeys(('deepseek-r1-qwen', 'stablelm2', 'megrez', 'kormo'), 'qwen2'),
    **dict.fromkeys(('llama4', 'kanana2'), 'gpt-4o'),
}
_PATTERNS = {name: patterns for patterns, name in SPLITS.items()} | {'tekken': (O200K_WITHOUT_CONTRACTIONS,)}
# Splits of tokenizers that use a word of the vocabulary without applying merges.
_WHOLE_WORDS = (*_LLAMA3, 'tekken')
# Qwen's tokenizers normalize text, which llama.cpp omits.
_NORMALIZED = ('qwen2', 'deepseek-r1-qwen')
_IDS = {'bos_token': 'bos', 'eos_token': 'eos', 'pad_token': 'padding', 'unk_token': 'unknown'}
_ENDS = ('eos', 'eot', 'eom')
_ADVICE = 'give the tokenizer of the original model with --tokenizer=FILE'


def tokenizer_files(metadata: Mapping[str, Any], source: str) -> dict[str, str]:
    """Returns the content of the tokenizer's files of a Transformers directory by name; {} without a vocabulary.

    Args:
        metadata: values of the file by key.
        source: path of the file, for messages.

    Raises:
        InputError: the vocabulary is damaged, or of a kind that is not supported.
    """
    fields = {
        key.removeprefix('tokenizer.ggml.'): value
        for key, value in metadata.items()
        if key.startswith('tokenizer.ggml.')
    }
    tokens = _list(fields, 'tokens', str, source)
    if fields.get('model', 'none') in ('none', 'no_vocab') or not tokens:
        return {}
    types = _list(fields, 'token_type', int, source) or [NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise InputError(f'{source}: has {len(tokens):,} tokens, but {len(types):,} types of tokens; convert it again')
    if fields['model'] == 'gpt2':
        tokenizer = _byte_level(fields, tokens, types, source)
        adds_beginning = fields.get('pre') in _WHOLE_WORDS
    elif fields['model'] == 'llama':
        tokenizer = _sentencepiece(fields, tokens, types, source)
        adds_beginning = True
    else:
        raise InputError(
            f'{source}: tokenizer.ggml.model={fields["model"]!r:.100} is not supported, only gpt2 and llama; {_ADVICE}'
        )
    found = {name: _token_id(fields, name, len(tokens), source) for name in (*_IDS.values(), *_ENDS)}
    ids = {name: index for name, index in found.items() if index is not None}
    adds_beginning = fields.get('add_bos_token', adds_beginning) is True and 'bos' in ids
    if fields.get('add_eos_token') is True:
        raise InputError(f'{source}: tokenizer.ggml.add_eos_token=True is not supported; {_ADVICE}')
    if adds_beginning:
        tokenizer['post_processor'] = _template(tokens[ids['bos']], ids['bos'])
    template = metadata.get('tokenizer.chat_template')
    config = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        **{key: tokens[ids[name]] for key, name in _IDS.items() if name in ids},
        'add_bos_token': adds_beginning,
        'clean_up_tokenization_spaces': False,
    }
    ends = list(dict.fromkeys(ids[name] for name in _ENDS if name in ids))
    generation = {
        **({'bos_token_id': ids['bos']} if 'bos' in ids else {}),
        **({'eos_token_id': ends if len(ends) > 1 else ends[0]} if ends else {}),
    }
    files = {TOKENIZER: json.dumps(tokenizer, ensure_ascii=False), TOKENIZER_CONFIG: json.dumps(config, indent=2)}
    files |= {GENERATION: json.dumps(generation, indent=2)} if generation else {}
    return files | ({CHAT_TEMPLATE: template} if isinstance(template, str) else {})


def _list(fields: Mapping[str, Any], key: str, kind: type, source: str) -> list[Any]:
    values = fields.get(key, [])
    if not isinstance(values, list) or any(type(value) is not kind for value in values):
        raise InputError(f'{source}: tokenizer.ggml.{key} is not a list of {kind.__name__}; convert it again')
    return values


def _token_id(fields: Mapping[str, Any], name: str, num_tokens: int, source: str) -> int | None:
    index = fields.get(f'{name}_token_id')
    if index is not None and (type(index) is not int or not 0 <= index < num_tokens):
        raise InputError(
            f'{source}: tokenizer.ggml.{name}_token_id={index!r:.100} is not below {num_tokens:,}; convert it again'
        )
    return index


def _byte_level(fields: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> dict[str, Any]:
    """Returns the tokenizer.json of a byte-level BPE."""
    name = fields.get('pre', 'default')
    patterns = _PATTERNS.get(_ALIASES.get(name, name))
    if patterns is None:
        known = ', '.join(sorted({*_PATTERNS, *_ALIASES}))
        raise InputError(
            f'{source}: tokenizer.ggml.pre={name!r:.100} names a split into words that maxlm does not know (known: '
            f'{known}); {_ADVICE}'
        )
    vocab = _vocab(tokens, types)
    merges = []
    for merge in _list(fields, 'merges', str, source):
        left, _, right = merge.partition(' ')
        # llama.cpp does not apply merges to texts that are no tokens.
        if left in vocab and right in vocab and left + right in vocab:
            merges.append([left, right])
    *splits, last = patterns
    steps: list[dict[str, Any]] = [_split(pattern) for pattern in (splits if last == GPT2 else patterns)]
    byte_level = {'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': True}
    steps.append({**byte_level, 'use_regex': last == GPT2})
    return {
        **_outer(tokens, types),
        'normalizer': {'type': 'NFC'} if name in _NORMALIZED else None,
        'pre_tokenizer': steps[0] if len(steps) == 1 else {'type': 'Sequence', 'pretokenizers': steps},
        'decoder': {**byte_level, 'use_regex': True},
        'model': {
            **_bpe(vocab, merges),
            'byte_fallback': False,
            'ignore_merges': name in _WHOLE_WORDS,
        },
    }


def _split(pattern: str) -> dict[str, Any]:
    return {'type': 'Split', 'pattern': {'Regex': pattern}, 'behavior': 'Isolated', 'invert': False}


def _sentencepiece(fields: Mapping[str, Any], tokens: list[str], types: list[int], source: str) -> dict[str, Any]:
    """Returns the tokenizer.json of a BPE of SentencePiece, with merges in the order of the scores.

    SentencePiece merges the neighbors whose concatenation is the token with the highest score (Kudo and Richardson
    2018, `bpe_model.cc`).
    """
    scores = _list(fields, 'scores', float, source)
    if len(scores) != len(tokens):
        raise InputError(f'{source}: has {len(tokens):,} tokens, but {len(scores):,} scores; convert it again')
    vocab = _vocab(tokens, types)
    if any(byte not in vocab for byte in BYTES):
        raise InputError(f'{source}: has no tokens for single bytes, such as {BYTES[0]}; {_ADVICE}')
    merges = []
    for index, token in enumerate(tokens):
        if types[index] == NORMAL:
            for stop in range(1, len(token)):
                left, right = token[:stop], token[stop:]
                if left in vocab and right in vocab:
                    merges.append((-scores[index], vocab[left], vocab[right], left, right))
    unknown = _token_id(fields, 'unknown', len(tokens), source)
    adds_space = fields.get('add_space_prefix', True) is True
    steps = [
        {'type': 'Replace', 'pattern': {'String': SPACE}, 'content': ' '},
        {'type': 'ByteFallback'},
        {'type': 'Fuse'},
    ]
    steps += [{'type': 'Strip', 'content': ' ', 'start': 1, 'stop': 0}] if adds_space else []
    return {
        **_outer(tokens, types),
        'normalizer': PREPEND if adds_space else REPLACE,
        'pre_tokenizer': None,
        'decoder': {'type': 'Sequence', 'decoders': steps},
        'model': {
            **_bpe(vocab, [[left, right] for *_, left, right in sorted(merges)]),
            'unk_token': None if unknown is None else tokens[unknown],
            'fuse_unk': True,
            'byte_fallback': True,
            'ignore_merges': False,
        },
    }


def _outer(tokens: list[str], types: list[int]) -> dict[str, Any]:
    """Returns the parts of a tokenizer.json that do not depend on the algorithm."""
    added = [
        {
            'id': index,
            'content': tokens[index],
            'single_word': False,
            'lstrip': False,
            'rstrip': False,
            'normalized': False,
            'special': kind == CONTROL,
        }
        for index, kind in enumerate(types)
        if kind in (CONTROL, USER_DEFINED)
    ]
    return {'version': '1.0', 'truncation': None, 'padding': None, 'added_tokens': added, 'post_processor': None}


def _bpe(vocab: dict[str, int], merges: list[list[str]]) -> dict[str, Any]:
    return {
        'type': 'BPE',
        'dropout': None,
        'unk_token': None,
        'continuing_subword_prefix': None,
        'end_of_word_suffix': None,
        'fuse_unk': False,
        'vocab': vocab,
        'merges': merges,
    }


def _vocab(tokens: list[str], types: list[int]) -> dict[str, int]:
    """Returns the ids by token. Tokens that are never produced are omitted after the last one that is."""
    omitted = (CONTROL, USER_DEFINED, UNUSED)
    last = max((index for index, kind in enumerate(types) if kind not in omitted), default=-1)
    vocab: dict[str, int] = {}
    for index, token in enumerate(tokens[: last + 1]):
        vocab.setdefault(token, index)
    return vocab


def _template(token: str, index: int) -> dict[str, Any]:
    """Returns the post-processor that begins texts with a token."""
    special, text = {'SpecialToken': {'id': token, 'type_id': 0}}, {'Sequence': {'id': 'A', 'type_id': 0}}
    second = [{'SpecialToken': {'id': token, 'type_id': 1}}, {'Sequence': {'id': 'B', 'type_id': 1}}]
    return {
        'type': 'TemplateProcessing',
        'single': [special, text],
        'pair': [special, text, *second],
        'special_tokens': {token: {'id': token, 'ids': [index], 'tokens': [token]}},
    }
