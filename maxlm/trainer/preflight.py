"""Before a run touches data: its step is compiled for the devices that are here, and refused if it cannot fit them."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from maxlm.config.schema import AUTO, Config
from maxlm.errors import InputError
from maxlm.formatting import format_bytes
from maxlm.hardware.chips import host_memory
from maxlm.log import logger
from maxlm.parallel.layout import Layout, make_layout
from maxlm.planning.estimate.parameters import model_parameters
from maxlm.planning.forecast import Forecast, compile_for, estimate
from maxlm.planning.machine import present_machine
from maxlm.planning.report import suggestions_text
from maxlm.planning.search import Candidate, choose_micro_batch, search_layouts, verify_by_compiling
from maxlm.training.run_control import RunControl, ended, with_rates
from maxlm.training.run_length import at_start
from maxlm.training.state import TrainState, abstract_state

Resolve = Callable[[Config], Config]
FIRST_DECISIONS = RunControl()
# Estimates of memory are closer to what the compiler needs than this.
SURELY_TOO_LARGE = 2


class PreparedStep(NamedTuple):
    """A run whose first step fits."""

    # Without what the run has decided on its way.
    config: Config
    layout: Layout
    abstract: TrainState
    # Compiled, at the length of the sequences that the run starts or goes on with; of a run that is done, an estimate.
    forecast: Forecast


def sample_config(config: Config, resolve: Resolve) -> Config:
    """A config resolved for these devices; where train.per_device_batch_size=auto, with 1, before it is known
    how many fit."""
    if config.train.per_device_batch_size == AUTO:
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, per_device_batch_size=1))
    return resolve(config)


def check_size(config: Config, resolve: Resolve) -> None:
    """Refuses a step that cannot fit these devices, by arithmetic on the config; nothing is traced or allocated.

    The compiler decides on a step that is closer to the limit: see `compile_step`.

    Args:
        config: not resolved.
        resolve: of a config for the devices of this run.

    Raises:
        InputError: the step needs more than `SURELY_TOO_LARGE` times the memory of a device.
    """
    sample = sample_config(config, resolve)
    machine = present_machine(sample, measured=False)
    forecast = estimate(sample, machine)
    if forecast.needed > SURELY_TOO_LARGE * forecast.available:
        # Beyond that the search, which takes a while for many layers, has nothing to find.
        parameters = model_parameters(sample.model) * 4 // machine.target.num_devices
        hopeless = parameters > machine.available + host_memory() // jax.local_device_count()
        candidates = [] if hopeless else search_layouts(config, machine, resolve)
        # Without times, the way that changes least.
        best = min(candidates, key=lambda c: (len(c.changes), c.forecast.needed), default=None)
        raise InputError(_refusal(forecast, best))


def _refusal(forecast: Forecast, advice: Candidate | None) -> str:
    would = 'nothing that was tried would fit; take more devices or a smaller model'
    if advice:
        would = f'this would fit: {suggestions_text(advice.changes)}'
    return (
        f'the step needs {format_bytes(forecast.needed)} of each device and may have '
        f'{format_bytes(forecast.available)}, {format_bytes(forecast.needed - forecast.available)} too few; {would}'
    )


def compile_step(
    config: Config,
    resolve: Resolve,
    *,
    num_sources: int,
    first_step: int = 0,
    decisions: RunControl = FIRST_DECISIONS,
    compiling: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
) -> PreparedStep:
    """Compiles the step that a run starts or goes on with.

    Args:
        config: not resolved.
        resolve: of a config for the devices of this run.
        num_sources: as `make_train_step` takes them.
        first_step: from which the run will go on.
        decisions: of the run so far.
        compiling: entered while the compiler works.

    Raises:
        InputError: the step does not fit; the message says by how much, and what would fit.
    """
    machine = present_machine(sample_config(config, resolve))

    def compiled(resolved: Config) -> Forecast:
        now = with_rates(resolved, decisions)
        at_first = now.at_context(now.context_at(min(first_step, now.train.num_steps - 1)))
        with compiling():
            return compile_for(at_first, machine, make_layout(resolved.mesh), num_sources)

    if config.train.per_device_batch_size == AUTO:
        config = choose_micro_batch(config, machine, resolve, compiled)
        logger.info(f'train.per_device_batch_size=auto: {config.train.per_device_batch_size} fit')
    resolved = resolve(config)
    layout = make_layout(resolved.mesh)
    abstract = abstract_state(resolved, layout)
    if ended(resolved, at_start(decisions, resolved, first_step), first_step):
        # There is nothing to compile for.
        return PreparedStep(resolved, layout, abstract, estimate(resolved, machine))
    forecast = compiled(resolved)
    if not forecast.fits:
        logger.info('the step does not fit; looking for what would')
        raise InputError(_refusal(forecast, verify_by_compiling(search_layouts(config, machine, resolve), compiled)))
    return PreparedStep(resolved, layout, abstract, forecast)
