"""Formats of quantized weights and of the key-value cache. Commands import them for their options."""

from __future__ import annotations

# Formats of quantized weights, and by default the number of inputs that share a scale; 0 means all. The 16 values of
# int4 need smaller groups.
QUANTIZATION_GROUPS = {'int8': 0, 'int4': 32, 'fp8': 0}
# Formats in which inference also rounds the inputs of the kernels to 8 bits, on a CPU, and the format of their kernels.
ROUNDED_INPUTS = {'w8a8': 'int8', 'w4a8': 'int4'}
# Dtypes of the key-value cache in inference; `model` is model.dtype.
KV_CACHE_DTYPES = ('model', 'int8')
