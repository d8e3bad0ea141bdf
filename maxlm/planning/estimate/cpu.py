"""Measures the speed of this CPU on a model's operations, to predict the step time before a run."""

from __future__ import annotations

import collections
import dataclasses
import math
import os
import platform
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from maxlm.config.schema import Config, ModelConfig
from maxlm.errors import InputError
from maxlm.formatting import format_bytes
from maxlm.hardware.chips import Chip, host_memory, measure_matmul_tflops
from maxlm.model.attention.chunked import QUERY_BLOCK, attend_blockwise, query_ranges
from maxlm.model.experts.grouped_matmul import RowGroups, block_size, grouped_matmul
from maxlm.model.layers.masks import layer_windows
from maxlm.model.layers.mlp import swiglu_oai
from maxlm.planning.estimate.experts import activation_dim, dispatch_bytes, rows_of
from maxlm.planning.estimate.parameters import block_kernels, layer_stacks, model_parameters
from maxlm.planning.estimate.roofline import Efficiency
from maxlm.planning.estimate.work import estimate_work

# Speed of an operation inside a program relative to its speed alone: loops copy their carry, and operands of products
# have unfavorable layouts. Fitted to four configs of benchmarks/plan_cpu.py, in CPU time of one thread.
IN_PROGRAM = 0.73
# Maximum number of tokens in the measurements.
SAMPLED = 4096
# Number of elements of an array that exceeds all caches.
COPIED = 2**24


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
    config = dataclasses.replace(config, teacher=None, model=dataclasses.replace(config.model, mtp_depth=0))
    window = min(config.data.seq_len, SAMPLED)
    rows = max(1, min(config.train.per_device_batch_size, SAMPLED // window))
    if rows < config.train.per_device_batch_size or window < config.data.seq_len:
        # Larger arrays reach the same rates.
        train = dataclasses.replace(
            config.train, per_device_batch_size=rows, global_batch_size=rows * config.batch_shards
        )
        config = dataclasses.replace(config, train=train, data=dataclasses.replace(config.data, seq_len=window))
    model, window = config.model, config.data.seq_len
    tokens = max(1, config.train.per_device_batch_size * window)
    dtype = jnp.dtype(model.dtype)
    peak = measure_matmul_tflops() * 1e12
    seconds = flops = 0.0
    # Functions that measure products, by size, and how often each size occurs in a micro-batch.
    products: dict[tuple[int, int, int], Callable[[], float]] = {}
    counts: collections.Counter[tuple[int, int, int]] = collections.Counter()
    for kind in layer_stacks(model):
        multiplied = round(rows_of(config, kind).multiplied)
        for inputs, outputs, num, _ in block_kernels(kind).values():
            size = (multiplied if num > 1 else tokens, inputs, outputs)
            seconds_of = partial(_grouped_seconds, kind) if num > 1 else _product_seconds
            products[size] = partial(seconds_of, size, dtype, rounds)
            counts[size] += kind.num_layers
    head = (config.train.per_device_batch_size * config.loss_chunk, model.dim, model.vocab_size)
    products.setdefault(head, partial(_product_seconds, head, dtype, rounds))
    repeats: dict[tuple[int, int, int], float] = {**counts, head: counts[head] + tokens / head[0]}
    for size, count in repeats.items():
        seconds += count * products[size]()
        flops += count * 6 * math.prod(size)
    ranges = list(query_ranges(window, 0))
    # A block with about the mean number of keys.
    part = ranges[len(ranges) // 2]
    queries = min(QUERY_BLOCK, part.last - part.first)
    heads = config.train.per_device_batch_size * model.num_heads
    attention = _batched_flops((heads, queries, part.last - part.start, model.head_dim), dtype, rounds)
    bandwidth = _copy_bytes(rounds)
    # Without rematerialization, like the measured functions.
    plain = dataclasses.replace(config, model=dataclasses.replace(model, remat_policy='none'))
    work = estimate_work(plain)
    # Attention time besides its products: scores, softmax, transposed operands.
    beside = _attention_seconds(plain, rounds) - work.attention_flops / attention
    # Copies of rows to experts and back, forward and backward.
    dispatch = sum(dispatch_bytes(plain, kind) * kind.num_layers for kind in layer_stacks(model)) / bandwidth
    seconds_beside = max(0.0, beside) + 3 * plain.accumulation * dispatch
    elementwise = work.memory_bytes / bandwidth / (_elementwise_seconds(plain, rounds) + seconds_beside)
    share = jax.local_device_count()
    chip = Chip(
        name='cpu',
        platform='cpu',
        kind=platform.machine(),
        tflops=peak / 1e12 / share,
        memory=host_memory() // share,
        memory_bandwidth=bandwidth / share,
        per_node=share,
        # A transfer between two devices is a copy in memory.
        link_bandwidth=bandwidth / share / 2,
        network_bandwidth=1.25e9,
        host_bandwidth=bandwidth / share / 2,
    )
    efficiency = Efficiency(
        products=IN_PROGRAM * flops / seconds / peak,
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


def _best(function: Callable[..., Any], arguments: tuple[jax.Array, ...], rounds: int) -> float:
    compiled = jax.jit(function).lower(*arguments).compile()
    best = float('inf')
    for _ in range(rounds):
        start = time.perf_counter()
        jax.block_until_ready(compiled(*arguments))
        best = min(best, time.perf_counter() - start)
    return best


def _product_seconds(size: tuple[int, ...], dtype: Any, rounds: int) -> float:
    """Returns the seconds of a product and of the two products of its gradients."""
    rows, inputs, outputs = size
    x, kernel = jnp.ones((rows, inputs), dtype), jnp.ones((inputs, outputs), dtype)
    gradient = jnp.ones((rows, outputs), dtype)
    return _best(
        lambda x, kernel, gradient: (x @ kernel, gradient @ kernel.T, x.T @ gradient), (x, kernel, gradient), rounds
    )


def _grouped_seconds(kind: ModelConfig, size: tuple[int, ...], dtype: Any, rounds: int) -> float:
    """Returns the seconds of the products of all experts of a layer with equal loads, and of their gradients."""
    rows, inputs, outputs = size
    block = block_size(rows, kind.num_experts, kind.expert_matmul)
    rows = -(-rows // (kind.num_experts * block)) * kind.num_experts * block
    groups = RowGroups(jnp.full(kind.num_experts, rows // kind.num_experts), block)
    x, gradient = jnp.ones((rows, inputs), dtype), jnp.ones((rows, outputs), dtype)
    kernel = jnp.ones((kind.num_experts, inputs, outputs), dtype)

    def both(x: jax.Array, kernel: jax.Array, gradient: jax.Array) -> Any:
        y, pull = jax.vjp(lambda x, kernel: grouped_matmul(x, kernel, groups, kind.expert_matmul), x, kernel)
        return y, pull(gradient)

    return _best(both, (x, kernel, gradient), rounds) * size[0] / rows


def _batched_flops(size: tuple[int, int, int, int], dtype: Any, rounds: int) -> float:
    """Returns the operations per second of the two products of attention."""
    heads, queries, keys, width = size
    q, k = jnp.ones((heads, queries, width), dtype), jnp.ones((heads, keys, width), dtype)
    weights = jnp.ones((heads, queries, keys), dtype)
    seconds = _best(
        lambda q, k, weights: (jnp.einsum('NTH,NSH->NTS', q, k), jnp.einsum('NTS,NSH->NTH', weights, k)),
        (q, k, weights),
        rounds,
    )
    return 4 * math.prod(size) / seconds


def _copy_bytes(rounds: int) -> float:
    """Returns the bytes per second of reading and writing an array that exceeds all caches."""
    x = jnp.ones(COPIED, jnp.float32)
    return 2 * x.nbytes / _best(lambda x: x + 1, (x,), rounds)


def _elementwise_seconds(config: Config, rounds: int) -> float:
    """Returns the seconds of norms, activations, loss and update, forward and backward."""
    model, window, micro_batch = config.model, config.data.seq_len, config.train.per_device_batch_size
    dtype, tokens = jnp.dtype(model.dtype), micro_batch * window
    chunk = config.loss_chunk
    stream = _gradient_seconds(_normalize_and_add, (tokens, model.dim), dtype, rounds)
    activation = sum(
        _gradient_seconds(_ACTIVATIONS[model.activation], (tokens, round(activation_dim(config, kind))), dtype, rounds)
        * kind.num_layers
        for kind in layer_stacks(model)
    )
    loss = _gradient_seconds(_loss, (micro_batch * chunk, model.vocab_size), jnp.dtype(jnp.float32), rounds)
    parameters = jnp.ones(min(COPIED, model_parameters(model)), jnp.float32)
    update = _best(_update, (parameters,) * 4, rounds) * model_parameters(model) / parameters.size
    streams = model.num_layers * (3 if model.norm_placement == 'both' else 2) * stream
    return config.accumulation * (streams + activation + loss * window / chunk) + update


def _attention_seconds(config: Config, rounds: int) -> float:
    """Returns the seconds of attention in all layers of a step, forward and backward, with the model's kernel."""
    model, length, rows = config.model, config.data.seq_len, config.train.per_device_batch_size
    dtype = jnp.dtype(model.dtype)
    q_BTNH = jnp.ones((rows, length, model.num_heads, model.head_dim), dtype)
    k_BTKH = jnp.ones((rows, length, model.num_kv_heads, model.head_dim), dtype)
    segments_BT = jnp.zeros((rows, length), jnp.int32)

    def measured(window: int) -> float:
        def both(q_BTNH: jax.Array, k_BTKH: jax.Array, v_BTKH: jax.Array, segments_BT: jax.Array) -> Any:
            segments = segments_BT if config.data.document_mask else None
            attend = partial(attend_blockwise, segments_BT=segments, window=window, softcap=model.attention_softcap)
            y, pull = jax.vjp(attend, q_BTNH, k_BTKH, v_BTKH)
            return y, pull(y)

        return _best(both, (q_BTNH, k_BTKH, k_BTKH, segments_BT), rounds)

    layers = collections.Counter(layer_windows(model))
    return sum(measured(window) * number for window, number in layers.items()) * config.accumulation


def _gradient_seconds(function: Callable[..., jax.Array], shape: tuple[int, ...], dtype: Any, rounds: int) -> float:
    """Returns the seconds of a function and its gradient."""

    def both(x: jax.Array, gradient: jax.Array) -> Any:
        y, pull = jax.vjp(function, x)
        return y, pull(jnp.broadcast_to(gradient, y.shape).astype(y.dtype))

    return _best(both, (jnp.ones(shape, dtype), jnp.ones((), dtype)), rounds)


def _normalize_and_add(x: jax.Array) -> jax.Array:
    return x + x * jax.lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + 1e-5)


def _loss(logits: jax.Array) -> jax.Array:
    return jax.nn.logsumexp(logits, axis=-1) - logits[:, 0]


def _update(parameter: jax.Array, gradient: jax.Array, mu: jax.Array, nu: jax.Array) -> tuple[jax.Array, ...]:
    mu, nu = 0.9 * mu + 0.1 * gradient, 0.95 * nu + 0.05 * gradient**2
    return parameter - 1e-3 * (mu / (jnp.sqrt(nu) + 1e-8) + 0.1 * parameter), mu, nu


_ACTIVATIONS: dict[str, Callable[..., jax.Array]] = {
    'swiglu': lambda h: jax.nn.silu(h) * h,
    'swiglu_oai': lambda h: swiglu_oai(h, h),
    'geglu_tanh': lambda h: jax.nn.gelu(h, approximate=True) * h,
    'gelu': lambda h: jax.nn.gelu(h, approximate=False),
    'gelu_tanh': lambda h: jax.nn.gelu(h, approximate=True),
    'relu2': lambda h: jnp.square(jax.nn.relu(h)),
}
