"""Measures which flipped bits `guard.replay_fraction` finds, what a replay costs, and how much rounding differs.

    python -m benchmarks.replay_faults [--flips=300] [--steps=2000] [--output=FILE]

A flip changes one random bit of one random element in one execution of one step of a small model, as an input of the
same compiled program. A flip matters if the loss of the step or of the next one changes by at least 0.01 or is not
finite. Each flip is found by the replay of its step, or by the checksum before the next step.

The cost is that of a run of a small model at a fraction of 0.0025. Rounding is the largest difference of a step
between layouts of eight virtual devices, which add in other orders. `maxlm.training.decisions.replay.ROUNDING` follows
from it.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.data import random_tokens, write_dataset
from benchmarks.step import machine, random_batch
from maxlm.cli.parser import ArgumentParser
from maxlm.cli.runs import train
from maxlm.config.loading import build, default
from maxlm.config.resolve import resolve
from maxlm.config.schema import Config
from maxlm.errors import EXIT_DONE, DeviceError, exit_code
from maxlm.model import blocks
from maxlm.parallel.layout import Layout, make_layout
from maxlm.telemetry.goodput import read_goodput
from maxlm.telemetry.metrics import read_metrics
from maxlm.telemetry.timeline import Timeline
from maxlm.trainer import replay
from maxlm.trainer.replay import Replays
from maxlm.training import compile as compiling
from maxlm.training import gradients, step
from maxlm.training.batch import HOLD
from maxlm.training.decisions.replay import ROUNDING, Cause, Rounding, StepResult, find_cause
from maxlm.training.decisions.run_control import BadSteps
from maxlm.training.state import TrainState, abstract_state, init_state

CONFIG = Path(__file__).parent.parent / 'configs' / 'tiny.py'
VOCABULARY = 61
# Change of the loss from which on a flip matters.
CHANGE = 0.01
FRACTION = 0.0025
# Entry of a batch: number of the place, number of the array at the place, element and bit.
FAULT = 'fault'
NONE = np.zeros(4, np.uint32)
# Places of flips within a step, by number. `memory` is a flip between two steps.
WITHIN = ('none', 'parameters', 'activations', 'gradients', 'collective', 'state after the step')
MEMORY = 'memory between steps'
SMALL = {
    'model__num_layers': 2,
    'model__dim': 32,
    'model__num_heads': 4,
    'model__scan_layers': False,
    'model__dtype': 'float32',
    'data__seq_len': 16,
    'train__num_steps': 100,
    'train__global_batch_size': 8,
    'optimizer__learning_rate': 1e-2,
    'optimizer__warmup_steps': 2,
    'guard__spike_window': 0,
    'guard__replay_fraction': 1.0,
}
# Sums of gradients are reduced once per step, so that a flip can change the result on one device.
COLLECTIVE = {'mesh__data': 2, 'mesh__fsdp': 1, 'mesh__zero_stage': 1, 'train__per_device_batch_size': 2}
# Trained steps before the flips.
TRAINED = 40


@functools.partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def flip(x: jax.Array, fault: jax.Array, place: int, number: int) -> jax.Array:
    """Returns the array with the fault, if the fault is at this place and in its array `number`."""
    unsigned = jnp.dtype(f'uint{8 * x.dtype.itemsize}')
    element, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        element += jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * np.uint32(stride)
        stride *= x.shape[axis]
    hits = (fault[0] == place) & (fault[1] == number) & (element == fault[2] % np.uint32(max(1, x.size)))
    mask = jnp.where(hits, jnp.uint32(1) << (fault[3] % (8 * x.dtype.itemsize)), 0).astype(unsigned)
    return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, unsigned) ^ mask, x.dtype)


def _flip_forward(x: jax.Array, fault: jax.Array, place: int, number: int) -> tuple[jax.Array, None]:
    return flip(x, fault, place, number), None


def _flip_backward(place: int, number: int, _: None, gradient: jax.Array) -> tuple[jax.Array, None]:
    del place, number
    return gradient, None


flip.defvjp(_flip_forward, _flip_backward)


def flip_tree(tree: Any, fault: jax.Array, place: str) -> Any:
    """Applies `flip` to the arrays of a tree, which are numbered in their order."""
    leaves, structure = jax.tree.flatten(tree)
    number = WITHIN.index(place)
    return jax.tree.unflatten(structure, [flip(leaf, fault, number, i) for i, leaf in enumerate(leaves)])


class Injector:
    """Patches the functions of the step so that they apply the fault in the batch while it is traced."""

    def __init__(self) -> None:
        self.fault: Any = None
        self.num_blocks = self.num_reduced = 0

    @contextlib.contextmanager
    def patched(self) -> Iterator[Callable[..., Any]]:
        """Applies the patches, and yields the patched `make_train_step`."""
        make_train_step, make_gradients = step.make_train_step, gradients.make_gradients
        call, reduce_scatter = blocks.Block.__call__, gradients._reduce_scatter

        def make_faulty_step(*arguments: Any) -> Any:
            train_step = make_train_step(*arguments)

            def faulty_step(state: TrainState, batch: Any) -> Any:
                batch = dict(batch)
                self.fault = batch.pop(FAULT)
                self.num_blocks = self.num_reduced = 0
                state = state._replace(params=flip_tree(state.params, self.fault, 'parameters'))
                after, metrics = train_step(state, batch)
                changed = after.params, after.opt_state
                params, opt_state = flip_tree(changed, self.fault, 'state after the step')
                return after._replace(params=params, opt_state=opt_state), metrics

            return faulty_step

        def make_faulty_gradients(*arguments: Any) -> Any:
            of_batch = make_gradients(*arguments)

            def faulty_gradients(*inputs: Any) -> Any:
                sums, grads, maxima = of_batch(*inputs)
                return sums, flip_tree(grads, self.fault, 'gradients'), maxima

            return faulty_gradients

        def faulty_call(block: Any, *inputs: Any, **options: Any) -> Any:
            y_BTD, *rest = call(block, *inputs, **options)
            number, self.num_blocks = self.num_blocks, self.num_blocks + 1
            return flip(y_BTD, self.fault, WITHIN.index('activations'), number), *rest

        def faulty_reduction(grad: Any, sharding: Any) -> Any:
            reduced = reduce_scatter(grad, sharding)
            number, self.num_reduced = self.num_reduced, self.num_reduced + 1
            # The second device receives a wrong sum.
            wrong = flip(reduced, self.fault, WITHIN.index('collective'), number)
            return jnp.where(jax.lax.axis_index('data') == 1, wrong, reduced)

        with (
            mock.patch.object(compiling, 'make_train_step', make_faulty_step),
            mock.patch.object(step, 'make_gradients', make_faulty_gradients),
            mock.patch.object(blocks.Block, '__call__', faulty_call),
            mock.patch.object(gradients, '_reduce_scatter', faulty_reduction),
        ):
            yield make_faulty_step


class Flip(NamedTuple):
    """Outcome of a flip.

    Attributes:
        matters: True if the loss changes by at least CHANGE.
        found: True if the run ends with a DeviceError, on deterministic devices.
        exceeds_rounding: True if the difference is larger than `ROUNDING`, so that other devices find it too.
    """

    matters: bool
    found: bool
    exceeds_rounding: bool


class Model:
    """A small trained model with its compiled step, in which bits are flipped."""

    def __init__(self, num_devices: int = 1, **overrides: Any):
        self.config, self.layout = small_config(num_devices, **{**SMALL, **overrides})
        self.injector = Injector()
        abstract = abstract_state(self.config, self.layout)
        with self.injector.patched() as make_faulty_step:
            jitted = jax.jit(
                make_faulty_step(self.config, self.layout),
                donate_argnums=0,
                out_shardings=(jax.tree.map(lambda leaf: leaf.sharding, abstract), self.layout.named()),
            )
            rng = np.random.default_rng(0)
            rows, window = self.config.train.global_batch_size, self.config.data.seq_len
            self.batches = [random_batch(rng, rows, window, VOCABULARY, window) for _ in range(3)]
            state = init_state(self.config, self.layout)
            self.go = jax.device_put(np.bool_(False), self.layout.named())
            self.program = jitted.lower(state, {**self.put(0), HOLD: self.go}).compile()
        for number in range(TRAINED):
            state, _ = self.program(state, {**self.put(number), HOLD: self.go})
        self.state = state
        # The attributes of a run that replays use.
        parts: dict[str, Any] = {
            'metric_logger': SimpleNamespace(running=None, bad_steps=BadSteps(), flush=lambda: None),
            'recorder': SimpleNamespace(timeline=Timeline(), record_event=lambda *_, **__: None),
            'throughput': SimpleNamespace(paused=contextlib.nullcontext),
        }
        self.replays = Replays(self.config, self.layout, **parts, saved_steps=list)
        self.expected = self.losses(0)

    def put(self, number: int, fault: np.ndarray = NONE) -> dict[str, Any]:
        """Returns a batch with a fault on the devices."""
        batch = self.layout.put_batch(self.batches[number % len(self.batches)], self.config.train.global_batch_size)
        return {**batch, FAULT: jax.device_put(fault, self.layout.named())}

    def copy(self) -> TrainState:
        """Returns a copy of the trained state."""
        return replay._copy(self.state)

    def losses(self, first: int, state: TrainState | None = None, fault: np.ndarray = NONE) -> tuple[float, float]:
        """Returns the losses of the steps with the batches `first` and `first` + 1, of which the first has a fault."""
        state, metrics = self.program(state or self.copy(), {**self.put(first, fault), HOLD: self.go})
        _, following = self.program(state, {**self.put(first + 1), HOLD: self.go})
        return float(metrics['loss']), float(following['loss'])

    def num_arrays(self, place: str) -> int:
        """Returns the number of arrays at a place."""
        params = len(jax.tree.leaves(self.state.params))
        return {
            'activations': self.injector.num_blocks,
            'collective': self.injector.num_reduced,
            'state after the step': params + len(jax.tree.leaves(self.state.opt_state)),
        }.get(place, params)

    def flip_within(self, fault: np.ndarray, *, execution: int = 0) -> Flip:
        """Flips a bit in the first or second execution of a step that is replayed."""
        with np.errstate(invalid='ignore'):
            matters = matter(self.losses(0, fault=fault), self.expected)
        faults = [NONE, NONE]
        faults[execution] = fault
        results: list[tuple[StepResult, StepResult]] = []

        def record(first: StepResult, second: StepResult, **options: Any) -> Cause:
            results.append((first, second))
            return find_cause(first, second, **options)

        self.replays.begin(TRAINED)
        found = False
        with mock.patch.object(replay, 'find_cause', record):
            try:
                self.replays.step(TRAINED + 1, self.program, self.copy(), lambda: self.put(0, faults.pop(0)))
            except DeviceError:
                found = True
        cause = find_cause(*results[0], dtype=self.config.model.dtype, is_deterministic=False)
        return Flip(matters, found, cause is Cause.DEVICE)

    def flip_memory(self, rng: np.random.Generator) -> Flip:
        """Flips a bit of the parameters or of the optimizer state between two steps that are replayed."""
        self.replays.begin(TRAINED)
        state, _ = self.replays.step(TRAINED + 1, self.program, self.copy(), lambda: self.put(0))
        expected = self.losses(1, replay._copy(state))
        leaves, structure = jax.tree.flatten((state.params, state.opt_state))
        number = int(rng.integers(len(leaves)))
        values = np.array(leaves[number])
        bits = values.reshape(-1).view(f'u{values.itemsize}')
        bits[rng.integers(bits.size)] ^= bits.dtype.type(1 << int(rng.integers(8 * values.itemsize)))
        leaves[number] = jax.device_put(values, leaves[number].sharding)
        params, opt_state = jax.tree.unflatten(structure, leaves)
        state = state._replace(params=params, opt_state=opt_state)
        matters = matter(self.losses(1, replay._copy(state)), expected)
        try:
            self.replays.step(TRAINED + 2, self.program, state, lambda: self.put(1))
        except DeviceError:
            return Flip(matters, found=True, exceeds_rounding=True)
        return Flip(matters, found=False, exceeds_rounding=False)


def matter(found: tuple[float, float], expected: tuple[float, float]) -> bool:
    """Returns True if one of the losses changes by at least CHANGE or is not finite."""
    return any(not abs(one - other) < CHANGE for one, other in zip(found, expected, strict=True))


def small_config(num_devices: int, **settings: Any) -> tuple[Config, Layout]:
    """Returns a resolved config for the first CPU devices, and its layout."""
    values = default()
    for key, value in settings.items():
        section, name = key.split('__')
        values[section][name] = value
    config = resolve(build(values), platform='cpu', num_devices=num_devices, vocab_size=VOCABULARY, windows=100)
    return config, make_layout(config.mesh, jax.devices()[:num_devices])


def random_fault(rng: np.random.Generator, model: Model, place: str) -> np.ndarray:
    """Returns a fault in a random bit of a random element of a random array at a place."""
    number = rng.integers(model.num_arrays(place))
    element, bit = rng.integers(2**31), rng.integers(32)
    return np.array([WITHIN.index(place), number, element, bit], np.uint32)


def flip_bits(num_flips: int, dtype: str) -> dict[str, dict[str, int]]:
    """Flips random bits at each place; returns the numbers of flips by place."""
    single = Model(model__dtype=dtype)
    double = Model(2, **COLLECTIVE, model__dtype=dtype)
    counts = {}
    for place in (*WITHIN[1:], MEMORY):
        rng = np.random.default_rng(len(place))
        model = double if place == 'collective' else single
        flips = [
            model.flip_memory(rng) if place == MEMORY else model.flip_within(random_fault(rng, model, place))
            for _ in range(num_flips)
        ]
        matter = [each for each in flips if each.matters]
        counts[place] = {
            'flips': len(flips),
            'found': sum(each.found for each in flips),
            'matter': len(matter),
            'matter_found': sum(each.found for each in matter),
            'matter_exceed_rounding': sum(each.exceeds_rounding for each in matter),
        }
        print(f'{dtype} {place}: {counts[place]}', flush=True)
    return counts


def rounding(dtype: str) -> dict[str, float]:
    """Returns the largest relative differences of a step between layouts of eight devices."""
    meshes: list[dict[str, Any]] = [
        {},
        {'mesh__fsdp': 8},
        {'mesh__fsdp': 2, 'mesh__tensor': 4},
        {'mesh__fsdp': 4, 'mesh__tensor': 2},
        {'mesh__data': 2, 'mesh__fsdp': 2, 'mesh__tensor': 2},
    ]
    settings = {
        **SMALL,
        'model__dtype': dtype,
        'model__num_layers': 4,
        'model__dim': 64,
        'model__num_heads': 8,
        'model__scan_layers': True,
        'model__vocab_size': 64,
        'data__seq_len': 64,
        'train__global_batch_size': 16,
    }
    results: list[list[dict[str, float]]] = []
    states: list[Any] = []
    for mesh in meshes:
        num_devices = math.prod(mesh.values()) if mesh else 1
        config, layout = small_config(num_devices, **settings, **mesh)
        program = jax.jit(step.make_train_step(config, layout))
        rng = np.random.default_rng(0)
        batch = random_batch(rng, 16, 64, VOCABULARY, 32)
        if not states:
            # Early and later states of one device.
            state = init_state(config, layout)
            for number in range(17):
                if number in (0, 4, 16):
                    states.append(jax.device_get(state))
                state, _ = program(state, layout.put_batch(batch, 16))
        shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state(config, layout))
        found = []
        for state in states:
            _, metrics = program(jax.device_put(state, shardings), layout.put_batch(batch, 16))
            found.append({name: float(metrics[name]) for name in Rounding._fields})
        results.append(found)
    pairs = [pair for found in results[1:] for pair in zip(results[0], found, strict=True)]
    return {name: max(abs(other[name] / one[name] - 1) for one, other in pairs) for name in Rounding._fields}


def cost(num_steps: int) -> dict[str, float]:
    """Returns the time of replays at a fraction of FRACTION relative to that of steps, in a run of a small model.

    Smaller steps make replays relatively more expensive, because a replay has a fixed part.
    """
    with tempfile.TemporaryDirectory() as folder:
        data, workdir = Path(folder) / 'data', Path(folder) / 'run'
        write_dataset(random_tokens(2**20), data, 1)
        settings = {
            'data.path': data,
            'model.num_layers': 2,
            'model.dim': 64,
            'model.num_heads': 4,
            'data.seq_len': 64,
            'train.num_steps': num_steps,
            'train.log_every': 100,
            'eval.interval': 0,
            'checkpoint.save_interval_steps': 0,
            'guard.replay_fraction': FRACTION,
            # Spikes would be replayed too.
            'guard.spike_window': 0,
            'metrics.tensorboard': 'false',
            'metrics.peak_tflops': 1,
        }
        words = [f'--config.{key}={value}' for key, value in settings.items()]
        assert train.main([f'--config={CONFIG}', f'--workdir={workdir}', *words]) == EXIT_DONE
        seconds = read_goodput(workdir).totals
        replayed = next(line['replay/steps'] for line in reversed(read_metrics(workdir)) if 'replay/steps' in line)
    per_step, per_replay = seconds['step'] / num_steps, seconds['replay'] / replayed
    return {
        'steps': num_steps,
        'replayed': replayed,
        'step_seconds': per_step,
        'replay_seconds': per_replay,
        'measured_share': seconds['replay'] / seconds['step'],
        'share': FRACTION * per_replay / per_step,
    }


def main(argv: list[str]) -> int:
    """Measures all, prints the results and writes JSON."""
    parser = ArgumentParser(prog='benchmarks.replay_faults', allow_abbrev=False, description=__doc__)
    parser.add_argument('--flips', type=int, default=300, help='flips at each place (default 300)')
    parser.add_argument('--steps', type=int, default=2000, help='steps of the run with replays (default 2000)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    jax.config.update('jax_num_cpu_devices', 8)
    result = {
        'name': 'replay_faults',
        'change': CHANGE,
        'flips': {dtype: flip_bits(options.flips, dtype) for dtype in ('float32', 'bfloat16')},
        'rounding': {dtype: rounding(dtype) for dtype in ROUNDING},
        'limits': {dtype: limits._asdict() for dtype, limits in ROUNDING.items()},
        'cost': cost(options.steps),
    }
    print(json.dumps({name: result[name] for name in ('rounding', 'cost')}, indent=1))
    if options.output:
        options.output.write_text(json.dumps({**result, 'machine': machine()}, indent=1) + '\n')
    return EXIT_DONE


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
