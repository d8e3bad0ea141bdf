"""Logits of a chunk and their gradients as products of 8-bit floats (`model.fp8_head`).

Hidden states and kernel have scales from their current largest elements. Gradients of logits need no search for their
largest element: those of the cross-entropy are differences of probabilities, which are between -1 and 1.

Shapes: those of `maxlm.training.losses.chunked_logits`.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from maxlm.model.fp8.products import E4M3, E5M2, Fp8Codes, Rounded, multiply, quantize
from maxlm.training.losses.chunked_logits import PARTS, LogitChunks

# The largest value of E5M2 is 57344, so elements up to 1.75 are in its range. The rest is for the z-loss.
GRADIENT_SCALE = 2.0**-15
BATCH_AXES = len(PARTS)


class Fp8LogitChunks(LogitChunks):
    """Splits the positions of a batch into chunks, whose three products with the kernel of the head use FP8."""

    def spread(self, kernel_DV: jax.Array) -> Fp8Codes:
        """Returns the kernel in E4M3, in the layout of `LogitChunks.spread`."""
        codes = quantize(jax.lax.stop_gradient(kernel_DV), E4M3)
        return codes._replace(bits=self._spread(codes.bits))

    def logits(self, hidden_RPND: jax.Array, kernel_RPDV: Fp8Codes) -> jax.Array:
        hidden = Rounded(quantize(hidden_RPND, E4M3), E4M3, (3,))
        kernel = Rounded(kernel_RPDV, E4M3, (BATCH_AXES + self._kernel.index('D'),))
        # Errors of large logits would be errors of probabilities, so sums are float32.
        scores = multiply(hidden, kernel, jnp.float32, jax.lax.Precision.HIGHEST, batch_axes=BATCH_AXES)
        return self._partitioning.constrain(scores, (*PARTS, 'activation', 'vocab'))

    def no_gradient(self, kernel_RPDV: Fp8Codes) -> jax.Array:
        return jnp.zeros(kernel_RPDV.bits.shape, jnp.float32)

    def add_gradient(
        self, kernel_gradient: jax.Array, hidden_RPND: jax.Array, kernel_RPDV: Fp8Codes, scores_gradient: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        precision = jax.lax.Precision.HIGHEST
        gradient = quantize(scores_gradient, E5M2, jnp.float32(GRADIENT_SCALE))
        kernel = Rounded(kernel_RPDV, E4M3, (BATCH_AXES + self._kernel.index('V'),))
        of_hidden = multiply(Rounded(gradient, E5M2, (3,)), kernel, hidden_RPND.dtype, precision, batch_axes=BATCH_AXES)
        of_hidden = self._partitioning.constrain(of_hidden, (*PARTS, 'activation', 'activation'))
        factors = {'D': Rounded(quantize(hidden_RPND, E4M3), E4M3, (2,)), 'V': Rounded(gradient, E5M2, (2,))}
        first, second = (factors[letter] for letter in self._kernel)
        kernel_gradient += multiply(first, second, jnp.float32, precision, batch_axes=BATCH_AXES)
        return self._partitioning.constrain(kernel_gradient, (*PARTS, *self._kernel_axes)), of_hidden
