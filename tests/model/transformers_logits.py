"""Logits of Transformers models for a batch of packed documents."""

import numpy as np
import torch

from maxlm.model.layers.masks import layer_windows
from tests.huggingface.transformers_models import VOCAB

LENGTH = 24


def make_batch():
    """Returns three rows of random ids: one document, three documents, and two documents with padding.

    Each row has a document of more than 16 tokens, so that dynamic scaling applies to an original context of 16.
    """
    rng = np.random.default_rng(0)
    segments = np.ones((3, LENGTH), np.int32)
    segments[1, 3:20], segments[1, 20:] = 2, 3
    segments[2, 3:20], segments[2, 20:] = 2, 0
    starts = np.maximum.accumulate(np.where(np.diff(segments, axis=1, prepend=-1) != 0, np.arange(LENGTH), 0), axis=1)
    targets = rng.integers(0, VOCAB, segments.shape, dtype=np.int32)
    last = np.diff(segments, axis=1, append=-1) != 0
    return {
        'tokens': rng.integers(0, VOCAB, segments.shape, dtype=np.int32),
        'targets': targets,
        'weights': np.where(last | (segments == 0), 0, 1).astype(np.float32),
        'segments': segments,
        'positions': np.arange(LENGTH, dtype=np.int32) - starts.astype(np.int32),
    }


BATCH = make_batch()


def one_document(batch):
    """Returns the first row three times, because Transformers scales dynamically by the longest row of a batch."""
    return {name: np.repeat(array[:1], 3, axis=0) for name, array in batch.items()}


def batch_of(name):
    return one_document(BATCH) if 'dynamic' in name else BATCH


def attention_masks(batch, config):
    """Returns additive masks [B, 1, T, T] of documents in Transformers' format, for all layers or by layer type."""
    segments, index = batch['segments'], np.arange(LENGTH)

    def mask(window):
        behind = index[:, None] - index[None, :]
        seen = (behind >= 0) & ((behind < window) if window else True)
        seen = seen & (segments[:, :, None] == segments[:, None, :])
        return torch.from_numpy(np.where(seen, 0, np.finfo(np.float32).min).astype(np.float32)[:, None])

    windows = set(layer_windows(config))
    if len(windows) == 1:
        return mask(windows.pop())
    return {'full_attention': mask(0), 'sliding_attention': mask(config.sliding_window)}


def their_logits(model, batch, config):
    return model(
        input_ids=torch.from_numpy(batch['tokens']).long(),
        position_ids=torch.from_numpy(batch['positions']).long(),
        attention_mask=attention_masks(batch, config),
        use_cache=False,
    ).logits
