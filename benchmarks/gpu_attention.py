"""Checks and times attention within packed documents on a GPU.

    python -m benchmarks.gpu_attention [--repeats=50] [--output=FILE]

The benchmark compares outputs and gradients with the formula in float32 for random packings, from one document per row
to more documents than the kernel's list can hold. As a negative control, ignoring the documents must cause an error.
It then repeats the kernel on the same arrays at the shapes of training and counts the different results, each of which
must agree with the formula. Outputs must be equal bit by bit. Gradients may differ in rounding, because the kernel may
add parts of them in any order. Finally it times the kernel against cuDNN with a mask and against cuDNN without
documents. Prints tables, writes JSON, and exits with 1 on a mismatch. Needs only jax, flax and ml_collections, and a
GPU with compute capability 9.0 or later.

Shapes: B batch, T length, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.step import machine
from maxlm.cli.parser import ArgumentParser
from maxlm.errors import EXIT_DONE, EXIT_FAILED, InputError, exit_code
from maxlm.model.attention.cudnn import attend_documents, documents_per_row, supports_documents
from maxlm.model.attention.decode import attend_slots
from maxlm.model.attention.kernels import AttentionInputs, cudnn
from maxlm.model.layers.kv_cache import Slots
from maxlm.model.layers.masks import causal_mask
from maxlm.parallel.partitioning import SINGLE_DEVICE

# Largest error of a token's vector, relative to the vector's norm or the typical norm of the array. Scores, weights and
# results each lose one or two of bfloat16's 8 bits.
TOLERANCE = 0.03
# q, k, v, segments, window → output.
Kernel = Callable[[jax.Array, jax.Array, jax.Array, jax.Array, int], jax.Array]


class Shape(NamedTuple):
    """Shape of queries, keys and values; `window=0` disables the sliding window."""

    B: int
    T: int
    N: int
    K: int
    H: int
    window: int


# The shapes cover each pair of values of the three varied settings.
CHECKED = [Shape(4, 512, 8, K, H, window) for K, H, window in ((8, 64, 0), (8, 128, 100), (2, 64, 100), (2, 128, 0))]
# Micro-batches of the 1B model, and of one with larger heads.
REPEATED = [Shape(8, 2048, 24, 24, 64, 0), Shape(8, 2048, 16, 16, 128, 0)]
# Mean length of the documents of repeated shapes.
TOKENS_PER_DOCUMENT = 1000
# The arrays that a forward and a backward pass return.
RESULTS = ('output', 'dq', 'dk', 'dv')
# Shapes of the 1B model, of one with larger heads, and of a longer context with grouped heads.
TIMED = [Shape(4, 2048, 24, 24, 64, 0), Shape(8, 2048, 16, 16, 128, 0), Shape(2, 8192, 32, 8, 128, 0)]


def main(argv: list[str]) -> int:
    """Checks the kernels, then times them."""
    parser = ArgumentParser(prog='benchmarks.gpu_attention', allow_abbrev=False, description=__doc__)
    parser.add_argument('--repeats', type=int, default=50, help='runs of each repeated shape (default 50)')
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if options.repeats < 2:
        raise InputError(f'--repeats={options.repeats}: needs 2 or more')
    if not supports_documents(jnp.zeros((1, 1, 1, 1)), SINGLE_DEVICE):
        device = jax.devices()[0].device_kind
        raise InputError(f'device {device}: needs a GPU of compute capability 9.0 or later, such as an H100')
    checks = check({'documents': documents, 'mask': masked}, causal, CHECKED)
    repeated = repeat(documents, REPEATED, options.repeats)
    mistakes = [*find_mistakes(checks), *find_changes(repeated)]
    print(*mistakes, sep='\n')
    times = measure(TIMED)
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        device = {'device': jax.devices()[0].device_kind, 'jax': jax.__version__}
        result = {'machine': device, 'mistakes': mistakes, 'checks': checks, 'repeated': repeated, 'times': times}
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_FAILED if mistakes else EXIT_DONE


def documents(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int) -> jax.Array:
    """Applies the cuDNN kernel that takes document lengths."""
    return attend_documents(q, k, v, segments, window=window, partitioning=SINGLE_DEVICE)


def masked(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int) -> jax.Array:
    """Applies cuDNN attention with the documents as a mask."""
    return cudnn(AttentionInputs(q, k, v, _mask(segments, window), None), window, SINGLE_DEVICE)


def causal(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int) -> jax.Array:
    """Applies cuDNN attention that ignores the documents, as a negative control."""
    del segments
    return cudnn(AttentionInputs(q, k, v, None, None), window, SINGLE_DEVICE)


def reference(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array, window: int) -> jax.Array:
    """Computes attention by its formula in float32."""
    q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    with jax.default_matmul_precision('float32'):
        slots = Slots(k.swapaxes(1, 2), v.swapaxes(1, 2), None, None)
        return attend_slots(q, slots, _mask(segments, window))


def check(kernels: dict[str, Kernel], leak: Kernel, shapes: list[Shape]) -> list[dict[str, Any]]:
    """Returns the largest error of each kernel over output and gradients, by shape and packing."""
    rng = np.random.default_rng(0)
    results = []
    for shape in shapes:
        arrays = _arrays(rng, shape)
        expect = _value_and_gradients(reference, shape.window)
        run = {name: _value_and_gradients(kernel, shape.window) for name, kernel in {**kernels, 'leak': leak}.items()}
        for packing, segments in packings(rng, shape).items():
            expected = expect(*arrays, segments)
            errors = {name: largest_error(function(*arrays, segments), expected) for name, function in run.items()}
            results.append({**shape._asdict(), 'packing': packing, 'errors': errors})
            print(*shape, f'{packing:16}', *(f'{name} {error:.4f}' for name, error in errors.items()))
    return results


def check_and_time(
    name: str,
    description: str | None,
    argv: list[str],
    check: Callable[[], list[dict[str, Any]]],
    find_mistakes: Callable[[list[dict[str, Any]]], list[str]],
    measure: Callable[[], list[dict[str, Any]]],
) -> int:
    """Runs a benchmark of kernels: prints the mistakes that the checks find, and writes all results to `--output`."""
    parser = ArgumentParser(prog=name, allow_abbrev=False, description=description)
    parser.add_argument('--output', type=Path, help='JSON file to write')
    options = parser.parse_args(argv)
    if jax.default_backend() != 'gpu':
        raise InputError(f'no GPU: JAX runs on {jax.default_backend()}')
    checks = check()
    mistakes = find_mistakes(checks)
    print(*mistakes, sep='\n')
    times = measure()
    if options.output:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        result = {'machine': machine(), 'mistakes': mistakes, 'checks': checks, 'times': times}
        options.output.write_text(json.dumps(result, indent=1) + '\n')
    return EXIT_FAILED if mistakes else EXIT_DONE


def case_of(check: dict[str, Any]) -> str:
    """Returns the shape and the input of a check, for messages."""
    return ' '.join(f'{name}={value}' for name, value in check.items() if name != 'errors')


def find_mistakes(checks: list[dict[str, Any]]) -> list[str]:
    """Returns one message for each mistake in the results of `check`."""
    mistakes = []
    for result in checks:
        where = case_of(result)
        errors = result['errors']
        # The negated comparison also catches NaN.
        if not errors['documents'] <= TOLERANCE:
            mistakes.append(f'{where}: documents are off by {errors["documents"]:.4f}')
        if result['packing'] != 'one' and not errors['leak'] > 10 * TOLERANCE:
            mistakes.append(f'{where}: the leak was not seen, at {errors["leak"]:.4f}')
    return mistakes


def repeat(kernel: Kernel, shapes: Sequence[Shape], count: int) -> list[dict[str, Any]]:
    """Runs forward and backward passes `count` times on the same arrays and compares the bits of their results.

    Returns:
        By shape and array: the number of different results (1 if all runs agree), the number of elements in which a
        result differs from the first one, and the largest error of all results (see `largest_error`).
    """
    rng = np.random.default_rng(2)
    results = []
    for shape in shapes:
        arrays = _arrays(rng, shape)
        segments = jnp.asarray(random_segments(rng, shape.B, shape.T, shape.B * max(1, shape.T // TOKENS_PER_DOCUMENT)))
        found = distinct_results(partial(_value_and_gradients(kernel, shape.window), *arrays, segments), count)
        expected = _value_and_gradients(reference, shape.window)(*arrays, segments)
        result: dict[str, Any] = {**shape._asdict(), 'repeats': count}
        for name, values, wanted in zip(RESULTS, found, expected, strict=True):
            result[name] = {
                'results': len(values),
                'differing_elements': max(int(differing_elements(values[0], value)) for value in values),
                'error': max(largest_error((value,), (wanted,)) for value in values),
            }
        results.append(result)
        print(*shape, f'{count} times', *(f'{name} {result[name]["results"]} results' for name in RESULTS))
    return results


def distinct_results(run: Callable[[], tuple[jax.Array, ...]], count: int) -> list[list[jax.Array]]:
    """Returns, for each array that `run` returns, its values in `count` runs without repetitions, the first first."""
    found: list[list[jax.Array]] = []
    for _ in range(count):
        arrays = run()
        found = found or [[] for _ in arrays]
        for values, array in zip(found, arrays, strict=True):
            if all(differing_elements(value, array) for value in values):
                values.append(array)
    return found


@jax.jit
def differing_elements(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the number of elements with different bits of two arrays of the same shape and dtype."""
    unsigned = jnp.dtype(f'uint{8 * a.dtype.itemsize}')
    return jnp.sum(jax.lax.bitcast_convert_type(a, unsigned) != jax.lax.bitcast_convert_type(b, unsigned))


def find_changes(repeated: list[dict[str, Any]]) -> list[str]:
    """Returns one message for each wrong array in the results of `repeat`."""
    mistakes = []
    for result in repeated:
        where = ' '.join(f'{name}={result[name]}' for name in Shape._fields)
        for name in RESULTS:
            # The negated comparison also catches NaN.
            if not result[name]['error'] <= TOLERANCE:
                mistakes.append(f'{where}: {name} is off by {result[name]["error"]:.4f}')
        if result['output']['results'] > 1:
            changed = result['output']['differing_elements']
            mistakes.append(f'{where}: the output changes between runs, in {changed:,} elements')
    return mistakes


def packings(rng: np.random.Generator, shape: Shape) -> dict[str, np.ndarray]:
    """Returns segment ids [B, T] by the name of the packing."""
    B, T = shape.B, shape.T
    room = B * documents_per_row(T)
    return {
        'one': np.ones((B, T), np.int32),
        'few': random_segments(rng, B, T, 4 * B),
        'few_and_padding': np.where(np.arange(T) < 0.8 * T, random_segments(rng, B, T, 4 * B), 0).astype(np.int32),
        'full_list': random_segments(rng, B, T, room),
        'one_more': random_segments(rng, B, T, room + 1),
        'many_lists': random_segments(rng, B, T, 5 * room // 2),
        'single_tokens': np.tile(np.arange(1, T + 1, dtype=np.int32), (B, 1)),
    }


def random_segments(rng: np.random.Generator, B: int, T: int, count: int) -> np.ndarray:
    """Returns segment ids [B, T] of `count` documents with random boundaries."""
    is_first = np.zeros((B, T), bool)
    is_first[:, 0] = True
    others = np.flatnonzero(~is_first)
    is_first.reshape(-1)[rng.choice(others, count - B, replace=False)] = True
    return np.cumsum(is_first, axis=1, dtype=np.int32)


def largest_error(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> float:
    """Returns the largest error over the vectors [H] of all tokens and heads (see TOLERANCE); NaN if not finite."""
    errors = []
    usual = 0.0
    for arrays in zip(found, expected, strict=True):
        a, b = (jnp.asarray(array, jnp.float32) for array in arrays)
        norms = jnp.linalg.norm(b, axis=-1)
        # Some gradients vanish, such as those of the queries of single-token documents.
        usual = max(float(jnp.sqrt(jnp.mean(norms**2))), 0.1 * usual)
        errors.append(float(jnp.max(jnp.linalg.norm(a - b, axis=-1) / jnp.maximum(norms, usual))))
    return float(np.max(errors))


def measure(shapes: list[Shape], repeats: int = 20) -> list[dict[str, Any]]:
    """Measures the median milliseconds of a forward and backward pass, by shape, mean document length and kernel."""
    rng = np.random.default_rng(1)
    results = []
    for shape in shapes:
        arrays = _arrays(rng, shape)
        for tokens in (1000, 100, 30):
            segments = jnp.asarray(random_segments(rng, shape.B, shape.T, shape.B * max(1, shape.T // tokens)))
            times = {}
            for kernel in (documents, masked, causal):
                run = _value_and_gradients(kernel, shape.window)
                seconds = []
                for _ in range(3 + repeats):
                    start = time.perf_counter()
                    jax.block_until_ready(run(*arrays, segments))
                    seconds.append(time.perf_counter() - start)
                times[kernel.__name__] = 1e3 * statistics.median(seconds[3:])
            results.append({**shape._asdict(), 'tokens_per_document': tokens, 'milliseconds': times})
            print(*shape, f'{tokens} tokens', *(f'{name} {value:.3f} ms' for name, value in times.items()))
    return results


def _arrays(rng: np.random.Generator, shape: Shape) -> tuple[jax.Array, ...]:
    """Returns random q, k, v and output gradient."""
    heads = (shape.N, shape.K, shape.K, shape.N)
    return tuple(jnp.asarray(rng.normal(size=(shape.B, shape.T, n, shape.H)), jnp.bfloat16) for n in heads)


def _mask(segments: jax.Array, window: int) -> jax.Array:
    T = segments.shape[1]
    return (segments[:, :, None] == segments[:, None, :]) & causal_mask(jnp.arange(T)[None], T, window)


def _value_and_gradients(kernel: Kernel, window: int) -> Callable[..., tuple[jax.Array, ...]]:
    def run(q: jax.Array, k: jax.Array, v: jax.Array, do: jax.Array, segments: jax.Array) -> tuple[jax.Array, ...]:
        output, pull = jax.vjp(lambda q, k, v: kernel(q, k, v, segments, window), q, k, v)
        return output, *pull(do.astype(output.dtype))

    return jax.jit(run)


if __name__ == '__main__':
    sys.exit(exit_code(main, sys.argv[1:]))
