"""A kernel with inputs and the formula that it computes, and the comparison of both on all devices of a process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# Remedy for a kernel of XLA.
OTHER_VERSIONS = 'install other versions of jaxlib and its plugin'
# Distance from 1 to the next number, by dtype. Kernels accumulate in float32, but round factors, intermediate values
# and results, each with a root mean square of a fifth of this distance. For float32 it is four times that of TF32, to
# which matrix units of GPUs truncate factors.
EPSILON = {'bfloat16': 2.0**-7, 'float16': 2.0**-10, 'float32': 2.0**-8}
# Allowed errors, as multiples of EPSILON. In bfloat16 the kernels of XLA reach 0.5 by norm and 2.5 in a vector, and
# cuDNN's attention 2.4 in a vector.
NORM, VECTOR = 1, 8


class KnownAnswer(NamedTuple):
    """A kernel, its inputs and its formula.

    Attributes:
        kernel: name of the kernel.
        shape: sizes of the inputs, for messages.
        run: function of the inputs that returns arrays with the kernel of a run: results, then gradients.
        exact: function of the inputs that returns the same arrays in float32.
        inputs: arrays.
        names: name of each returned array.
        dtype: dtype of the products, which determines the allowed error.
        remedy: setting that avoids the kernel.
        tolerance: additional allowed error of the results.
    """

    kernel: str
    shape: str
    run: Callable[..., tuple[jax.Array, ...]]
    exact: Callable[..., tuple[jax.Array, ...]]
    inputs: tuple[Any, ...]
    names: tuple[str, ...]
    dtype: str
    remedy: str
    tolerance: float = 0.0


class Mistake(NamedTuple):
    """A wrong result.

    Attributes:
        answer: the kernel.
        name: name of the array.
        error: error of the worst device, relative; NaN if a result is not finite.
        devices: devices with wrong results.
        num_devices: number of tested devices.
    """

    answer: KnownAnswer
    name: str
    error: float
    devices: list[jax.Device]
    num_devices: int


def find_mistake(answer: KnownAnswer, devices: Sequence[jax.Device]) -> Mistake | None:
    """Runs a kernel and its formula on each device and returns the first wrong result, or None.

    A norm shows a factor or a wrong part of all results, and the largest error of a vector a wrong token among many.
    """
    errors = measure(answer, devices)
    # A float32 product on a TPU has one bfloat16 pass by default.
    dtype = 'bfloat16' if devices[0].platform == 'tpu' else answer.dtype
    allowed = np.full(errors.shape[1:], np.array([NORM, VECTOR]) * EPSILON[dtype])
    allowed[0] += answer.tolerance
    # The negated comparison also catches NaN.
    is_wrong = ~(errors <= allowed)
    for index, name in enumerate(answer.names):
        found = [device for device, wrong in zip(devices, is_wrong[:, index], strict=True) if wrong.any()]
        if found:
            return Mistake(answer, name, float(errors[:, index][is_wrong[:, index]].max()), found, len(devices))
    return None


def measure(answer: KnownAnswer, devices: Sequence[jax.Device]) -> np.ndarray:
    """Returns [devices, arrays, 2]: the error of each array by norm, and its largest error of a vector."""
    mesh = Mesh(np.array(devices), ('device',))
    inputs = jax.device_put(answer.inputs, NamedSharding(mesh, PartitionSpec()))
    # Programs of their own, so that the compiler cannot merge the kernel with its formula.
    found = on_each(answer.run, mesh)(*inputs)
    with jax.default_matmul_precision('highest'):
        expected = on_each(answer.exact, mesh)(*inputs)
    return np.asarray(jax.device_get(_errors(found, expected)))


def on_each(function: Callable[..., tuple[jax.Array, ...]], mesh: Mesh) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns the compiled function that runs on each device of a mesh and stacks the results."""

    def run(*inputs: Any) -> tuple[jax.Array, ...]:
        return tuple(array[None] for array in function(*inputs))

    specs = {'in_specs': PartitionSpec(), 'out_specs': PartitionSpec(mesh.axis_names)}
    return jax.jit(partial(jax.shard_map, mesh=mesh, check_vma=False, **specs)(run))


@jax.jit
def _errors(found: tuple[jax.Array, ...], expected: tuple[jax.Array, ...]) -> jax.Array:
    errors, usual = [], jnp.zeros(())
    for a, b in zip(found, expected, strict=True):
        a, b = (x.astype(jnp.float32).reshape(len(x), -1, x.shape[-1] if x.ndim > 1 else 1) for x in (a, b))
        norms, differences = jnp.linalg.norm(b, axis=-1), jnp.linalg.norm(a - b, axis=-1)
        rms = jnp.sqrt(jnp.mean(jnp.square(norms), axis=-1))
        # Some gradients vanish, such as those of the queries of documents with a single token.
        usual = jnp.maximum(rms, 0.1 * usual)
        by_norm = jnp.sqrt(jnp.mean(jnp.square(differences), axis=-1)) / usual
        of_vectors = differences / jnp.maximum(norms, usual[:, None])
        errors.append(jnp.stack([by_norm, of_vectors.max(axis=-1)], axis=-1))
    return jnp.stack(errors, axis=1)


def with_gradients(function: Callable[..., jax.Array], gradient: jax.Array, *inputs: Any) -> tuple[jax.Array, ...]:
    """Returns the result of a function and the gradients of its inputs."""
    output, pull = jax.vjp(function, *inputs)
    return output, *pull(gradient.astype(output.dtype))


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Returns normal numbers in host memory: waiting tests take no memory of the device."""
    return rng.standard_normal(shape, np.float32).astype(jnp.dtype(dtype))


def floats(*arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Returns the arrays in float32."""
    return tuple(array.astype(jnp.float32) for array in arrays)
