"""The parameters of a step in codes and scales, and codes and scales as parameters again, a layer at a time.

Kernels are named by their dotted path, `blocks.feedforward.up.kernel`; codes and scales of it lie in its place, as
`…kernel_codes` and `…kernel_scales`.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from maxlm.checkpoint.streaming import ParamsReader, StreamedArray
from maxlm.config.schema import ModelConfig
from maxlm.errors import InputError
from maxlm.model.blocks import BLOCKS
from maxlm.model.layers.weight_only_quantization import (
    CODE_DTYPES,
    CODES,
    SCALES,
    Codes,
    Weights,
    code_shapes,
    dequantize,
    quantization_error,
    quantize,
    quantized_kernels,
    weights_of,
)

_SCALES_DTYPE = np.dtype(ml_dtypes.bfloat16)


def quantized_arrays(
    reader: ParamsReader, model: ModelConfig, weights: Weights, source: str
) -> dict[str, StreamedArray]:
    """By dotted path, what the quantized model of a step is made of; each layer is read when its turn comes.

    The scales that come up with codes are kept, so that each layer is read once if codes are asked for first.

    Args:
        reader: of the step, whose parameters are those of `model` in float32.
        model: resolved.
        weights: how to store its kernels.
        source: what messages call the step.

    Raises:
        InputError: a kernel cannot be stored so. An array's `read` raises it too: what it reads cannot be read or is
            not finite.
    """
    kernels = quantized_kernels(model)
    found: dict[str, StreamedArray] = {}
    for path, shape in reader.shapes.items():
        if path in kernels:
            found |= _quantized_kernel(reader, path, kernels[path], weights, source)
        else:
            found[path] = StreamedArray(shape, partial(reader.read, path), path.startswith(f'{BLOCKS}.'))
    return found


def _quantized_kernel(
    reader: ParamsReader, path: str, num_in: int, weights: Weights, source: str
) -> dict[str, StreamedArray]:
    num_layers, *shape = reader.shapes[path]
    if reason := quantization_error(tuple(shape[:num_in]), weights):
        raise InputError(f'{source}: {path} has {reason}; choose another kind of weights or another group')
    run = jax.jit(partial(quantize, num_in=num_in, weights=weights))
    cached_scales: dict[int, np.ndarray] = {}

    def make(layer: int) -> tuple[np.ndarray, np.ndarray]:
        kernel = reader.read(path, layer)
        if not np.isfinite(kernel).all():
            raise InputError(f'{source}: {path} is not finite in layer {layer}; choose an earlier step')
        found = run(jnp.asarray(kernel))
        return np.asarray(found.codes), np.asarray(found.scales)

    def read_codes(layer: int | None) -> np.ndarray:
        assert layer is not None, path
        codes, cached_scales[layer] = make(layer)
        return codes

    def read_scales(_: int | None) -> np.ndarray:
        # All at once: they are small, and each write makes the checkpoint's index longer.
        return np.stack(
            [cached_scales[layer] if layer in cached_scales else make(layer)[1] for layer in range(num_layers)]
        )

    module = path.rpartition('.')[0]
    codes_shape, scales_shape = code_shapes(tuple(shape), num_in, weights)
    codes_dtype = np.dtype(CODE_DTYPES[weights.kind])
    return {
        f'{module}.{CODES}': StreamedArray((num_layers, *codes_shape), read_codes, True, codes_dtype),
        f'{module}.{SCALES}': StreamedArray((num_layers, *scales_shape), read_scales, False, _SCALES_DTYPE),
    }


class DequantizedReader:
    """Reads the parameters of a step of a quantized model, like `ParamsReader`, with kernels made of their codes.

    Attributes:
        shapes: dotted path → shape, as the model in float32 would be stored.
    """

    def __init__(self, reader: ParamsReader, model: ModelConfig, source: str):
        """Finds what is there, without reading it.

        Args:
            reader: of the step.
            model: of its config, quantized.
            source: what messages call the step.

        Raises:
            InputError: the codes of the step are not those of the model.
        """
        weights = weights_of(model)
        assert weights is not None, 'a model that is not quantized needs no such reader'
        self._reader, self._kind = reader, weights.kind
        self._num_in = quantized_kernels(model)
        self.shapes = {path: shape for path, shape in reader.shapes.items() if not path.endswith((CODES, SCALES))}
        for path, num_in in self._num_in.items():
            module = path.rpartition('.')[0]
            for suffix, dtype in ((CODES, np.dtype(CODE_DTYPES[weights.kind])), (SCALES, _SCALES_DTYPE)):
                name = f'{module}.{suffix}'
                if reader.dtypes.get(name) != dtype:
                    raise InputError(
                        f'{source}: parameter {name} is of {reader.dtypes.get(name, "no type, it is missing")}; '
                        f'model.weight_quantization={weights.kind} has {dtype} there'
                    )
            num_layers, *shape = reader.shapes[f'{module}.{CODES}']
            # The only axis whose size differs.
            shape[num_in - 1] *= 2 if weights.kind == 'int4' else 1
            self.shapes[path] = (num_layers, *shape)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        """One array in float32, or one layer of it; of a kernel a layer only."""
        num_in = self._num_in.get(path)
        if num_in is None:
            return self._reader.read(path, layer)
        assert layer is not None, path
        module = path.rpartition('.')[0]
        stored = Codes(*(jnp.asarray(self._reader.read(f'{module}.{suffix}', layer)) for suffix in (CODES, SCALES)))
        return np.asarray(dequantize(stored, num_in, self._kind, jnp.float32))
