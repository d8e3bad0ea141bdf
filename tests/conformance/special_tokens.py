"""Tokenizers and small models of Transformers whose files name their special tokens in different ways."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import tokenizers
import torch
import transformers
from tokenizers import decoders, models, pre_tokenizers, processors

ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())
# Ids of the tokens before the alphabet.
SPECIAL = ('<s>', '</s>', '<|endoftext|>', '<|im_end|>', '[EOS]', '<pre>')
ID = {name: index for index, name in enumerate(SPECIAL)}
VOCAB_SIZE = len(SPECIAL) + len(ALPHABET)


class Files(NamedTuple):
    """Contents of the JSON files of a model directory; None = no such file.

    Attributes:
        post: tokens that the post-processor puts before and after a text.
        special: tokens that tokenizer.json marks as special. The other tokens of SPECIAL are in its vocabulary.
        extra: other entries of tokenizer.json.
    """

    tokenizer_config: dict[str, Any] | None = None
    special_tokens_map: dict[str, Any] | None = None
    generation_config: dict[str, Any] | None = None
    config: dict[str, Any] | None = None
    post: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())
    special: tuple[str, ...] = SPECIAL[:4]
    extra: Mapping[str, Any] = MappingProxyType({})


def make_library(files: Files) -> tokenizers.Tokenizer:
    """Returns a byte-level tokenizer."""
    vocab = {name: index for index, name in enumerate([*SPECIAL, *ALPHABET])}
    library = tokenizers.Tokenizer(models.BPE(vocab, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens(list(files.special))
    before, after = files.post
    if before or after:
        library.post_processor = processors.TemplateProcessing(
            single=[*before, '$A', *after],
            pair=[*before, '$A', '$B', *after],
            special_tokens=[(name, ID[name]) for name in {*before, *after}],
        )
    return library


def write_tokenizer(directory: Path, files: Files) -> Path:
    """Writes the tokenizer files into a new directory."""
    directory.mkdir(parents=True)
    facts = json.loads(make_library(files).to_str())
    extra = dict(files.extra)
    facts['model'] |= extra.pop('model', {})
    (directory / 'tokenizer.json').write_text(json.dumps({**facts, **extra}))
    for name in ('tokenizer_config', 'special_tokens_map', 'generation_config', 'config'):
        content = getattr(files, name)
        if content is not None:
            (directory / f'{name}.json').write_text(json.dumps(content))
    return directory


def write_model(directory: Path, files: Files, *, layers: int = 1) -> Path:
    """Writes a Llama model with random weights and the tokenizer files into a new directory."""
    torch.manual_seed(0)
    sizes = {'hidden_size': 32, 'intermediate_size': 56, 'num_attention_heads': 4, 'num_key_value_heads': 2}
    config = transformers.LlamaConfig(
        vocab_size=VOCAB_SIZE, num_hidden_layers=layers, max_position_embeddings=64, initializer_range=0.5, **sizes
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(directory)
    (directory / 'generation_config.json').unlink()
    saved = json.loads((directory / 'config.json').read_text())
    for key in ('bos_token_id', 'eos_token_id', 'pad_token_id'):
        saved.pop(key, None)
    write_tokenizer(directory / 'tokenizer', files._replace(config=None))
    for path in (directory / 'tokenizer').iterdir():
        path.rename(directory / path.name)
    (directory / 'tokenizer').rmdir()
    # Without the keys, Transformers uses its defaults.
    ids = {'bos_token_id': None, 'eos_token_id': None, **(files.config or {})}
    (directory / 'config.json').write_text(json.dumps({**saved, **ids}))
    return directory
