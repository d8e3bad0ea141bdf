"""Measures the speed of this CPU on a model's operations, to predict the step time before a run."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from maxlm.config.schema import Config, ModelConfig
from maxlm.config.sections.families import GATED_ACTIVATIONS
from maxlm.errors import InputError
from maxlm.formatting import format_bytes
from maxlm.hardware.chips import Chip, host_memory, measure_matmul_tflops
from maxlm.model.attention.chunked import QUERY_BLOCK, attend_blockwise, query_ranges
from maxlm.model.experts.grouped_matmul import RowGroups, block_size, grouped_matmul
from maxlm.model.layers.masks import layer_windows
from maxlm.model.layers.mlp import ACTIVATIONS
from maxlm.model.parameters import block_kernels, layer_stacks, model_parameters
from maxlm.planning.estimate.experts import activation_dim, dispatch_bytes, rows_of
from maxlm.planning.estimate.roofline import Efficiency
from maxlm.planning.estimate.work import estimate_work

# Speed of an operation inside a program relative to its speed alone: loops copy their carry, and operands of products
# have unfavorable layouts. Fitted to four configs of benchmarks/plan_cpu.py, in CPU time of one thread.
IN_PROGRAM = 0.73
# Maximum number of tokens in the measurements.
SAMPLED = 4096
# Number of elements of an array that exceeds all caches.
COPIED = 2**24


class _Program(NamedTuple):
    """A function to time, and the shapes and dtypes of its arguments."""

    function: Callable[..., Any]
    arguments: tuple[jax.ShapeDtypeStruct, ...]


class _Product(NamedTuple):
    """Size of a matrix product.

    Attributes:
        rows, inputs, outputs: size of the product, of all experts together.
        kind: the kind of layer for products of experts; None = a plain product.
    """

    rows: int
    inputs: int
    outputs: int
    kind: ModelConfig | None = None

    @property
    def block(self) -> int:
        """Number of rows of which each expert multiplies a multiple."""
        return block_size(self.rows, self.kind.num_experts, self.kind.expert_matmul) if self.kind else 1

    @property
    def measured_rows(self) -> int:
        """Number of rows in the measurement, where all experts have equal loads."""
        multiple = self.block * (self.kind.num_experts if self.kind else 1)
        return -(-self.rows // multiple) * multiple


class Cpu(NamedTuple):
    """A measured machine, in the form that `step_time` takes."""

    chip: Chip
    efficiency: Efficiency


def calibrate_cpu(config: Config, rounds: int = 3) -> Cpu:
    """Measures this machine on products and elementwise operations of a resolved config's sizes.

    Takes a few seconds, mostly for compilation. All devices of this process share the machine's cores, so each device
    gets its share of the measured speed.

    Raises:
        InputError: the parameters alone are larger than the machine's memory.
    """
    _check_parameters(config)
    # Modules of multi-token prediction and a teacher have the operations of layers, which reach the same rates.
    config = dataclasses.replace(
        config, teacher=None, scorer=None, model=dataclasses.replace(config.model, mtp_depth=0)
    )
    seq_len = min(config.data.seq_len, SAMPLED)
    rows = max(1, min(config.train.per_device_batch_size, SAMPLED // seq_len))
    if rows < config.train.per_device_batch_size or seq_len < config.data.seq_len:
        # Larger arrays reach the same rates.
        train = dataclasses.replace(
            config.train, per_device_batch_size=rows, global_batch_size=rows * config.batch_shards
        )
        config = dataclasses.replace(config, train=train, data=dataclasses.replace(config.data, seq_len=seq_len))
    model, seq_len = config.model, config.data.seq_len
    tokens = max(1, config.train.per_device_batch_size * seq_len)
    dtype = jnp.dtype(model.dtype)
    peak = measure_matmul_tflops() * 1e12
    # Number of occurrences of each product in a micro-batch.
    products: collections.Counter[_Product] = collections.Counter()
    for kind in layer_stacks(model):
        multiplied = round(rows_of(config, kind).multiplied)
        for inputs, outputs, num, _ in block_kernels(kind).values():
            is_grouped = num > 1
            product = _Product(multiplied if is_grouped else tokens, inputs, outputs, kind if is_grouped else None)
            products[product] += kind.num_layers
    head = _Product(config.train.per_device_batch_size * config.loss_chunk, model.dim, model.num_outputs)
    repeats: dict[_Product, float] = {**products, head: products[head] + tokens / head.rows}
    ranges = list(query_ranges(seq_len, 0))
    # A block with about the mean number of keys.
    part = ranges[len(ranges) // 2]
    queries = min(QUERY_BLOCK, part.last - part.first)
    heads = config.train.per_device_batch_size * model.num_heads
    block = (heads, queries, part.last - part.start, model.head_dim)
    # Without rematerialization, like the measured functions.
    plain = dataclasses.replace(config, model=dataclasses.replace(model, remat_policy='none'))
    programs = {
        **{size: _product_program(size, dtype) for size in repeats},
        'block': _attention_block(block, dtype),
        'copy': _Program(lambda x: x + 1, (jax.ShapeDtypeStruct((COPIED,), jnp.float32),)),
        **_attention_programs(plain),
        **_elementwise_programs(plain),
    }
    seconds = _measure(programs, rounds)
    flops = sum(count * 6 * size.rows * size.inputs * size.outputs for size, count in repeats.items())
    product_seconds = sum(count * seconds[size] * size.rows / size.measured_rows for size, count in repeats.items())
    attention = 4 * math.prod(block) / seconds['block']
    bandwidth = 2 * 4 * COPIED / seconds['copy']
    work = estimate_work(plain)
    # Attention time besides its products: scores, softmax, transposed operands.
    beside = _attention_seconds(plain, seconds) - work.attention_flops / attention
    # Copies of rows to experts and back, forward and backward.
    dispatch = sum(dispatch_bytes(plain, kind) * kind.num_layers for kind in layer_stacks(model)) / bandwidth
    seconds_beside = max(0.0, beside) + 3 * plain.accumulation * dispatch
    elementwise = work.memory_bytes / bandwidth / (_elementwise_seconds(plain, seconds) + seconds_beside)
    num_devices = jax.local_device_count()
    chip = Chip(
        name='cpu',
        platform='cpu',
        kind=platform.machine(),
        tflops=peak / 1e12 / num_devices,
        memory=host_memory() // num_devices,
        memory_bandwidth=bandwidth / num_devices,
        per_node=num_devices,
        # A transfer between two devices is a copy in memory.
        link_bandwidth=bandwidth / num_devices / 2,
        network_bandwidth=1.25e9,
        host_bandwidth=bandwidth / num_devices / 2,
    )
    efficiency = Efficiency(
        products=IN_PROGRAM * flops / product_seconds / peak,
        attention=IN_PROGRAM * attention / peak,
        memory=IN_PROGRAM * elementwise,
        overlap=0.0,
        latency=20e-6,
    )
    return Cpu(chip, efficiency)


def _check_parameters(config: Config) -> None:
    size = model_parameters(config.model) * jnp.dtype(jnp.float32).itemsize
    if size > host_memory():
        raise InputError(
            f'the model parameters need {format_bytes(size)}, but this machine has '
            f'{format_bytes(host_memory())} of memory; lower model.dim, model.num_layers, model.ffn_dim or '
            'model.vocab_size'
        )


def num_cores() -> int:
    """Returns the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1


def _measure(programs: Mapping[Any, _Program], rounds: int) -> dict[Any, float]:
    """Returns the shortest time of each program in seconds. The programs are compiled in parallel before they run."""
    with ThreadPoolExecutor(num_cores()) as pool:
        compiling = [
            pool.submit(jax.jit(function).lower(*arguments).compile) for function, arguments in programs.values()
        ]
        compiled = [future.result() for future in compiling]
    return {
        name: _best(function, program.arguments, rounds)
        for (name, program), function in zip(programs.items(), compiled, strict=True)
    }


def _best(compiled: Callable[..., Any], arguments: tuple[jax.ShapeDtypeStruct, ...], rounds: int) -> float:
    # jnp.ones would compile a program for each shape.
    arrays = [jax.device_put(np.ones(argument.shape, argument.dtype)) for argument in arguments]
    best = float('inf')
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arrays))
        best = min(best, time.perf_counter() - start)
    return best


def _product_program(size: _Product, dtype: Any) -> _Program:
    """Returns a program of a product and the two products of its gradients."""
    rows, kind = size.measured_rows, size.kind
    if kind is None:
        return _Program(
            lambda x, kernel, gradient: (x @ kernel, gradient @ kernel.T, x.T @ gradient),
            _structs(dtype, (rows, size.inputs), (size.inputs, size.outputs), (rows, size.outputs)),
        )
    sizes_E = np.full(kind.num_experts, rows // kind.num_experts, np.int32)

    def both(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> Any:
        groups = RowGroups(jnp.asarray(sizes_E), size.block)
        y, pull = jax.vjp(lambda x, kernel: grouped_matmul(x, kernel, groups, kind.expert_matmul), x, kernel)
        return y, pull(gradient)

    kernels = (kind.num_experts, size.inputs, size.outputs)
    return _Program(both, _structs(dtype, (rows, size.inputs), kernels, (rows, size.outputs)))


def _attention_block(size: tuple[int, int, int, int], dtype: Any) -> _Program:
    """Returns a program of the two products of attention."""
    heads, queries, keys, width = size
    return _Program(
        lambda q, k, weights: (jnp.einsum('NTH,NSH->NTS', q, k), jnp.einsum('NTS,NSH->NTH', weights, k)),
        _structs(dtype, (heads, queries, width), (heads, keys, width), (heads, queries, keys)),
    )


def _attention_programs(config: Config) -> dict[Any, _Program]:
    """Returns programs of attention, forward and backward, with the model's kernel, one for each sliding window."""
    model, length, rows = config.model, config.data.seq_len, config.train.per_device_batch_size
    dtype = jnp.dtype(model.dtype)
    (q_BTNH,) = _structs(dtype, (rows, length, model.num_heads, model.head_dim))
    (k_BTKH,) = _structs(dtype, (rows, length, model.num_kv_heads, model.head_dim))
    (segments_BT,) = _structs(jnp.int32, (rows, length))

    def both(window: int, q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array) -> Any:
        segments = segments_BT if config.data.document_mask else None
        attend = partial(attend_blockwise, segments_BT=segments, window=window, softcap=model.attention_softcap)
        y, pull = jax.vjp(attend, q_BTNH, k_BTKH, v_BTKH)
        return y, pull(y)

    arguments = (q_BTNH, k_BTKH, k_BTKH, segments_BT)
    return {('attention', window): _Program(partial(both, window), arguments) for window in {*layer_windows(model)}}


def _attention_seconds(config: Config, seconds: Mapping[Any, float]) -> float:
    """Returns the seconds of attention in all layers of a step."""
    layers = collections.Counter(layer_windows(config.model))
    return sum(seconds['attention', window] * number for window, number in layers.items()) * config.accumulation


def _elementwise_programs(config: Config) -> dict[Any, _Program]:
    """Returns programs of norms, activations and loss, forward and backward, and of the update."""
    model, seq_len, micro_batch = config.model, config.data.seq_len, config.train.per_device_batch_size
    dtype, tokens = jnp.dtype(model.dtype), micro_batch * seq_len
    num_inputs = 2 if model.activation in GATED_ACTIVATIONS else 1

    def activation(h: jax.Array) -> jax.Array:
        return ACTIVATIONS[model.activation](*[h] * num_inputs)

    return {
        'norm': _with_gradient(_normalize_and_add, (tokens, model.dim), dtype),
        **{('activation', dim): _with_gradient(activation, (tokens, dim), dtype) for dim in _activation_dims(config)},
        'loss': _with_gradient(_loss, (micro_batch * config.loss_chunk, model.num_outputs), jnp.float32),
        'update': _Program(_update, _structs(jnp.float32, (_updated(model),)) * 4),
    }


def _elementwise_seconds(config: Config, seconds: Mapping[Any, float]) -> float:
    """Returns the seconds of norms, activations, loss and update of a step."""
    model = config.model
    norms = model.num_layers * (3 if model.norm_placement == 'both' else 2) * seconds['norm']
    activations = sum(seconds['activation', dim] * number for dim, number in _activation_dims(config).items())
    loss = seconds['loss'] * config.data.seq_len / config.loss_chunk
    update = seconds['update'] * model_parameters(model) / _updated(model)
    return config.accumulation * (norms + activations + loss) + update


def _activation_dims(config: Config) -> collections.Counter[int]:
    """Returns the sizes of activations, and the number of layers with each size."""
    dims: collections.Counter[int] = collections.Counter()
    for kind in layer_stacks(config.model):
        dims[round(activation_dim(config, kind))] += kind.num_layers
    return dims


def _updated(model: ModelConfig) -> int:
    """Returns the number of parameters in the measurement of the update."""
    return min(COPIED, model_parameters(model))


def _with_gradient(function: Callable[..., jax.Array], shape: tuple[int, ...], dtype: Any) -> _Program:
    """Returns a program of a function and its gradient."""

    def both(x: jax.Array, gradient: jax.Array) -> Any:
        y, pull = jax.vjp(function, x)
        return y, pull(jnp.broadcast_to(gradient, y.shape).astype(y.dtype))

    return _Program(both, _structs(dtype, shape, ()))


def _structs(dtype: Any, *shapes: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes)


def _normalize_and_add(x: jax.Array) -> jax.Array:
    return x + x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def _loss(logits: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1) - logits[:, 0]


def _update(parameter: jax.Array, gradient: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
    mu, nu = 0.9 * mu + 0.1 * gradient, 0.95 * nu + 0.05 * gradient**2
    return parameter - 1e-3 * (mu / (jnp.sqrt(nu) + 1e-8) + 0.1 * parameter), mu, nu
