"""Quantizes the parameters of a step to codes and scales, and dequantizes them, one layer at a time.

Kernels are named by their dotted path, such as `blocks.feedforward.up.kernel`. Their codes and scales replace them as
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
from maxlm.config.sections.families import is_of_experts
from maxlm.errors import InputError
from maxlm.model.blocks import is_stacked
from maxlm.model.layers.weight_only_quantization import (
    CODE_DTYPES,
    CODES,
    SCALES,
    Codes,
    Weights,
    code_shapes,
    dequantize,
    per_expert,
    quantization_error,
    quantize,
    quantized_kernels,
    weights_of,
)

_SCALES_DTYPE = np.dtype(ml_dtypes.bfloat16)


def quantized_arrays(
    reader: ParamsReader, model: ModelConfig, weights: Weights, source: str
) -> dict[str, StreamedArray]:
    """Returns the arrays of the quantized model by dotted path. Each layer is read on demand.

    Scales are cached when codes are computed, so each layer is read once if codes are read before scales.

    Args:
        reader: reader of the step, whose parameters are those of `model` in float32.
        model: resolved config.
        weights: storage format of the kernels.
        source: name of the step in error messages.

    Raises:
        InputError: a kernel cannot be stored in this format. `StreamedArray.read` raises it if a kernel cannot be read
            or is not finite.
    """
    kernels = quantized_kernels(model)
    found: dict[str, StreamedArray] = {}
    for path, shape in reader.shapes.items():
        if path in kernels:
            found |= _quantized_kernel(reader, path, kernels[path], weights, source)
        else:
            found[path] = StreamedArray(shape, partial(reader.read, path), is_stacked(path))
    return found


def _quantized_kernel(
    reader: ParamsReader, path: str, num_in: int, weights: Weights, source: str
) -> dict[str, StreamedArray]:
    num_layers, *shape = reader.shapes[path]
    experts = [shape.pop(0)] if is_of_experts(path) else []
    if reason := quantization_error(tuple(shape[:num_in]), weights):
        raise InputError(f'{source}: {path} has {reason}; choose another --format or --group')
    run = jax.jit(per_expert(partial(quantize, num_in=num_in, weights=weights), path))
    cached_scales: dict[int, np.ndarray] = {}

    def make(layer: int) -> tuple[np.ndarray, np.ndarray]:
        kernel = reader.read(path, layer)
        if not np.isfinite(kernel).all():
            raise InputError(f'{source}: {path} contains NaN or infinity in layer {layer}; choose an earlier step')
        found = run(jnp.asarray(kernel))
        return np.asarray(found.codes), np.asarray(found.scales)

    def read_codes(layer: int | None) -> np.ndarray:
        assert layer is not None, path
        codes, cached_scales[layer] = make(layer)
        return codes

    def read_scales(_: int | None) -> np.ndarray:
        # Write all layers together. Scales are small, and each write adds an entry to the checkpoint's index.
        return np.stack(
            [cached_scales[layer] if layer in cached_scales else make(layer)[1] for layer in range(num_layers)]
        )

    module = path.rpartition('.')[0]
    codes_shape, scales_shape = ((*experts, *each) for each in code_shapes(tuple(shape), num_in, weights))
    codes_dtype = np.dtype(CODE_DTYPES[weights.kind])
    return {
        f'{module}.{CODES}': StreamedArray((num_layers, *codes_shape), read_codes, True, codes_dtype),
        f'{module}.{SCALES}': StreamedArray((num_layers, *scales_shape), read_scales, False, _SCALES_DTYPE),
    }


def kernel_shape(codes_shape: tuple[int, ...], path: str, num_in: int, kind: str) -> tuple[int, ...]:
    """Returns the shape of the kernel with this dotted path and `num_in` input axes from the shape of its codes."""
    shape = list(codes_shape)
    # Two int4 codes share a byte along the last input axis, which follows those of layers and experts.
    shape[num_in + is_of_experts(path)] *= 2 if kind == 'int4' else 1
    return tuple(shape)


class DequantizedReader:
    """Reads the parameters of a quantized model's step like `ParamsReader`, with dequantized kernels.

    Attributes:
        shapes: dotted path → shape of the float32 model.
    """

    def __init__(self, reader: ParamsReader, model: ModelConfig, source: str):
        """Reads the shapes and dtypes of the step's arrays, but not the arrays.

        Args:
            reader: reader of the step.
            model: config of the quantized model.
            source: name of the step in error messages.

        Raises:
            InputError: the codes of the step do not match the model.
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
                        f'{source}: parameter {name} has dtype {reader.dtypes.get(name, "none (missing)")}; '
                        f'model.weight_quantization={weights.kind} requires {dtype}'
                    )
            self.shapes[path] = kernel_shape(reader.shapes[f'{module}.{CODES}'], path, num_in, weights.kind)

    def read(self, path: str, layer: int | None = None) -> np.ndarray:
        """Reads one array in float32, or one layer of it. A kernel requires `layer`."""
        num_in = self._num_in.get(path)
        if num_in is None:
            return self._reader.read(path, layer)
        assert layer is not None, path
        module = path.rpartition('.')[0]
        stored = Codes(*(jnp.asarray(self._reader.read(f'{module}.{suffix}', layer)) for suffix in (CODES, SCALES)))
        run = per_expert(partial(dequantize, num_in=num_in, kind=self._kind, dtype=jnp.float32), path)
        return np.asarray(run(stored))
