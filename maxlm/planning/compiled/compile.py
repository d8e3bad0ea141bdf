"""The real training step, compiled before there is a state or a batch."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config
from maxlm.parallel.layout import Layout
from maxlm.training.objectives import BATCH_TYPES, GRPO_TYPES
from maxlm.training.state import TrainState
from maxlm.training.step import make_train_step

# Products are not taken apart into steps between which pieces of an operand go round (Wang et al. 2023): their operands
# are read again in every step, and a small Llama on 16 chips of v4 had seven times the temporary memory.
WHOLE_PRODUCTS = {'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}
# XLA's options by kind of device. What each hides: benchmarks/tpu_overlap.py. Others have none: all that hides gathers
# there is to carry them on within products, which libtpu calls unsafe but on v5e, and since 0.0.50 refuses; products
# that are taken apart hide sums of gradients.
DEVICE_OPTIONS: dict[str, dict[str, Any]] = {
    # Gathers by all-reduces unless it is told otherwise.
    'TPU v4': {
        **WHOLE_PRODUCTS,
        'xla_tpu_prefer_async_allgather_to_allreduce': 'true',
        'xla_enable_async_all_gather': 'true',
    },
    # A product carries on with a gather, or with a sum of gradients, that was started before: MaxText's flags for
    # "continuation fusion". Sums of whole matrices are not put together for the end of a layer, where nothing is left
    # to hide them.
    'TPU v5 lite': {
        **WHOLE_PRODUCTS,
        'xla_enable_async_all_gather': 'true',
        'xla_enable_async_all_reduce': 'true',
        'xla_tpu_enable_async_collective_fusion': 'true',
        'xla_tpu_enable_async_collective_fusion_fuse_all_gather': 'true',
        'xla_tpu_enable_async_collective_fusion_fuse_all_reduce': 'true',
        'xla_tpu_enable_async_collective_fusion_multiple_steps': 'true',
        'xla_tpu_overlap_compute_collective_tc': 'true',
        'xla_jf_crs_combiner_threshold_in_bytes': str(4 * 2**20),
    },
}


class CompiledStep(NamedTuple):
    """`step(state, batch) → (state, metrics)`; the state given is donated."""

    step: jax.stages.Compiled
    seconds: float

    def memory_bytes(self) -> dict[str, int] | None:
        """Per device, by kind: `state` (what lives from step to step, and the batch), `temporary`, and `host` if any.

        What the step returns takes the place of what it was given. None where the backend does not tell.
        """
        analysis = self.step.memory_analysis()
        if analysis is None:
            return None
        memory = {'state': analysis.argument_size_in_bytes, 'temporary': analysis.temp_size_in_bytes}
        host = analysis.host_argument_size_in_bytes + analysis.host_temp_size_in_bytes
        return {**memory, 'host': host} if host else memory

    def total_bytes(self) -> int | None:
        """What a device must have for the step; None where the backend does not tell.

        GPUs and CPUs allocate all that is temporary as one block of the size that is told. Of a TPU that size is up to
        a third more than ever lives, and it is the peak, arguments included, that has to fit.
        """
        memory = self.memory_bytes()
        if memory is None:
            return None
        total = memory['state'] + memory['temporary']
        analysis = self.step.memory_analysis()
        assert analysis is not None
        return analysis.peak_memory_in_bytes or total if self.platform == 'tpu' else total

    @property
    def platform(self) -> str:
        """Of the devices: cpu, gpu or tpu."""
        sharding: Any = jax.tree.leaves(self.step.input_shardings)[0]
        return next(iter(sharding.device_set)).platform


def compile_train_step(
    config: Config,
    layout: Layout,
    abstract: TrainState,
    num_sources: int = 0,
    *,
    options: Mapping[str, Any] | None = None,
) -> CompiledStep:
    """Lowers and compiles the step of a resolved config for the layout's devices; see `make_train_step`.

    `options` are those of XLA, beside what a kind of device needs.
    """
    start = time.perf_counter()
    shape = (config.train.global_batch_size, config.data.seq_len)
    kinds = {**BATCH_TYPES, **(GRPO_TYPES if config.train.objective == 'grpo' else {})}
    batch = {name: jax.ShapeDtypeStruct(shape, kind, sharding=layout.batch) for name, kind in kinds.items()}
    if num_sources:
        batch['sources'] = jax.ShapeDtypeStruct(shape[:1], jnp.int32, sharding=layout.named('batch'))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    step = jax.jit(
        make_train_step(config, layout, num_sources), donate_argnums=0, out_shardings=(shardings, layout.named())
    )
    kind = layout.mesh.devices.flat[0].device_kind
    compiled = step.lower(abstract, batch).compile(compiler_options={**DEVICE_OPTIONS.get(kind, {}), **(options or {})})
    return CompiledStep(compiled, time.perf_counter() - start)
