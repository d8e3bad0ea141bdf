"""Pipeline parallelism: stages of layers on different devices, which work on different micro-batches at one time.

One program for all devices, as in GSPMD (Xu et al. 2021, §3.3): what the stages hold is an array whose leading axis is
sharded over the mesh axis `stage`, the work of all of them is one `vmap`, and handing on is a shift along that axis.
With repeats the layers go round the stages several times (Narayanan et al. 2021, interleaved schedule), which makes
idle time shorter. The backward pass is the derivative of this loop: the same pipeline, run from its end.

Shapes: S stages, R repeats, P layers of a chunk, L = R·S·P layers, M micro-batches, B batch, T length, D dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from maxlm.parallel.partitioning import Axes

Tree = TypeVar('Tree')

STAGE_AXES = ('stage', 'batch', 'length', 'activation')
SLOT_AXES = ('stage', 'micro_batch', 'batch', 'length', 'activation')


def run_pipeline(
    run: Callable[[Tree, jax.Array, Any, jax.Array], jax.Array],
    params_L: Tree,
    x_MBTD: jax.Array,
    side_M: Any,
    *,
    stages: int,
    repeats: int,
    constrain: Callable[[jax.Array, Axes], jax.Array],
    place_params: Callable[[Tree], Tree],
    spmd_axis: str | None = 'stage',
) -> jax.Array:
    """All layers in their order, applied to each micro-batch.

    Chunk c = r·S + s of the layers is the work of stage s in repeat r. In iteration t stage s has item t - s before it:
    micro-batch (t - s) mod M in repeat (t - s) // M. Before its first and after its last item a stage computes on other
    values of the run, which are as finite as these, and nothing that counts reads the result.

    What crosses stages: [B, T, D] from each to the next in every iteration; [M, B, T, D] once at the end, and once for
    the gradient of `x_MBTD`. Parameters that are sharded over `stage` by layer stay where they are. With repeats a
    stage's chunks do not follow each other in `params_L`: the parameters change places once before the loop, and their
    gradients once after it. That is an all-to-all where R divides S or S divides R; else XLA gathers all layers on
    every stage for a moment.

    What the backward pass keeps: of each of the R·M + S - 1 iterations the stage's input [B, T, D]. It computes the
    chunk once more from there.

    Args:
        run: (params_P, x_BTD, side, first_layer) → x_BTD, the layers of one chunk; `first_layer` is a traced integer.
        params_L: arrays [L, …] in the order of the layers.
        x_MBTD: the micro-batches.
        side_M: arrays [M, …] that a micro-batch brings along to every stage, each whole on all of them.
        stages: S.
        repeats: R; above 1 there must be at least S micro-batches.
        constrain: places an array by the names of its axes; 'stage' is the one of stages.
        place_params: places the parameters as [R, S, P, …].
        spmd_axis: the mesh axis of the stages, for the placements inside `run`; None without a mesh.

    Returns:
        The stream after the last layer [M, B, T, D].
    """
    S, R, M = stages, repeats, x_MBTD.shape[0]
    L = jax.tree.leaves(params_L)[0].shape[0]
    assert L % (R * S) == 0, f'{L} layers are not {R} repeats of {S} stages'
    assert R == 1 or M >= S, f'{M} micro-batches leave the first of {S} stages nothing to start its second repeat with'
    P = L // (R * S)
    params_RSP = place_params(jax.tree.map(lambda leaf: leaf.reshape(R, S, P, *leaf.shape[1:]), params_L))
    first_S = jnp.arange(S)[:, None, None, None] == 0

    # All that is kept of an iteration are this function's inputs; the slots below are linear in it and not kept.
    @partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
    def run_stages(params_RSP: Tree, side_M: Any, x_SBTD: jax.Array, t: jax.Array) -> jax.Array:
        def run_stage(stage: jax.Array, params_RP: Tree, x_BTD: jax.Array) -> jax.Array:
            repeat = jnp.clip((t - stage) // M, 0, R - 1)
            params_P = jax.tree.map(partial(_at, index=repeat), params_RP)
            side = jax.tree.map(partial(_at, index=(t - stage) % M), side_M)
            return run(params_P, x_BTD, side, (repeat * S + stage) * P)

        run_all = jax.vmap(run_stage, in_axes=(0, 1, 0), spmd_axis_name=spmd_axis)
        return run_all(jnp.arange(S), params_RSP, x_SBTD)

    def iterate(carry: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        slots_SMBTD, arrived_SBTD = carry
        waiting_SBTD = jax.lax.dynamic_index_in_dim(slots_SMBTD, t % M, axis=1, keepdims=False)
        x_SBTD = constrain(jnp.where(first_S, waiting_SBTD, arrived_SBTD), STAGE_AXES)
        y_SBTD = constrain(run_stages(params_RSP, side_M, x_SBTD, t), STAGE_AXES)
        arrived_SBTD = constrain(_handed_on(y_SBTD), STAGE_AXES)
        # From the last stage to the first comes item t - S + 1. Until there is one, what comes goes where the first
        # stage has just read: before an item needs this slot again, a true result has come to it.
        slot = jnp.where(t < S - 1, t, t - S + 1) % M
        slots_SMBTD = jax.lax.dynamic_update_index_in_dim(slots_SMBTD, arrived_SBTD, slot, axis=1)
        return (constrain(slots_SMBTD, SLOT_AXES), arrived_SBTD), None

    # A slot per micro-batch, in which the first stage finds its input, then what it has to repeat, then the result. The
    # other stages' slots are never read; they are there because all devices run one program.
    slots_SMBTD = constrain(jnp.broadcast_to(x_MBTD, (S, *x_MBTD.shape)), SLOT_AXES)
    (slots_SMBTD, _), _ = jax.lax.scan(iterate, (slots_SMBTD, slots_SMBTD[:, 0]), jnp.arange(R * M + S - 1))
    # A sum with zeros, since taking the first of a sharded axis would gather all of it; not jnp.sum, which would send
    # bfloat16 as float32.
    y_MBTD = jax.lax.reduce_sum(jnp.where(first_S[..., None], slots_SMBTD, 0), axes=(0,))
    return constrain(y_MBTD, SLOT_AXES[1:])


def bubble_fraction(stages: int, repeats: int, micro_batches: int) -> float:
    """Share of a pipeline's time in which a stage is idle: (S - 1) / (R·M + S - 1)."""
    return (stages - 1) / (repeats * micro_batches + stages - 1)


def _at(leaf: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


@jax.custom_vjp
def _handed_on(y_S: jax.Array) -> jax.Array:
    """What each stage gets from the one before it, the first from the last.

    The derivative is a shift too. JAX would derive two, for what wraps around and for the rest.
    """
    return jnp.roll(y_S, 1, axis=0)


_handed_on.defvjp(lambda y_S: (_handed_on(y_S), None), lambda _, grad_S: (jnp.roll(grad_S, -1, axis=0),))
