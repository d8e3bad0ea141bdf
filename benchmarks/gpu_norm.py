"""Checks and times the kernels that add to the residual stream and normalize, on a GPU.

    python -m benchmarks.gpu_norm [--output=FILE]

The benchmark compares the results and gradients of `model.norm_kernel=pallas` with the formula in float32, for widths
and rows that fill tiles and for others. It runs each shape several times: all results must be equal bit by bit. Finally
it times a forward and backward pass of a chain of additions and norms against XLA. Prints tables, writes JSON, and
exits with 1 on a mismatch. Needs only jax, flax and ml_collections, and a GPU.

Shapes: R rows, D width.
"""

from __future__ import annotations

import statistics
import sys
import time
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.gpu_attention import case_of, check_and_time, distinct_results
from maxlm.config.loading import default
from maxlm.config.schema import ModelConfig
from maxlm.errors import exit_code
from maxlm.model.layers.norm import Norm
from maxlm.parallel.partitioning import SINGLE_DEVICE
from maxlm.training.known_answers.answer import find_mistake
from maxlm.training.known_answers.residual_norm import residual_norm_answer

# Runs of each checked shape.
RUNS = 5
# Additions and norms in a timed program: those of 8 blocks.
CHAIN = 16


class Shape(NamedTuple):
    """A normalization: rows, width, kind and dtype."""

    rows: int
    width: int
    norm: str
    dtype: str


CHECKED = [
    Shape(4096, 1536, 'layernorm', 'bfloat16'),
    Shape(1000, 2048, 'rmsnorm', 'bfloat16'),
    Shape(1001, 5120, 'rmsnorm', 'bfloat16'),
    Shape(1003, 768, 'layernorm', 'float16'),
    Shape(511, 1000, 'layernorm', 'float32'),
    Shape(33, 60, 'rmsnorm', 'float32'),
    Shape(2048, 8192, 'rmsnorm', 'bfloat16'),
    Shape(2048, 8192, 'layernorm', 'float32'),
]
# Micro-batches of configs/1b.py, configs/depth.py:24, configs/code.py:7b, and of a model of width 8,192.
TIMED = [
    Shape(16_384, 1536, 'layernorm', 'bfloat16'),
    Shape(16_384, 2048, 'rmsnorm', 'bfloat16'),
    Shape(16_384, 4096, 'rmsnorm', 'bfloat16'),
    Shape(8192, 8192, 'rmsnorm', 'bfloat16'),
]


def main(argv: list[str]) -> int:
    """Checks the kernels, then times them."""
    name = 'benchmarks.gpu_norm'
    return check_and_time(name, __doc__, argv, lambda: check(CHECKED), find_mistakes, lambda: measure(TIMED))


def check(shapes: list[Shape]) -> list[dict[str, Any]]:
    """Returns the first wrong array of each shape with its error, and the largest number of different results."""
    results = []
    for shape in shapes:
        answer = residual_norm_answer(model_of(shape, 'pallas'), shape.rows)
        mistake = find_mistake(answer, jax.devices()[:1])
        found = distinct_results(partial(jax.jit(answer.run), *map(jnp.asarray, answer.inputs)), RUNS)
        errors = {
            'wrong': '' if mistake is None else mistake.name,
            'error': 0.0 if mistake is None else mistake.error,
            'results': max(map(len, found)),
        }
        results.append({**shape._asdict(), 'errors': errors})
        print(*shape, *(f'{name} {value}' for name, value in errors.items()))
    return results


def find_mistakes(checks: list[dict[str, Any]]) -> list[str]:
    """Returns one message for each mistake in the results of `check`."""
    mistakes = []
    for result in checks:
        where, errors = case_of(result), result['errors']
        if errors['wrong']:
            mistakes.append(f'{where}: {errors["wrong"]} is off by {errors["error"]:.4f}')
        if errors['results'] > 1:
            mistakes.append(f'{where}: {errors["results"]} different results in {RUNS} runs')
    return mistakes


def measure(shapes: list[Shape], repeats: int = 20) -> list[dict[str, Any]]:
    """Measures the median milliseconds of a forward and backward pass of a chain, by shape and implementation."""
    results = []
    for shape in shapes:
        rng = np.random.default_rng(1)
        stream, *branches = (jnp.asarray(rng.normal(size=shape[:2]), shape.dtype) for _ in range(1 + CHAIN))
        times = {}
        for kernel in ('xla', 'pallas'):
            run = chain(shape, kernel)
            seconds = []
            for _ in range(3 + repeats):
                start = time.perf_counter()
                jax.block_until_ready(run(stream, branches))
                seconds.append(time.perf_counter() - start)
            times[kernel] = 1e3 * statistics.median(seconds[3:])
        # Each pass reads two arrays and writes two, or reads three and writes one.
        least = 8 * CHAIN * stream.nbytes
        rates = {kernel: least / value * 1e-9 for kernel, value in times.items()}
        results.append({**shape._asdict(), 'milliseconds': times, 'least_bytes': least, 'terabytes_per_second': rates})
        print(*shape, *(f'{name} {value:.3f} ms, {rates[name]:.2f} TB/s' for name, value in times.items()))
    return results


def chain(shape: Shape, kernel: str) -> Any:
    """Returns a compiled function (stream, branches) → gradients of both, which adds and normalizes every branch.

    Each normalized sum is a result, and the gradients of all results are random.
    """
    config = model_of(shape, kernel)
    norm = Norm(config, shape.width, rngs=nnx.Rngs(0), partitioning=SINGLE_DEVICE)

    def forward(stream: jax.Array, branches: list[jax.Array]) -> tuple[jax.Array, list[jax.Array]]:
        results = []
        for branch in branches:
            stream, normed = norm.add_and_normalize(stream, branch)
            # XLA would otherwise merge the norms with each other.
            results.append(jax.lax.optimization_barrier(normed))
        return stream, results

    @jax.jit
    def run(stream: jax.Array, branches: list[jax.Array]) -> Any:
        (stream_out, results), pull = jax.vjp(forward, stream, branches)
        return results, pull((stream_out, branches))

    return run


def model_of(shape: Shape, kernel: str) -> ModelConfig:
    """Returns the settings of a norm of this shape."""
    settings = default().model.to_dict()
    settings |= {'dim': shape.width, 'norm': shape.norm, 'dtype': shape.dtype, 'norm_kernel': kernel}
    settings |= {'norm_epsilon': 1e-5, 'norm_use_scale': True, 'norm_unit_offset': False, 'use_bias': True}
    return ModelConfig(**settings)


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
