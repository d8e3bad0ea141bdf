"""Checks and times the matrix products of experts on a GPU.

    python -m benchmarks.gpu_experts [--output=FILE]

The benchmark compares products and gradients of `grouped_matmul` with the formula in float32, for balanced loads,
skewed loads, experts without rows and unused rows. As a negative control, a row in the group of a different expert must
cause an error. It then times the kernels of Tokamax against a batched product of equal groups, which needs the same
operations. Prints tables, writes JSON, and exits with 1 on a mismatch. Needs a GPU, jax, flax, ml_collections and
tokamax.

Shapes: R rows, I inputs, O outputs, E groups.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.gpu_attention import case_of, check_and_time
from maxlm.errors import exit_code
from maxlm.training.known_answers.experts import (
    TOLERANCE,
    exact_products,
    product_errors,
    products_with_gradients,
    relative_errors,
)

# Repeated runs show a race between the threads of a kernel.
RUNS = 5
OUTPUTS = ('product', 'gradient_of_rows', 'gradient_of_matrices')


class Shape(NamedTuple):
    """Sizes of a product."""

    rows: int
    inputs: int
    outputs: int
    groups: int


# The widths of the last shape are no multiples of 128.
CHECKED = [Shape(1024, 256, 128, 8), Shape(4096, 512, 640, 32), Shape(2048, 192, 320, 16)]
# One micro-batch of 8x1b, 16b-a3b and 30b-a3b in configs/moe.py: tokens × experts per token.
TIMED = [Shape(8192, 2048, 8192, 8), Shape(24_576, 2048, 1408, 64), Shape(32_768, 2048, 768, 128)]


def main(argv: list[str]) -> int:
    """Checks the kernels, then times them."""
    name = 'benchmarks.gpu_experts'
    return check_and_time(name, __doc__, argv, lambda: check(CHECKED, 'tokamax'), find_mistakes, lambda: measure(TIMED))


def check(shapes: list[Shape], kind: str) -> list[dict[str, Any]]:
    """Returns the largest error of the product and of each gradient over several runs, by shape and loads."""
    rng = np.random.default_rng(0)
    results = []
    for shape in shapes:
        for name, sizes_E in loads(rng, shape).items():
            x_RI, kernel_EIO, grad_RO = _arrays(rng, shape)
            runs = [product_errors(kind, x_RI, kernel_EIO, sizes_E, grad_RO) for _ in range(RUNS)]
            exact, moved = (exact_products(x_RI, kernel_EIO, sizes, grad_RO) for sizes in (sizes_E, _move_row(sizes_E)))
            errors = dict(zip(OUTPUTS, np.max(runs, axis=0).tolist(), strict=True))
            errors['moved_row'] = max(relative_errors(moved, exact))
            results.append({**shape._asdict(), 'loads': name, 'errors': errors})
            print(*shape, f'{name:12}', *(f'{key} {error:.4f}' for key, error in errors.items()))
    return results


def find_mistakes(checks: list[dict[str, Any]]) -> list[str]:
    """Returns one message for each mistake in the results of `check`."""
    mistakes = []
    for result in checks:
        where, errors = case_of(result), result['errors']
        for output in OUTPUTS:
            # The negated comparison also catches NaN.
            if not errors[output] <= TOLERANCE:
                mistakes.append(f'{where}: {output} is off by {errors[output]:.4f}')
        if not errors['moved_row'] > 2 * TOLERANCE:
            mistakes.append(f'{where}: the moved row was not seen, at {errors["moved_row"]:.4f}')
    return mistakes


def loads(rng: np.random.Generator, shape: Shape) -> dict[str, np.ndarray]:
    """Returns sizes [E] by the name of the loads."""
    R, E = shape.rows, shape.groups
    skewed = np.bincount(np.minimum(rng.geometric(0.4, R) - 1, E - 1), minlength=E)
    empty = np.zeros(E, np.int64)
    empty[1::2] = R // (E // 2)
    all_loads = {
        'balanced': np.full(E, R // E),
        'random': np.bincount(rng.integers(0, E, R), minlength=E),
        'skewed': skewed,
        'empty': empty,
        'unused_rows': np.bincount(rng.integers(0, E, 3 * R // 4), minlength=E),
    }
    return {name: sizes.astype(np.int32) for name, sizes in all_loads.items()}


def measure(shapes: list[Shape], repeats: int = 20) -> list[dict[str, Any]]:
    """Measures the median milliseconds of a product with its gradients, by shape and implementation."""
    rng = np.random.default_rng(1)
    results = []
    for shape in shapes:
        arrays = _arrays(rng, shape)
        sizes = {
            'equal': np.full(shape.groups, shape.rows // shape.groups, np.int32),
            'tokamax': np.bincount(rng.integers(0, shape.groups, shape.rows), minlength=shape.groups).astype(np.int32),
        }
        times = {}
        for kind, sizes_E in sizes.items():
            seconds = []
            for _ in range(3 + repeats):
                start = time.perf_counter()
                jax.block_until_ready(products_with_gradients(kind, *arrays[:2], jnp.asarray(sizes_E), arrays[2]))
                seconds.append(time.perf_counter() - start)
            times[kind] = 1e3 * statistics.median(seconds[3:])
        tflops = {kind: 6e-9 * shape.rows * shape.inputs * shape.outputs / value for kind, value in times.items()}
        results.append({**shape._asdict(), 'milliseconds': times, 'tflops': tflops})
        print(*shape, *(f'{kind} {value:.3f} ms, {tflops[kind]:.0f} TFLOP/s' for kind, value in times.items()))
    return results


def _move_row(sizes_E: np.ndarray) -> np.ndarray:
    """Returns the sizes after the last row of the largest group moved to the next group."""
    largest = int(np.argmax(sizes_E[:-1]))
    moved = sizes_E.copy()
    moved[largest] -= 1
    moved[largest + 1] += 1
    return moved


def _arrays(rng: np.random.Generator, shape: Shape) -> tuple[jax.Array, ...]:
    """Returns random rows, matrices and gradient of the result."""
    matrix = (shape.inputs, shape.outputs)
    sizes = ((shape.rows, shape.inputs), (shape.groups, *matrix), (shape.rows, shape.outputs))
    return tuple(jnp.asarray(rng.normal(size=size), jnp.bfloat16) for size in sizes)


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
