"""Chunked computation of logits: only the logits of one chunk of positions exist at the same time.

Shapes: B batch, T length, C positions of a row in a chunk, D dim, V vocabulary, R shards of the rows, P shards of the
length, X chunks, N positions of a chunk on one device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from maxlm.parallel.partitioning import Partitioning

# Logical names of the axes R and P of a chunk, which is [X, R, P, …] or [R, P, …].
PARTS = ('rows', 'length')


class LogitChunks:
    """Splits the positions of a batch into chunks and computes logits and gradients of a chunk."""

    def __init__(
        self,
        hidden_BTD: jax.Array,
        *,
        partitioning: Partitioning,
        chunk: int,
        row_groups: int = 1,
        is_tied: bool = False,
    ):
        """
        Args:
            hidden_BTD: hidden states to split; only shape and dtype are used.
            partitioning: partitioning of the model.
            chunk: number of tokens on each device whose logits exist at the same time, at least one of each row.
            row_groups: number of groups into which the rows are split. Row r is in group r mod row_groups, so no row
                moves to another device.
            is_tied: the kernel is the transposed embedding. On a GPU it is then used as [V, D], because transposing it
                and its gradient would move memory.
        """
        B, T, _ = hidden_BTD.shape
        R, P = (partitioning.num_shards(axis) for axis in PARTS)
        rows = B // (R * row_groups)
        chunks = -(-(T // P) // max(1, chunk // rows))
        # Chunks of equal size need the least padding.
        C = -(-(T // P) // chunks)
        self._shape = (R, rows, row_groups, P, chunks, C)
        self._length = T
        self._partitioning = partitioning
        self._is_transposed = is_tied and partitioning.platform == 'gpu'
        # Letters and logical names of the axes of the kernel.
        self._kernel = 'VD' if self._is_transposed else 'DV'
        self._kernel_axes = ('vocab', 'activation') if self._is_transposed else ('activation', 'vocab')
        self.dtype = hidden_BTD.dtype

    def split(self, x: jax.Array) -> jax.Array:
        """Splits [B, T, …] into [X, R, P, N, …]. The last chunk is padded with zeros."""
        rest = x.shape[2:]
        R, rows, row_groups, P, chunks, C = self._shape
        x = x.reshape(R * rows * row_groups, P, self._length // P, *rest)
        x = jnp.pad(x, [(0, 0), (0, 0), (0, chunks * C - self._length // P)] + [(0, 0)] * len(rest))
        x = jnp.moveaxis(x.reshape(*self._shape, *rest), (2, 4, 0, 3, 1, 5), range(6))
        x = x.reshape(row_groups * chunks, R, P, -1, *rest)
        return self._partitioning.constrain(x, ('micro_batch', *PARTS, *['activation'] * (x.ndim - 3)))

    def join(self, x: jax.Array) -> jax.Array:
        """Joins [X, R, P, N, …] to [B, T, …], the inverse of `split`."""
        rest = x.shape[4:]
        R, rows, row_groups, P, chunks, C = self._shape
        x = x.reshape(row_groups, chunks, R, P, rows, C, *rest)
        x = jnp.moveaxis(x, range(6), (2, 4, 0, 3, 1, 5)).reshape(R * rows * row_groups, P, chunks * C, *rest)
        return x[:, :, : self._length // P].reshape(-1, self._length, *rest)

    def spread(self, kernel_DV: jax.Array) -> Any:
        """Gathers the kernel on every device, except along the vocabulary, which is padded if it does not divide.

        Returns:
            [R, P, D, V] in the dtype of the hidden states, or [R, P, V, D] if it is transposed.
        """
        return self._spread(kernel_DV.astype(self.dtype))

    def _spread(self, kernel_DV: jax.Array) -> jax.Array:
        """Returns the kernel, or its codes, in the layout of `spread`."""
        R, _, _, P, _, _ = self._shape
        kernel_DV = self._partitioning.pad_vocabulary(kernel_DV, ('embed', 'vocab'))
        kernel = kernel_DV.T if self._is_transposed else kernel_DV
        whole = self._partitioning.constrain(kernel, self._kernel_axes)
        whole = jnp.broadcast_to(whole, (R, P, *whole.shape))
        return self._partitioning.constrain(whole, (*PARTS, *self._kernel_axes))

    def logits(self, hidden_RPND: jax.Array, kernel_RPDV: Any) -> jax.Array:
        """Returns the logits of a chunk, [R, P, N, V] in float32."""
        equation = f'RPND,RP{self._kernel}->RPNV'
        scores = jnp.einsum(equation, hidden_RPND, kernel_RPDV, preferred_element_type=jnp.float32)
        return self._partitioning.constrain(scores, (*PARTS, 'activation', 'vocab'))

    def no_gradient(self, kernel_RPDV: Any) -> jax.Array:
        """Returns float32 zeros in which the gradient of the kernel is accumulated."""
        return jnp.zeros(kernel_RPDV.shape, jnp.float32)

    def add_gradient(
        self, kernel_gradient: jax.Array, hidden_RPND: jax.Array, kernel_RPDV: Any, scores_gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the gradient of a chunk to the kernel's gradient, and returns it and the gradient of the hidden states.

        Gradients of logits are rounded to the dtype of the hidden states for both matrix products.
        """
        gradient = scores_gradient.astype(hidden_RPND.dtype)
        of_hidden = jnp.einsum(f'RPNV,RP{self._kernel}->RPND', gradient, kernel_RPDV)
        of_hidden = self._partitioning.constrain(of_hidden, (*PARTS, 'activation', 'activation'))
        equation = f'RPND,RPNV->RP{self._kernel}'
        kernel_gradient += jnp.einsum(equation, hidden_RPND, gradient, preferred_element_type=jnp.float32)
        return self._partitioning.constrain(kernel_gradient, (*PARTS, *self._kernel_axes)), of_hidden

    def sum_gradient(self, kernel_gradient: jax.Array, vocab_size: int) -> jax.Array:
        """Sums the kernel's gradient over the shards of the batch and removes the padding.

        Returns:
            [D, vocab_size].
        """
        gradient = kernel_gradient.sum((0, 1))
        gradient = gradient.T if self._is_transposed else gradient
        gradient = self._partitioning.constrain_gradient(gradient, ('embed', 'vocab'))
        return self._partitioning.cut_vocabulary(gradient, ('embed', 'vocab'), vocab_size)


def sum_over_chunks(
    function: Callable[..., tuple[jax.Array, tuple[jax.Array, ...]]],
    hidden_BTD: jax.Array,
    kernel_DV: jax.Array,
    inputs: tuple[jax.Array, ...],
    chunks: LogitChunks,
) -> tuple[jax.Array, tuple[jax.Array, ...]]:
    """Sums a function of the logits of each chunk, with gradients computed in the forward pass.

    Only the first result has a gradient, with respect to hidden states and kernel.

    Args:
        function: (logits [R, P, N, V], inputs [R, P, N, …]) → scalar, and a tuple of arrays [R, P, N]. `function` must
            not contain `chunks.logits` of an array with a gradient.
        hidden_BTD: hidden states.
        kernel_DV: float32 kernel of the head.
        inputs: arrays [B, T, …].
        chunks: chunks of the hidden states.

    Returns:
        The sum of the scalars, and the sums [B] of the arrays over the positions of a row.
    """
    vocab_size = kernel_DV.shape[1]

    def total(objectives: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        return objectives.sum(), tuple(chunks.join(x).sum(1) for x in sums)

    @jax.custom_vjp
    def run(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(_: None, inputs: tuple[jax.Array, ...]) -> tuple[None, Any]:
            hidden, *rest = inputs
            return None, function(chunks.logits(hidden, kernel_RPDV), *rest)

        return total(*scan_chunks(add, None, tuple(map(chunks.split, (hidden_BTD, *inputs))))[1])

    def forward(hidden_BTD: jax.Array, kernel_DV: jax.Array) -> tuple[Any, Any]:
        kernel_RPDV = chunks.spread(kernel_DV)

        def add(kernel_gradient: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, Any]:
            hidden, *rest = inputs
            scores = chunks.logits(hidden, kernel_RPDV)
            objective, pull_back, sums = jax.vjp(lambda x: function(x, *rest), scores, has_aux=True)
            (gradient,) = pull_back(jnp.ones((), jnp.float32))
            kernel_gradient, of_hidden = chunks.add_gradient(kernel_gradient, hidden, kernel_RPDV, gradient)
            return kernel_gradient, (objective, sums, of_hidden)

        parts = tuple(map(chunks.split, (hidden_BTD, *inputs)))
        kernel_gradient, (objectives, sums, of_hidden) = scan_chunks(add, chunks.no_gradient(kernel_RPDV), parts)
        return total(objectives, sums), (chunks.join(of_hidden), chunks.sum_gradient(kernel_gradient, vocab_size))

    def backward(residuals: tuple[jax.Array, jax.Array], cotangents: Any) -> tuple[jax.Array, ...]:
        # The cotangent of the objective is a scalar, the loss scale. The other outputs have no gradient.
        (hidden_gradient, kernel_gradient), cotangent = residuals, cotangents[0]
        return (hidden_gradient * cotangent).astype(hidden_BTD.dtype), kernel_gradient * cotangent

    run.defvjp(forward, backward)
    with jax.named_scope('loss'):
        objective, sums = run(hidden_BTD, kernel_DV)
    return objective, jax.tree.map(jax.lax.stop_gradient, sums)


def scan_chunks(add: Any, carry: Any, inputs: tuple[jax.Array, ...]) -> tuple[Any, Any]:
    """Runs `jax.lax.scan`, or without a loop if there is only one chunk."""
    if len(inputs[0]) > 1:
        return jax.lax.scan(add, carry, inputs)
    carry, outputs = add(carry, tuple(x[0] for x in inputs))
    return carry, jax.tree.map(lambda x: x[None], outputs)
