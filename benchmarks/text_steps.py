"""Configs resolved for this machine and batches of text, for checks that run the training step directly.

The batches are those of `benchmarks.step --tokens=text`, so that a check can repeat what that benchmark recorded.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.step import random_batch, repository_text, text_tokens
from maxlm.config.loading import load
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.hardware.chips import capability_of
from maxlm.parallel.layout import Layout
from maxlm.training.objectives import Batch

# Vocabulary of configs that take it from the data set, and mean tokens of a document; as in `benchmarks.step`.
VOCABULARY = 50_257
MEAN_DOCUMENT = 1000


def resolve_here(spec: str, overrides: Sequence[str]) -> Config:
    """Returns a config resolved for the devices of this process.

    Raises:
        InputError: the config or an override is not usable.
    """
    config = load(spec, overrides)
    return resolve(
        config,
        platform=jax.default_backend(),
        num_devices=jax.device_count(),
        vocab_size=config.model.vocab_size or VOCABULARY,
        windows=1,
        capability=capability_of(jax.local_devices()[0]),
    )


def text_batches(config: Config, layout: Layout, count: int) -> list[Batch]:
    """Returns `count` different batches of the text of this repository, on the devices."""
    rng = np.random.default_rng(config.train.seed)
    text = repository_text()
    rows, window = config.train.global_batch_size, config.data.seq_len
    batches = []
    for _ in range(count):
        batch = random_batch(rng, rows, window, config.model.vocab_size, MEAN_DOCUMENT)
        batch |= text_tokens(rng, text, rows, window)
        batches.append(layout.put_batch(batch, rows))
    return batches
