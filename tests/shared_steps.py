"""Fixture with which training runs of one process trace and compile equal steps only once.

Each run creates new jitted functions, so JAX cannot share them between runs of one process. A run of three steps spends
most of its time on tracing and compiling.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from maxlm.config.schema import Config
from maxlm.evaluation import validation
from maxlm.parallel.layout import Layout
from maxlm.planning import forecast
from maxlm.trainer import checkpointing, step_runner
from maxlm.training.compile import CompiledStep, compile_train_step
from maxlm.training.state import TrainState, init_state
from maxlm.training.step import make_eval_step

# Keys that change neither a step nor the initial state, as `test_shared_steps.py` verifies.
OTHER_SECTIONS = ('eval', 'checkpoint', 'export', 'alerts', 'metrics', 'profile')
OTHER_KEYS = {
    'data': (
        *(
            'path',
            'sources',
            'sources_schedule',
            'seed',
            'shuffle_shards',
            'allow_dataset_change',
            'num_threads',
            'prefetch_buffer_size',
        ),
        *('num_workers', 'cache_dir', 'cache_limit_gib', 'download_threads', 'warn_epochs'),
    ),
    'train': ('init_from', 'price_per_hour', 'log_every', 'hang_timeout_seconds', 'compilation_cache_dir'),
    'guard': (
        *('max_consecutive_skips', 'max_rollbacks', 'rollback_skip_steps', 'max_hours', 'max_dollars'),
        *('early_stopping_patience', 'early_stopping_min_delta'),
    ),
    'grpo': ('reward', 'eval_reward', 'prompts', 'eval_prompts', 'eval_num_generations'),
}
BATCH_KEYS = (
    *('num_steps', 'num_tokens', 'num_epochs', 'hours', 'dollars'),
    *('global_batch_size', 'global_batch_size_tokens', 'per_device_batch_size'),
)


def computed_by(config: Config) -> Any:
    """Returns a key that is equal for configs with equal step and initial state."""
    sections: dict[str, Any] = dict.fromkeys(OTHER_SECTIONS)
    for section, names in OTHER_KEYS.items():
        sections[section] = dataclasses.replace(getattr(config, section), **dict.fromkeys(names))
    config = dataclasses.replace(config, **sections)
    if config.optimizer.schedule == 'constant':
        # Only the schedule depends on the number of steps.
        config = dataclasses.replace(config, train=dataclasses.replace(config.train, num_steps=None))
    return config


class SharedSteps:
    """Cache of steps and initial states."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Any] = {}

    def _once(self, key: Hashable, make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def compile_train_step(
        self,
        config: Config,
        layout: Layout,
        abstract: TrainState,
        num_sources: int = 0,
        *,
        options: Mapping[str, Any] | None = None,
        holds: bool = False,
    ) -> CompiledStep:
        key = ('train', computed_by(config), layout, num_sources, repr(options), holds)
        return self._once(
            key, lambda: compile_train_step(config, layout, abstract, num_sources, options=options, holds=holds)
        )

    def make_eval_step(self, config: Config, layout: Layout, num_sources: int = 0) -> Callable[..., Any]:
        """Returns the same function for equal configs, so that `jax.jit` finds the compiled program."""
        key = ('eval', computed_by(config), layout, num_sources)
        return self._once(key, lambda: make_eval_step(config, layout, num_sources))

    def init_state(self, config: Config, layout: Layout, *, compiler_options: dict | None = None) -> TrainState:
        """Returns a copy, because steps donate their input state."""

        def make() -> tuple[TrainState, Callable[[TrainState], TrainState]]:
            state = init_state(config, layout, compiler_options=compiler_options)
            shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
            return state, jax.jit(lambda tree: jax.tree.map(jnp.copy, tree), out_shardings=shardings)

        key_config = computed_by(config)
        # The initial state does not depend on the batch size or the number of steps.
        train = dataclasses.replace(key_config.train, **dict.fromkeys(BATCH_KEYS))
        key = ('init', dataclasses.replace(key_config, train=train, data=None), layout)
        state, copy = self._once(key, make)
        return copy(state)


@functools.cache
def _of_process() -> SharedSteps:
    return SharedSteps()


@pytest.fixture(scope='module')
def shared_steps() -> Iterator[None]:
    """Shares steps and initial states among the training runs of this process."""
    steps = _of_process()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forecast, 'compile_train_step', steps.compile_train_step)
        patch.setattr(step_runner, 'compile_train_step', steps.compile_train_step)
        patch.setattr(validation, 'make_eval_step', steps.make_eval_step)
        patch.setattr(checkpointing, 'init_state', steps.init_state)
        yield
