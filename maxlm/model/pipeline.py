"""Pipeline parallelism: stages of layers on different devices work on different micro-batches at the same time.

All devices run one program, as in GSPMD (Xu et al. 2021, §3.3). The states of all stages form one array whose leading
axis is sharded over the mesh axis `stage`. One `vmap` runs all stages, and a shift along that axis sends the results to
the next stage. With repeats, the layers use the stages several times (Narayanan et al. 2021, interleaved schedule),
which reduces idle time. The backward pass is the derivative of this loop, which is the same pipeline in reverse.

Shapes: S stages, R repeats, P layers of a chunk, L = R·S·P layers, M micro-batches, B batch, T length, D dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.parallel.partitioning import Axes

Tree = TypeVar('Tree')

STAGE_AXES = ('stage', 'batch', 'length', 'activation')
SLOT_AXES = ('stage', 'micro_batch', 'batch', 'length', 'activation')


def run_pipeline(
    run: Callable[[Tree, jax.Array, Any, jax.Array], tuple[jax.Array, Any]],
    params_L: Tree,
    x_MBTD: jax.Array,
    side_M: Any,
    *,
    stages: int,
    repeats: int,
    constrain: Callable[[jax.Array, Axes], jax.Array],
    place_params: Callable[[Tree], Tree],
    spmd_axis: str | None = 'stage',
) -> tuple[jax.Array, Any]:
    """Applies all layers in order to each micro-batch.

    Stage s runs chunk c = r·S + s of the layers in repeat r. In iteration t, stage s processes item t - s, which is
    micro-batch (t - s) mod M in repeat (t - s) // M. Before its first and after its last item, a stage processes other
    finite values of the run, and the result is ignored.

    Communication between stages: each iteration sends [B, T, D] from every stage to the next. [M, B, T, D] is sent once
    at the end, and once for the gradient of `x_MBTD`. Parameters that are sharded over `stage` by layer are not moved.
    With repeats, the chunks of a stage are not adjacent in `params_L`, so the parameters are permuted once before the
    loop, and their gradients once after it. The permutation is an all-to-all if R divides S or S divides R. Otherwise
    XLA temporarily gathers all layers on every stage.

    Memory of the backward pass: each of the R·M + S - 1 iterations saves the stage's input [B, T, D]. The backward pass
    recomputes the chunk from it.

    Args:
        run: (params_P, x_BTD, side, first_layer) → x_BTD and statistics, the layers of one chunk; `first_layer` is a
            traced integer. The statistics are a tree of arrays [P, …], or None.
        params_L: arrays [L, …] in the order of the layers. Later arrays may have fewer layers, as many in each chunk.
        x_MBTD: the micro-batches.
        side_M: additional arrays [M, …] of the micro-batches, replicated on all stages.
        stages: number of stages S.
        repeats: number of repeats R. If R > 1, at least S micro-batches are required.
        constrain: constrains the sharding of an array by the names of its axes; 'stage' is the axis of stages.
        place_params: constrains the sharding of parameters [R, S, P, …].
        spmd_axis: mesh axis of the stages, for sharding constraints inside of `run`; None without a mesh.

    Returns:
        The stream after the last layer, [M, B, T, D], and the statistics, [M, L, …].
    """
    S, R, M = stages, repeats, x_MBTD.shape[0]
    L = jax.tree.leaves(params_L)[0].shape[0]
    assert L % (R * S) == 0, f'{L} layers are not {R} repeats of {S} stages'
    assert R == 1 or M >= S, f'{M} micro-batches leave the first of {S} stages nothing to start its second repeat with'
    P = L // (R * S)
    params_RSP = place_params(jax.tree.map(lambda leaf: leaf.reshape(R, S, -1, *leaf.shape[1:]), params_L))
    first_S = jnp.arange(S)[:, None, None, None] == 0

    # Only the inputs of this function are saved per iteration. The slots below are linear in its result, so they are
    # not saved.
    @partial(jax.checkpoint, prevent_cse=False, policy=jax.checkpoint_policies.nothing_saveable)
    def run_stages(params_RSP: Tree, side_M: Any, x_SBTD: jax.Array, t: jax.Array) -> tuple[jax.Array, Any]:
        def run_stage(stage: jax.Array, params_RP: Tree, x_BTD: jax.Array) -> tuple[jax.Array, Any]:
            repeat = jnp.clip((t - stage) // M, 0, R - 1)
            params_P = jax.tree.map(partial(_at, index=repeat), params_RP)
            side = jax.tree.map(partial(_at, index=(t - stage) % M), side_M)
            return run(params_P, x_BTD, side, (repeat * S + stage) * P)

        run_all = jax.vmap(run_stage, in_axes=(0, 1, 0), spmd_axis_name=spmd_axis)
        return run_all(jnp.arange(S), params_RSP, x_SBTD)

    def iterate(carry: tuple[jax.Array, jax.Array], t: jax.Array) -> tuple[tuple[jax.Array, jax.Array], Any]:
        slots_SMBTD, arrived_SBTD = carry
        waiting_SBTD = jax.lax.dynamic_index_in_dim(slots_SMBTD, t % M, axis=1, keepdims=False)
        x_SBTD = constrain(jnp.where(first_S, waiting_SBTD, arrived_SBTD), STAGE_AXES)
        y_SBTD, stats_SP = run_stages(params_RSP, side_M, x_SBTD, t)
        y_SBTD = constrain(y_SBTD, STAGE_AXES)
        arrived_SBTD = constrain(_handed_on(y_SBTD), STAGE_AXES)
        # The first stage receives item t - S + 1 from the last stage. Before the first item, the received values go to
        # the slot that the first stage has just read. A result overwrites them before the slot is read again.
        slot = jnp.where(t < S - 1, t, t - S + 1) % M
        slots_SMBTD = jax.lax.dynamic_update_index_in_dim(slots_SMBTD, arrived_SBTD, slot, axis=1)
        return (constrain(slots_SMBTD, SLOT_AXES), arrived_SBTD), stats_SP

    # One slot per micro-batch contains the input of the first stage, then the input of its next repeat, then the
    # result. The slots of all other stages are never read; they exist because all devices run one program.
    slots_SMBTD = constrain(jnp.broadcast_to(x_MBTD, (S, *x_MBTD.shape)), SLOT_AXES)
    (slots_SMBTD, _), stats_TSP = jax.lax.scan(iterate, (slots_SMBTD, slots_SMBTD[:, 0]), jnp.arange(R * M + S - 1))
    # A sum with zeros, because indexing a sharded axis would gather it. `jnp.sum` would send bfloat16 as float32.
    y_MBTD = jax.lax.reduce_sum(jnp.where(first_S[..., None], slots_SMBTD, 0), axes=(0,))
    # Stage s processes micro-batch m in repeat r in iteration s + r·M + m. Statistics of other iterations are ignored.
    m_MRS, r_MRS, s_MRS = np.indices((M, R, S))
    stats_ML = jax.tree.map(
        lambda leaf: leaf[s_MRS + r_MRS * M + m_MRS, s_MRS].reshape(M, L, *leaf.shape[3:]), stats_TSP
    )
    return constrain(y_MBTD, SLOT_AXES[1:]), stats_ML


def bubble_fraction(stages: int, repeats: int, micro_batches: int) -> float:
    """Returns the fraction of time in which a pipeline stage is idle, (S - 1) / (R·M + S - 1)."""
    return (stages - 1) / (repeats * micro_batches + stages - 1)


def _at(leaf: jax.Array, index: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(leaf, index, keepdims=False)


@jax.custom_vjp
def _handed_on(y_S: jax.Array) -> jax.Array:
    """Shifts values to the next stage, and from the last stage to the first.

    The derivative is defined as one shift. JAX would derive two, one for the values that wrap around.
    """
    return jnp.roll(y_S, 1, axis=0)


_handed_on.defvjp(lambda y_S: (_handed_on(y_S), None), lambda _, grad_S: (jnp.roll(grad_S, -1, axis=0),))
