"""Provides checkpoints of nanochat, written by PyTorch and tiktoken, with the logits of nanochat's own code.

`first.npz` and `present.npz` have random weights in float32, token ids, and the logits that nanochat's class GPT
computes for them on a CPU.

- first: `nanochat/gpt.py` of 2026-01-11 (2c4473d) with its rotary factors in float32. Its function is that of 2025.
- present: `nanochat/gpt.py` of 2026-07-03 (92d63d4), also with the last 8 logits of a row beyond the short window.
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import tiktoken
import torch
from tiktoken._educational import bpe_train

HERE = Path(__file__).parent
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
SPECIAL = (
    *('<|bos|>', '<|user_start|>', '<|user_end|>', '<|assistant_start|>', '<|assistant_end|>'),
    *('<|python_start|>', '<|python_end|>', '<|output_start|>', '<|output_end|>'),
)
TEXT = "I'm here, you'RE there. 12345 tokens; the thing is that the tokens of the text are there!\n\n  the end  "


class Reference:
    """A model of nanochat: its config, weights by name, token ids and their logits."""

    def __init__(self, name: str):
        arrays = dict(np.load(HERE / f'{name}.npz'))
        self.config: dict[str, Any] = json.loads(str(arrays.pop('config')))
        self.weights = {key[len('weights/') :]: arrays.pop(key) for key in list(arrays) if key.startswith('weights/')}
        self.arrays = arrays


def save(
    directory: Path,
    reference: Reference,
    *,
    step: int = 10,
    prefix: str = '',
    dtypes: dict[str, torch.dtype] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Writes the files of a checkpoint as nanochat does, and returns the path of the model.

    Args:
        directory: an existing directory.
        reference: the model.
        step: number of the step.
        prefix: prefix of the names of the tensors.
        dtypes: dtypes of tensors that are not float32.
        config: changes to the config.
    """
    state = {prefix + name: torch.from_numpy(array) for name, array in reference.weights.items()}
    state |= {prefix + name: state[prefix + name].to(dtype) for name, dtype in (dtypes or {}).items()}
    torch.save(state, directory / f'model_{step:06d}.pt')
    meta = {'step': step, 'val_bpb': 1.5, 'model_config': {**reference.config, **(config or {})}}
    (directory / f'meta_{step:06d}.json').write_text(json.dumps(meta))
    return directory / f'model_{step:06d}.pt'


def encoding(vocab_size: int = 300) -> tiktoken.Encoding:
    """Returns byte-level BPE as nanochat makes it, trained by tiktoken, with the special tokens after all others."""
    ranks = bpe_train(TEXT, vocab_size - len(SPECIAL), PATTERN, visualise=None)
    special = {name: len(ranks) + index for index, name in enumerate(SPECIAL)}
    return tiktoken.Encoding('rustbpe', pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=special)


def save_tokenizer(path: Path, vocab_size: int = 300) -> tiktoken.Encoding:
    """Writes a tokenizer.pkl as nanochat does, and returns the encoding."""
    made = encoding(vocab_size)
    path.write_bytes(pickle.dumps(made))
    return made
