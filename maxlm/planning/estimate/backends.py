"""Memory overheads of the compilers of each platform."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Backend:
    """Memory overheads of a compiler, read off compiled programs. Most are numbers of copies.

    Attributes:
        platform: platform of the devices: cpu, gpu or tpu.
        ffn: arrays [B, T, F] in the compute dtype in the backward pass of a layer whose activation has no gate.
        gated: the same for an activation with a gate.
        gated_again: the same for an activation with a gate if gate and up are recomputed.
        stream: arrays [B, T, D] in the backward pass of a layer.
        layer: copies of one layer's matrices in the compute dtype.
        scores: float32 scores of a block of queries, for attention without a fused kernel.
        table: bytes per element of the embedding during the layers: once gathered for the lookup's gradient.
        logits: float32 logits [B, chunk, V] and their gradients.
        teacher_logits: the same for the logits of a teacher and the divergence.
        lanes: the last axis of an array is padded to a multiple of this number of elements.
        turns_stacks: stacks that are sharded along their last axis are transposed before they are gathered.
        keeps_outside_loops: rematerialization saves no memory in blocks outside of a loop over layers.
    """

    platform: str
    ffn: float
    gated: float
    gated_again: float
    stream: float
    layer: float
    scores: float
    table: float
    logits: float
    teacher_logits: float
    lanes: int
    turns_stacks: bool
    keeps_outside_loops: bool


# Number of rows to which the second to last axis of an array is padded on a TPU.
SUBLANES = 8
# Fitted to some programs of tests/planning/estimate/programs.json; for CPUs, to a few small programs.
BACKENDS = {
    # The embedding is gathered, and its gradient is summed, in float32.
    'gpu': Backend('gpu', 4.6, 5.6, 7.2, 1.5, 0.8, 3.0, 4.0, 2.6, 1.0, 1, True, False),
    'tpu': Backend('tpu', 4.6, 5.6, 7.2, 1.5, 0.8, 3.0, 2.0, 2.6, 1.0, 128, False, False),
    'cpu': Backend('cpu', 9.0, 10.0, 11.0, 1.5, 0.8, 3.0, 4.0, 2.6, 4.0, 1, False, True),
}
