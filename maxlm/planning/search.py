"""Searches for the fastest layout of a config that fits into a target's memory: micro-batch, rematerialization, mesh.

These settings do not change the results of a run. Settings that change them slightly or cost much time (moments in
bfloat16, state in host memory) are tried only if nothing else fits.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from maxlm.config.schema import AUTO, Config, MeshConfig
from maxlm.config.validation import MAX_UNROLLED_LAYERS
from maxlm.errors import InputError
from maxlm.formatting import format_bytes
from maxlm.log import progress_bar
from maxlm.planning.forecast import Forecast, estimate
from maxlm.planning.machine import Machine
from maxlm.planning.targets import Target

# Resolves a config for a known machine.
Resolve = Callable[[Config], Config]
# Compiles a resolved config and returns the forecast.
Compile = Callable[[Config], Forecast]

# From the policy that saves most activations to the one that saves fewest.
REMATS = ('none', 'dots_no_batch', 'full')
LARGEST_MICRO_BATCH = 64
# Minimum sequence length for which context parallelism is tried.
LONG = 8192
# Maximum number of programs to compile until one fits, since estimates are off by a few percent.
MAX_COMPILED = 5


class Override(NamedTuple):
    """A new value for one config key."""

    key: str
    value: Any

    @property
    def override(self) -> str:
        return f'--config.{self.key}={self.value}'


class Candidate(NamedTuple):
    """A set of overrides and the resulting forecast."""

    changes: tuple[Override, ...]
    forecast: Forecast


def search_layouts(config: Config, machine: Machine, resolve: Resolve) -> list[Candidate]:
    """Returns the layouts whose estimate fits, the fastest first. Last resorts are tried only if no other layout fits.

    Args:
        config: unresolved config; its own mesh, batch and policy are among the candidates.
        machine: target machine.
        resolve: function that resolves a config for the target.
    """
    meshes = list(candidate_meshes(config, machine.target))
    for last_resort in _last_resorts(config):
        ways = [
            (*_mesh_changes(config.mesh, mesh), *changes, *last_resort)
            for mesh in meshes
            for changes in _policies(
                config, offload='remat' in str(last_resort), is_gpu=machine.target.chip.platform == 'gpu'
            )
        ]
        with progress_bar('search', total=len(ways), unit='layout', show=True) as bar:
            found = []
            for way in ways:
                if candidate := _try(config, machine, resolve, way):
                    found.append(candidate)
                bar.update()
        fitting = [candidate for candidate in found if candidate.forecast.fits]
        if fitting:
            # Ties are broken by the number of changes, then by memory.
            return sorted(
                fitting,
                key=lambda c: (round(c.forecast.time.total, 6), len(c.changes), c.forecast.needed),
            )
    return []


def verify_by_compiling(candidates: list[Candidate], compiled: Compile) -> Candidate | None:
    """Returns the first candidate that also fits as compiled, or None if no compiled candidate fits.

    Candidates that need as much memory as one that was too large when compiled are skipped.
    """
    too_large = float('inf')
    attempts = 0
    for candidate in candidates:
        if candidate.forecast.needed >= too_large:
            continue
        forecast = compiled(candidate.forecast.config)
        if forecast.fits:
            return Candidate(candidate.changes, forecast)
        attempts += 1
        if attempts == MAX_COMPILED:
            break
        # An estimate that was too low here is likely too low for similar candidates.
        too_large = candidate.forecast.needed * forecast.available / forecast.needed
    return None


def choose_micro_batch(config: Config, machine: Machine, resolve: Resolve, compiled: Compile) -> Config:
    """Replaces `train.per_device_batch_size=auto` in an unresolved config by the largest size that fits.

    Raises:
        InputError: not even one sequence at a time fits.
    """
    assert config.train.per_device_batch_size == AUTO
    tried = []
    for size in _micro_batches(config):
        candidate = _try(config, machine, resolve, (Override('train.per_device_batch_size', size),))
        if candidate is not None:
            tried.append(candidate)
    if not tried:
        # Raises the InputError that describes the problem of the config.
        resolve(_with(config, (Override('train.per_device_batch_size', 1),)))
    tried.sort(key=lambda candidate: -candidate.forecast.config.train.per_device_batch_size)
    fitting = [candidate for candidate in tried if candidate.forecast.fits] or tried[-1:]
    chosen = verify_by_compiling(fitting, compiled)
    if chosen is None:
        needed, available = fitting[-1].forecast.needed, fitting[-1].forecast.available
        raise InputError(
            f'train.per_device_batch_size=auto: one sequence per device needs {format_bytes(needed)}, but '
            f'{format_bytes(available)} are available; run maxlm plan --search to find another mesh and '
            'model.remat_policy'
        )
    return _with(config, chosen.changes)


def candidate_meshes(config: Config, target: Target) -> Iterator[MeshConfig]:
    """Yields the configured mesh and the usual meshes of such a target.

    Tensor and expert parallelism stay within a node; replicas and pipeline stages use the slow links; sequences are
    split only if they are long.
    """
    yield config.mesh
    num_devices, islands = target.num_devices, target.num_islands
    within = num_devices // islands
    stages = {1} | {stage for stage in (islands, 2 * islands, 4) if 1 < stage <= config.model.num_layers}
    for tensor in _powers(min(within, 8)):
        for context in _powers(min(within // tensor, 8)) if config.data.seq_len >= LONG else (1,):
            experts = _powers(min(within // (tensor * context), 8)) if config.model.num_experts else [1]
            for expert, stage in itertools.product(experts, sorted(stages) if num_devices > 8 else (1,)):
                for replica in {1, islands}:
                    rest, odd = divmod(num_devices, tensor * context * stage * replica * expert)
                    if odd or not rest:
                        continue
                    pure = tensor == context == stage == 1
                    for zero in (3, 2, 1) if rest * expert > 1 and pure else (3, 2) if rest * expert > 1 else (3,):
                        yield MeshConfig(
                            replica=replica,
                            stage=stage,
                            fsdp=rest,
                            expert=expert,
                            context=context,
                            tensor=tensor,
                            zero_stage=zero,
                            host_offload=config.mesh.host_offload,
                        )


def _last_resorts(config: Config) -> Iterator[tuple[Override, ...]]:
    """Yields sets of last-resort overrides, from none to the most expensive."""
    yield ()
    if config.optimizer.name == 'adamw' and config.optimizer.moment_dtype == 'float32':
        yield (Override('optimizer.moment_dtype', 'bfloat16'),)
    if config.optimizer.name == 'adamw' and config.mesh.host_offload == 'none':
        yield (Override('mesh.host_offload', 'optimizer'),)
        yield (Override('model.remat_policy', 'offload'), Override('mesh.host_offload', 'all'))


def _policies(config: Config, *, offload: bool, is_gpu: bool) -> Iterator[tuple[Override, ...]]:
    # Unrolled layers move less memory on GPUs, and take long to compile on TPUs.
    loops = (True, False) if is_gpu and config.model.num_layers <= MAX_UNROLLED_LAYERS else (config.model.scan_layers,)
    for micro_batch in _micro_batches(config):
        is_new = micro_batch != config.train.per_device_batch_size
        batch = (Override('train.per_device_batch_size', micro_batch),) if is_new else ()
        if offload:
            yield batch
            continue
        for remat, loop in itertools.product(dict.fromkeys((config.model.remat_policy, *REMATS)), loops):
            changes = batch
            if remat != config.model.remat_policy:
                changes = (*changes, Override('model.remat_policy', remat))
            if loop != config.model.scan_layers:
                changes = (*changes, Override('model.scan_layers', loop))
            yield changes


def _micro_batches(config: Config) -> list[int]:
    """Returns the sizes that can divide a device's share of the batch, which depends on the mesh."""
    batch = config.train.global_batch_size or config.train.global_batch_size_tokens // config.data.seq_len
    return [size for size in range(min(batch, LARGEST_MICRO_BATCH), 0, -1) if batch % size == 0]


def _mesh_changes(old: MeshConfig, new: MeshConfig) -> tuple[Override, ...]:
    if new == old:
        return ()
    changed = [field.name for field in dataclasses.fields(MeshConfig)]
    return tuple(
        Override(f'mesh.{name}', getattr(new, name)) for name in changed if getattr(new, name) != getattr(old, name)
    )


def _try(config: Config, machine: Machine, resolve: Resolve, changes: tuple[Override, ...]) -> Candidate | None:
    try:
        resolved = resolve(_with(config, changes))
    except InputError:
        # The sizes do not divide each other.
        return None
    return Candidate(changes, estimate(resolved, machine))


def _with(config: Config, changes: tuple[Override, ...]) -> Config:
    for key, value in changes:
        section, _, name = key.partition('.')
        config = dataclasses.replace(
            config, **{section: dataclasses.replace(getattr(config, section), **{name: value})}
        )
    return config


def _powers(limit: int) -> list[int]:
    return [2**exponent for exponent in range(limit.bit_length()) if 2**exponent <= limit]
