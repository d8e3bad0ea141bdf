"""Reads quantized tensors of safetensors files as float32, a few rows at a time.

fp8 (DeepSeek-AI 2024, "DeepSeek-V3 Technical Report", section 3.3): a weight of 8-bit floats E4M3 and a tensor
`weight_scale_inv` with a factor for each block of rows × columns. mxfp4 (Open Compute Project 2023, "OCP Microscaling
Formats", as in gpt-oss): tensors `*_blocks` with two 4-bit floats E2M1 per byte and `*_scales` with an exponent for
each 32 values. Both layouts are those of Transformers.

Shapes: E experts, O outputs, I inputs of an expert, G = I/32 groups.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from maxlm.errors import InputError
from maxlm.huggingface.tensors.safetensors_io import TensorFiles

METHODS = ('fp8', 'mxfp4')
_SCALE_INV, _BLOCKS, _SCALES = '_scale_inv', '_blocks', '_scales'
_SCALE_DTYPES = ('F32', 'BF16', 'F16')
# Values of the codes 0 … 15 of E2M1.
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_VALUES = np.concatenate([_E2M1, -_E2M1])
# Exponent of a scale with code 0, negated.
_BIAS = 127


def open_tensors(directory: Path, quantization: Mapping[str, Any], source: str) -> TensorFiles:
    """Returns the tensors of a directory, dequantized.

    Args:
        directory: directory with safetensors.
        quantization: quantization_config of config.json, with a method of METHODS; empty for float weights.
        source: name of config.json in error messages.

    Raises:
        InputError: the quantization is not supported, or the files are not valid.
    """
    method = quantization.get('quant_method')
    if not quantization:
        return TensorFiles(directory)
    if method == 'mxfp4':
        return Mxfp4Files(directory)
    key = f'{source}: quantization_config'
    assert method == 'fp8', method
    if quantization.get('fmt', 'e4m3') != 'e4m3':
        raise InputError(f'{key}: fmt={quantization["fmt"]!r:.100} is not supported; use e4m3 or float weights')
    block = quantization.get('weight_block_size')
    if not isinstance(block, list) or len(block) != 2 or not all(type(n) is int and n > 0 for n in block):
        raise InputError(f'{key}: weight_block_size={block!r:.100}: must be two positive integers, e.g. [128, 128]')
    return Fp8Files(directory, (block[0], block[1]))


class Fp8Files(TensorFiles):
    """Tensors of which some are 8-bit floats with a scale for each block of rows × columns."""

    def __init__(self, directory: Path, block: tuple[int, int]):
        super().__init__(directory)
        self._block = block
        self._scales: dict[str, np.ndarray] = {}
        for scale_name in [name for name in self.shapes if name.endswith(_SCALE_INV)]:
            name = scale_name.removesuffix(_SCALE_INV)
            shape, scale_shape = self.shapes.get(name), self.shapes[scale_name]
            if shape is None or self.dtypes[name] != 'F8_E4M3' or self.dtypes[scale_name] not in _SCALE_DTYPES:
                raise InputError(
                    f'{self.path(scale_name)}: tensor {scale_name} of dtype {self.dtypes[scale_name]} needs a tensor '
                    f'{name} of dtype F8_E4M3, and must be {", ".join(_SCALE_DTYPES)}; download it again'
                )
            if len(shape) != 2 or scale_shape != tuple(-(-n // size) for n, size in zip(shape, block, strict=True)):
                raise InputError(
                    f'{self.path(scale_name)}: tensor {scale_name} has shape {scale_shape}, but {name} has shape '
                    f'{shape} and weight_block_size={list(block)}; use the config.json of these weights'
                )
            self._scales[name] = self.read(scale_name)
            del self.shapes[scale_name]
            self.dtypes[name] = 'F32'

    def _read(self, name: str, rows: Any) -> np.ndarray:
        if name not in self._scales:
            return super()._read(name, rows)
        codes = self.read_bytes(name, rows).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
        high, wide = self._block
        scales = self._scales[name][np.arange(rows.start, rows.stop) // high]
        for column, start in enumerate(range(0, codes.shape[1], wide)):
            codes[:, start : start + wide] *= scales[:, column, None]
        return codes


class Mxfp4Files(TensorFiles):
    """Tensors of which some are 4-bit floats of experts, [E, O, G, 16] bytes; they are read as [E, I, O]."""

    def __init__(self, directory: Path):
        super().__init__(directory)
        self._packed: set[str] = set()
        for blocks_name in [name for name in self.shapes if name.endswith(_BLOCKS)]:
            name = blocks_name.removesuffix(_BLOCKS)
            shape, scales_name = self.shapes[blocks_name], name + _SCALES
            if (
                len(shape) != 4
                or shape[3] != 16
                or self.shapes.get(scales_name) != shape[:3]
                or {self.dtypes[blocks_name], self.dtypes[scales_name]} != {'U8'}
            ):
                raise InputError(
                    f'{self.path(blocks_name)}: tensor {blocks_name} {shape} of dtype {self.dtypes[blocks_name]} must '
                    f'be U8 [experts, outputs, groups, 16] with {scales_name} U8 [experts, outputs, groups]; download '
                    'it again'
                )
            num_experts, outputs, groups, _ = shape
            self._packed.add(name)
            self.shapes[name], self.dtypes[name] = (num_experts, groups * 32, outputs), 'F32'
            self._paths[name] = self.path(blocks_name)
            del self.shapes[blocks_name], self.shapes[scales_name]

    def _read(self, name: str, rows: Any) -> np.ndarray:
        if name not in self._packed:
            return super()._read(name, rows)
        codes_EOGb, exponents_EOG = super()._read(name + _BLOCKS, rows), super()._read(name + _SCALES, rows)
        # The lower half of a byte is the first value.
        values = np.stack([_FP4_VALUES[codes_EOGb & 15], _FP4_VALUES[codes_EOGb >> 4]], axis=-1)
        values = values.reshape(*exponents_EOG.shape, 32)
        values_EOGv = np.ldexp(values, exponents_EOG[..., None].astype(np.int32) - _BIAS)
        return values_EOGv.reshape(*exponents_EOG.shape[:2], -1).swapaxes(1, 2)
