"""Measures time, memory, compilation and program size of the step over the sizes of model and batch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.growth_curves import Curve
from benchmarks.step import random_batch
from maxlm.config.loading import build, default
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.parallel.layout import make_layout
from maxlm.planning.compiled.hlo import parse_hlo
from maxlm.training.compile import compile_train_step
from maxlm.training.state import abstract_state, init_state

# Small enough for steps of milliseconds, but large enough for matrix products to dominate.
BASE: dict[str, Any] = {
    'model.family': 'llama',
    'model.num_layers': 2,
    'model.dim': 128,
    'model.num_heads': 2,
    'model.ffn_dim': 384,
    'model.vocab_size': 256,
    'model.dtype': 'float32',
    'data.seq_len': 128,
    'train.num_steps': 100,
    'train.global_batch_size': 4,
    'optimizer.learning_rate': 1e-3,
}
HEAD_DIM = 64
SAME_PROGRAM = 'same instructions, different shapes'


class Axis(NamedTuple):
    """Sizes of an axis, their settings, and the expected exponents with reasons.

    Attributes:
        label: label of the axis.
        sizes: sizes of the axis.
        settings: returns the config overrides of a size.
        time: expected exponent of the step time and its reason.
        memory: expected exponent of the memory and its reason.
        program: expected exponent of the program size and its reason.
        control: name, settings and sizes of an alternative whose program grows.
    """

    label: str
    sizes: tuple[int, ...]
    settings: Callable[[int], dict[str, Any]]
    time: tuple[float, str]
    memory: tuple[float, str]
    program: tuple[float, str] = (0.0, SAME_PROGRAM)
    control: tuple[str, dict[str, Any], tuple[int, ...]] | None = None


AXES: dict[str, Axis] = {
    'depth': Axis(
        'layers',
        (1, 2, 4, 8, 16, 32),
        lambda size: {'model.num_layers': size},
        time=(1.0, 'equal work per layer'),
        memory=(1.0, 'state and saved activations of each layer'),
        program=(0.0, 'one layer is compiled and looped'),
        control=('unrolled layers', {'model.scan_layers': False}, (1, 2, 4, 8)),
    ),
    'width': Axis(
        'width',
        (64, 128, 256, 512, 1024),
        lambda size: {'model.dim': size, 'model.num_heads': size // HEAD_DIM, 'model.ffn_dim': 3 * size},
        time=(2.0, 'matrices are square in the width'),
        memory=(2.0, 'matrices and their moments'),
    ),
    'context': Axis(
        'sequence length',
        (128, 256, 512, 1024, 2048, 4096),
        lambda size: {'data.seq_len': size, 'train.global_batch_size': 1},
        time=(2.0, 'attention; below the crossover, matrix products dominate (1)'),
        memory=(1.0, 'saved activations per token; attention scores are never materialized'),
    ),
    'vocabulary': Axis(
        'token ids',
        (1024, 2048, 4096, 8192, 16384, 32768),
        lambda size: {'model.vocab_size': size, 'model.num_layers': 1},
        time=(1.0, 'one logit per id'),
        memory=(1.0, 'embedding, head, their moments, and the logits of one chunk'),
    ),
    'batch': Axis(
        'batch size (sequences)',
        (1, 2, 4, 8, 16, 32),
        lambda size: {'train.global_batch_size': size},
        time=(1.0, 'equal work per sequence'),
        memory=(1.0, 'saved activations of each sequence'),
    ),
    'accumulation': Axis(
        'micro-batches of 2 sequences',
        (1, 2, 4, 8, 16, 32),
        lambda size: {'train.global_batch_size': 2 * size, 'train.per_device_batch_size': 2},
        time=(1.0, 'micro-batches run one after another'),
        memory=(0.0, 'activations of one micro-batch'),
    ),
}


class Case:
    """A compiled step of a config with state and batch."""

    def __init__(self, settings: dict[str, Any]):
        self.config = make_config(settings)
        layout = make_layout(self.config.mesh, jax.devices()[:1])
        self.compiled = compile_train_step(self.config, layout, abstract_state(self.config, layout))
        rows, window = self.config.train.global_batch_size, self.config.data.seq_len
        batch = random_batch(np.random.default_rng(0), rows, window, self.config.model.vocab_size, window)
        self._batch = layout.put_batch(batch, rows)
        self._state = init_state(self.config, layout)
        self.seconds: list[float] = []

    def run(self) -> float:
        """Runs one step and returns its seconds."""
        start = time.perf_counter()
        self._state, metrics = self.compiled.step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start

    @property
    def memory(self) -> int:
        """Returns the bytes of the state and of the temporary buffers of a step."""
        return sum((self.compiled.memory_bytes() or {}).values())

    @property
    def instructions(self) -> int:
        """Returns the number of instructions of the compiled program."""
        return count_instructions(self.compiled.step.as_text() or '')


def make_config(settings: dict[str, Any]) -> Config:
    """Returns BASE with overrides, resolved for one device."""
    values = default()
    for key, value in {**BASE, **settings}.items():
        section, name = key.split('.')
        values[section][name] = value
    return resolve(build(values), platform='cpu', num_devices=1, vocab_size=BASE['model.vocab_size'], windows=100)


def count_instructions(text: str) -> int:
    """Counts the instructions in all computations of a compiled program."""
    return sum(len(computation) for computation in parse_hlo(text).computations.values())


def measure(axis: Axis, rounds: int, sizes: Sequence[int] = ()) -> list[Curve]:
    """Measures time, memory, compilation time and instructions of the step over the sizes of an axis.

    The sizes run in turns, so that changes of the machine's load affect all of them.
    """
    sizes = tuple(sizes or axis.sizes)
    cases = {size: Case(axis.settings(size)) for size in sizes}
    for number in range(rounds + 1):
        for case in cases.values():
            seconds = case.run()
            if number:  # The first round fills caches.
                case.seconds.append(seconds)
    unrolled = None
    if axis.control:
        name, settings, shown = axis.control
        shown = tuple(size for size in shown if size in sizes)
        unrolled = name, shown, [Case({**axis.settings(size), **settings}) for size in shown]

    def curve(name: str, unit: str, figure: Callable[[Case], float], expected: tuple[float, str]) -> Curve:
        values = tuple(map(figure, cases.values()))
        control = None
        if unrolled and expected is axis.program:
            control = unrolled[0], tuple(map(float, unrolled[1])), tuple(map(figure, unrolled[2]))
        return Curve(name, unit, tuple(map(float, sizes)), values, *expected, control)

    return [
        curve('step time', 's', lambda case: statistics.median(case.seconds), axis.time),
        curve('step memory', 'B', lambda case: float(case.memory), axis.memory),
        curve('compile time', 's', lambda case: case.compiled.seconds, axis.program),
        curve('instructions', '', lambda case: float(case.instructions), axis.program),
    ]
