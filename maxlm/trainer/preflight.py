"""Preflight checks: compiles the step for the present devices, and rejects it if it exceeds their memory."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from typing import NamedTuple

import jax

from maxlm.config.schema import AUTO, Config
from maxlm.errors import InputError
from maxlm.formatting import GIB, format_bytes
from maxlm.hardware.chips import host_memory
from maxlm.log import logger
from maxlm.model.parameters import model_parameters
from maxlm.parallel.layout import Layout, make_layout
from maxlm.planning.estimate.state_bytes import checkpoint_bytes
from maxlm.planning.forecast import Forecast, compile_for, estimate
from maxlm.planning.machine import present_machine, sized_config
from maxlm.planning.report import suggestions_text
from maxlm.planning.search import Candidate, choose_micro_batch, search_layouts, verify_by_compiling
from maxlm.runtime.compilation_cache import CompilationCache
from maxlm.training.decisions.run_control import RunControl, ended, with_rates
from maxlm.training.decisions.run_length import at_start
from maxlm.training.state import TrainState, abstract_state

Resolve = Callable[[Config], Config]
FIRST_DECISIONS = RunControl()
# Steps whose estimated memory exceeds the limit by this factor are rejected without compilation. Estimates are more
# accurate than that.
SURELY_TOO_LARGE = 2


class PreparedStep(NamedTuple):
    """The first step of a run, which fits the devices.

    Attributes:
        config: resolved config, without the decisions of the run.
        layout: layout of the run's devices.
        abstract: shapes, dtypes and shardings of the state.
        forecast: forecast with the compiled step at the current sequence length; an estimate for a finished run.
    """

    config: Config
    layout: Layout
    abstract: TrainState
    forecast: Forecast


def check_size(config: Config, resolve: Resolve) -> None:
    """Rejects a step that cannot fit these devices. Nothing is compiled or allocated.

    The size is estimated from the config. Steps closer to the limit are checked by `compile_step`.

    Args:
        config: config before it is resolved.
        resolve: resolves a config for the devices of this run.

    Raises:
        InputError: the step needs more than `SURELY_TOO_LARGE` times the memory of a device.
    """
    sized = sized_config(config, resolve)
    machine = present_machine(sized, measured=False)
    forecast = estimate(sized, machine)
    if forecast.needed > SURELY_TOO_LARGE * forecast.available:
        # The search is slow for many layers. It is skipped if the parameters exceed device and host memory.
        parameters = model_parameters(sized.model) * 4 // machine.target.num_devices
        hopeless = parameters > machine.available + host_memory() // jax.local_device_count()
        candidates = [] if hopeless else search_layouts(config, machine, resolve)
        # Estimates of time are not available here, so the layout with the fewest changes is the best.
        best = min(candidates, key=lambda c: (len(c.changes), c.forecast.needed), default=None)
        raise InputError(_refusal(forecast, best))


def check_checkpoint_size(config: Config) -> None:
    """Rejects a run whose checkpoints are larger than `checkpoint.max_gib`.

    Args:
        config: resolved config.

    Raises:
        InputError: a single checkpoint does not fit.
    """
    limit, size = config.checkpoint.max_bytes, checkpoint_bytes(config)
    if limit and size > limit:
        needed = math.ceil(2 * size / GIB * 1000) / 1000
        raise InputError(
            f'checkpoint.max_gib={config.checkpoint.max_gib:g}: one checkpoint needs {format_bytes(size)}; set it to '
            f'{needed:g} or more for two checkpoints (while one is saved, the previous one is kept), or to 0'
        )


def _refusal(forecast: Forecast, advice: Candidate | None) -> str:
    would = 'none of the layouts tried fits; use more devices or a smaller model'
    if advice:
        would = f'this would fit: {suggestions_text(advice.changes)}'
    return (
        f'the step does not fit: it needs {format_bytes(forecast.needed)} per device, '
        f'{format_bytes(forecast.needed - forecast.available)} more than the available '
        f'{format_bytes(forecast.available)}; {would}'
    )


def compile_step(
    config: Config,
    resolve: Resolve,
    *,
    num_sources: int,
    first_step: int = 0,
    decisions: RunControl = FIRST_DECISIONS,
    compiling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    cache: CompilationCache | None = None,
) -> PreparedStep:
    """Compiles the step with which a run starts or resumes.

    Args:
        config: config before it is resolved.
        resolve: resolves a config for the devices of this run.
        num_sources: number of data sources, see `make_train_step`.
        first_step: step from which the run resumes.
        decisions: decisions of the run so far.
        compiling: returns a context manager that is entered during compilation.
        cache: stores the measurement of a CPU.

    Raises:
        InputError: the step does not fit; the message contains the missing memory and a config that fits, if any.
    """
    machine = present_machine(sized_config(config, resolve), cache=cache)

    def compiled(resolved: Config) -> Forecast:
        now = with_rates(resolved, decisions)
        at_first = now.at_context(now.context_at(min(first_step, now.train.num_steps - 1)))
        logger.info('compiling the training step (seconds to minutes; later runs use the compilation cache)')
        with compiling():
            return compile_for(at_first, machine, make_layout(resolved.mesh), num_sources, holds=True)

    if config.train.per_device_batch_size == AUTO:
        config = choose_micro_batch(config, machine, resolve, compiled)
        logger.info(
            f'train.per_device_batch_size=auto: using {config.train.per_device_batch_size}, the largest that fits'
        )
    resolved = resolve(config)
    layout = make_layout(resolved.mesh)
    abstract = abstract_state(resolved, layout)
    if ended(resolved, at_start(decisions, resolved, first_step), first_step):
        # The run is finished, so no step is compiled.
        return PreparedStep(resolved, layout, abstract, estimate(resolved, machine))
    forecast = compiled(resolved)
    if not forecast.fits:
        logger.info('the step does not fit; searching for a configuration that fits')
        raise InputError(_refusal(forecast, verify_by_compiling(search_layouts(config, machine, resolve), compiled)))
    return PreparedStep(resolved, layout, abstract, forecast)
