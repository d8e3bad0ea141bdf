"""The form of kernels in which products of a few rows are fast: transposed, and joined with those of the same input.

Inference converts the parameters once. Training and checkpoints keep one kernel [*in, *out] for each projection.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from maxlm.config.schema import Config
from maxlm.model.decoder import Decoder
from maxlm.model.layers.linear import Linear, should_transpose, transpose_kernel
from maxlm.model.layers.weight_only_quantization import KERNEL
from maxlm.parallel.layout import Layout

# Name of the bias of a projection.
BIAS = 'bias'
Path = tuple[Any, ...]


class KernelForm(NamedTuple):
    """Parameters that `convert` changes.

    Attributes:
        transposed: number of input axes of each transposed kernel, by path of the kernel.
        joined: names of the projections whose kernels are joined, by path of their module.
        biases: paths of the biases of projections, which are cast to `dtype`.
        dtype: compute dtype.
    """

    transposed: dict[Path, int]
    joined: dict[Path, tuple[str, ...]]
    biases: frozenset[Path]
    dtype: Any


def prepare_modules(decoder: Decoder) -> KernelForm:
    """Changes the projections of a decoder to take parameters that `convert` returns.

    The decoder's own parameters no longer fit.
    """
    modules, joined = list(nnx.iter_modules(decoder)), {}
    transposed = _mark_transposed(decoder, modules)
    biases = frozenset((*path, BIAS) for path, module in modules if isinstance(module, Linear))
    for path, module in modules:
        names: tuple[str, ...] = getattr(module, 'fused_projections', ())
        linears: list[Linear] = [getattr(module, name) for name in names]
        if names and should_join(decoder) and can_join(linears):
            linears[0].join(linears[1:])
            joined[path] = names
    return KernelForm(transposed, joined, biases, decoder.config.dtype)


def should_join(decoder: Decoder) -> bool:
    """Returns True on a GPU, where each product is a kernel that has to be started.

    On a CPU, joined products of 1 and 8 rows were not faster, and sums were rounded differently. Blocks of a user's
    class keep separate kernels, because they may use them one by one.
    """
    return decoder.partitioning.platform == 'gpu' and not decoder.config.block


def _mark_transposed(decoder: Decoder, modules: Sequence[tuple[Path, Any]]) -> dict[Path, int]:
    """Marks the projections whose kernels are transposed, and returns their number of input axes by path."""
    found = {}
    for path, module in modules:
        if isinstance(module, Linear) and module.should_be_transposed:
            module.is_transposed = True
            found[*path, KERNEL] = module.num_in
    # The embedding is already [V, D].
    is_table = should_transpose(decoder.config.dim, decoder.partitioning.platform)
    decoder.is_transposed = is_table if decoder.head is None else decoder.head.is_transposed
    return found


def convert(params: Mapping[str, Any], form: KernelForm, path: Path = ()) -> dict[str, Any]:
    """Returns parameters of a decoder, or of one of its layers, in a form of `prepare_modules`.

    Args:
        params: nested dicts of NumPy or JAX arrays, without an axis for layers.
        form: the form.
        path: path of `params` in the decoder.
    """
    found: dict[str, Any] = {}
    for name, child in params.items():
        own = (*path, name)
        if isinstance(child, Mapping):
            found[name] = convert(child, form, own)
        elif own in form.biases:
            found[name] = child.astype(form.dtype)
        else:
            found[name] = transpose_kernel(child, form.transposed.get(own, 0))
    names = form.joined.get(path, ())
    if names:
        first, *others = (found[name] for name in names)
        of_outputs = (*path, names[0], KERNEL) in form.transposed
        found[names[0]] = {
            name: _join([x, *(other[name] for other in others)], name, of_outputs) for name, x in first.items()
        }
        # The other projections have no parameters.
        found |= {name: {} for name in names[1:]}
    return found


def _join(arrays: Sequence[Any], name: str, of_outputs: bool) -> Any:
    """Joins kernels [I, *out] to [I, O], or [*out, I] to [O, I] with `of_outputs`, and biases [*out] to [O]."""
    if name == BIAS:
        arrays, axis = [x.reshape(-1) for x in arrays], 0
    elif name == KERNEL and of_outputs:
        arrays, axis = [x.reshape(-1, x.shape[-1]) for x in arrays], 0
    else:
        arrays, axis = [x.reshape(x.shape[0], -1) for x in arrays], 1
    is_numpy = all(isinstance(x, np.ndarray) for x in arrays)
    joined: np.ndarray | jax.Array = np.concatenate(arrays, axis) if is_numpy else jnp.concatenate(arrays, axis)
    return joined


def can_join(linears: Sequence[Linear | None]) -> bool:
    """Returns True if the kernels of these projections of the same input can be joined to one without other values.

    Kernels in 8 bits have scales of their own, and adapters stay separate. A sharded kernel would have to move between
    devices.
    """
    first = linears[0]
    if first is None:
        return False

    def properties(linear: Linear | None) -> Any:
        if linear is None or linear.num_in != 1 or linear.lora_a is not None or linear.matmul != 'default':
            return None
        is_whole = all(linear.partitioning.num_shards(axis) == 1 for axis in linear.axes)
        return (linear.num_inputs, linear.weights, linear.is_transposed, linear.bias is None) if is_whole else None

    return properties(first) is not None and all(properties(linear) == properties(first) for linear in linears)


def uses_unstacked_layers(config: Config, layout: Layout) -> bool:
    """Returns True if layers have separate arrays and are unrolled.

    XLA for CPUs and GPUs copies each kernel that it takes from a stack, which takes longer than the product of a few
    rows. On a TPU it does not, and a loop compiles faster.
    """
    return layout.platform != 'tpu' and config.mesh.host_offload == 'none'
