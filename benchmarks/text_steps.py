"""Batches of text, for checks that run the training step directly.

The batches are those of `benchmarks.step --tokens=text`, so that a check can repeat what that benchmark recorded.
"""

from __future__ import annotations

import numpy as np

from benchmarks.step import MEAN_DOCUMENT, random_batch, repository_text, text_tokens
from maxlm.config.schema import Config
from maxlm.parallel.layout import Layout
from maxlm.training.batch import Batch


def text_batch(rng: np.random.Generator, text: np.ndarray, config: Config) -> dict[str, np.ndarray]:
    """Returns a batch from random positions of a text."""
    rows, window = config.train.global_batch_size, config.data.seq_len
    batch = random_batch(rng, rows, window, config.model.vocab_size, MEAN_DOCUMENT)
    return batch | text_tokens(rng, text, rows, window)


def text_batches(config: Config, layout: Layout, count: int) -> list[Batch]:
    """Returns `count` different batches of the text of this repository, on the devices."""
    rng = np.random.default_rng(config.train.seed)
    text = repository_text()
    return [layout.put_batch(text_batch(rng, text, config), config.train.global_batch_size) for _ in range(count)]
