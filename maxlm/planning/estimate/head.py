"""Estimates the memory of the embedding and of the output head.

Shapes, all per device: B rows of a micro-batch, T sequence length, D width, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from maxlm.config.schema import Config
from maxlm.planning.estimate.backends import Backend


class HeadMemory(NamedTuple):
    """Bytes of the embedding during the layers, and of the head's backward pass."""

    table: int
    work: int


def head_memory(config: Config, shape_BTV: tuple[int, int, int], backend: Backend) -> HeadMemory:
    """Estimates the memory of a resolved config's embedding and head on a device.

    Args:
        config: config of the run.
        shape_BTV: sizes on the device.
        backend: overheads of the compiler.
    """
    model, (B, T, V) = config.model, shape_BTV
    width = np.dtype(np.float32).itemsize if model.dtype == 'float32' else 2
    elements = V * model.dim
    if model.reward_head:
        # The hidden states in float32 and their gradient.
        return HeadMemory(int(elements * backend.table), int(elements * width + 8 * B * T * model.dim))
    tied = width if model.tie_embeddings else 0
    chunk = min(config.loss_chunk, T)
    stream = B * T * model.dim * width
    # The gradient of the head is summed in float32. The reduced number of copies was read off the programs of
    # configs/mix.py. On GPUs without a loop over layers, where a tied head is not transposed, it was also read off
    # those of configs/1b.py.
    is_plain = backend.platform == 'gpu' and not model.scan_layers
    reduced = model.tie_embeddings and (model.norm == 'rmsnorm' or is_plain)
    copies = backend.logits - (1 if reduced else 0)
    # Each module of multi-token prediction has logits and a gradient of the head and of its hidden states of its own.
    # XLA computes the losses at the same time.
    losses = 1 + model.mtp_depth
    copies += model.mtp_depth
    work = copies * 4 * B * chunk * V + elements * (4 * losses + width) + (2 + losses) * stream
    if config.teacher is not None:
        # The logits of the teacher, its head, and its hidden states in two layouts.
        work += backend.teacher_logits * 4 * B * chunk * V + width * config.teacher.dim * (V + 2 * B * T)
    return HeadMemory(int(elements * (backend.table + tied)), int(work))
