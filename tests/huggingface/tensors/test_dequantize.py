"""Quantized tensors against Transformers' dequantization, and imports of quantized checkpoints."""

import json
import tracemalloc

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from maxlm.checkpoint.streaming import ParamsReader
from maxlm.errors import InputError
from maxlm.huggingface.import_model import import_model
from maxlm.huggingface.tensors import safetensors_io
from maxlm.huggingface.tensors.dequantize import open_tensors
from tests.huggingface.transformers_models import CASES, make_model
from tests.messages import input_error

FP8 = {'quant_method': 'fp8', 'weight_block_size': [128, 128]}
MXFP4 = {'quant_method': 'mxfp4'}


def fp8(shape, block=(128, 128)):
    """Returns random codes, and scales that differ by block."""
    generator = torch.Generator().manual_seed(0)
    codes = torch.randn(shape, generator=generator).to(torch.float8_e4m3fn)
    blocks = [-(-n // size) for n, size in zip(shape, block, strict=True)]
    return codes, torch.rand(blocks, generator=generator) + 0.5


def mxfp4(*shape):
    """Returns random blocks [E, O, G, 16], and scales [E, O, G]."""
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (*shape, 16), dtype=np.uint8)
    return torch.from_numpy(blocks), torch.from_numpy(rng.integers(90, 160, shape, dtype=np.uint8))


def opened(directory, tensors, quantization):
    save_file(tensors, directory / 'model.safetensors')
    return open_tensors(directory, quantization, 'config.json')


@pytest.mark.parametrize('shape', [(300, 200), (128, 256), (5, 130)])
def test_fp8_equals_transformers(tmp_path, shape, monkeypatch):
    # Parts of a few rows, which begin and end within blocks.
    monkeypatch.setattr(safetensors_io, '_BLOCK', 4 * 50 * shape[1])
    codes, scales = fp8(shape)
    norm = torch.arange(4.0)
    files = opened(tmp_path, {'a.weight': codes, 'a.weight_scale_inv': scales, 'norm.weight': norm}, FP8)
    assert files.shapes == {'a.weight': shape, 'norm.weight': (4,)}
    files.check_dtypes(list(files.shapes))
    expected = _dequantize_fp8_weight(codes, scales, [128, 128], torch.float32).numpy()
    np.testing.assert_array_equal(files.read('a.weight'), expected)
    np.testing.assert_array_equal(files.read('norm.weight'), norm.numpy())
    assert files.equal('a.weight', 'a.weight')
    # Negative control: the scales matter.
    assert np.abs(expected - codes.float().numpy()).max() > 0.1


def test_mxfp4_equals_transformers(tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_io, '_BLOCK', 1)
    blocks, scales = mxfp4(3, 10, 2)
    files = opened(tmp_path, {'x_blocks': blocks, 'x_scales': scales, 'x_bias': torch.ones(3, 10)}, MXFP4)
    assert files.shapes == {'x': (3, 64, 10), 'x_bias': (3, 10)}
    assert files.path('x') == tmp_path / 'model.safetensors'
    found = files.read('x')
    np.testing.assert_array_equal(found, convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).numpy())
    other = convert_moe_packed_tensors(blocks.flip(3), scales, dtype=torch.float32).numpy()
    assert np.abs(found - other).max() > 1


def test_a_tensor_is_dequantized_in_parts(tmp_path):
    codes, scales = fp8((8192, 2048))
    files = opened(tmp_path, {'a.weight': codes, 'a.weight_scale_inv': scales}, FP8)
    tracemalloc.start()
    values = files.read('a.weight')
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert values.nbytes == 64 * 2**20
    assert peak < values.nbytes + 6 * safetensors_io._BLOCK


def test_an_fp8_checkpoint_is_imported(tmp_path):
    directory = tmp_path / 'theirs'
    make_model(CASES['llama']).save_pretrained(directory)
    floats, quantized = load_file(directory / 'model.safetensors'), {}
    block = (16, 16)
    for name, tensor in list(floats.items()):
        quantized[name] = tensor
        if 'proj' in name:
            codes, scales = fp8(tuple(tensor.shape), block)
            quantized |= {name: codes, f'{name}_scale_inv': scales}
            floats[name] = _dequantize_fp8_weight(codes, scales, list(block), torch.float32)
    save_file(floats, directory / 'model.safetensors')
    import_model(str(directory), str(tmp_path / 'floats'), show=False)
    save_file(quantized, directory / 'model.safetensors')
    config = json.loads((directory / 'config.json').read_text())
    config['quantization_config'] = {**FP8, 'weight_block_size': list(block)}
    (directory / 'config.json').write_text(json.dumps(config))
    import_model(str(directory), str(tmp_path / 'quantized'), show=False)
    found, expected = (ParamsReader(tmp_path / name / 'checkpoints' / '0') for name in ('quantized', 'floats'))
    assert found.shapes == expected.shapes
    for path in expected.shapes:
        np.testing.assert_array_equal(found.read(path), expected.read(path))


def test_an_mxfp4_checkpoint_is_imported(tmp_path):
    directory = tmp_path / 'theirs'
    make_model(CASES['gpt_oss']).save_pretrained(directory)
    floats = load_file(directory / 'model.safetensors')
    quantized = dict(floats)
    for name in [name for name in floats if name.endswith('gate_up_proj')]:
        num_experts, inputs, outputs = floats[name].shape
        blocks, scales = mxfp4(num_experts, outputs, inputs // 32)
        floats[name] = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).contiguous()
        del quantized[name]
        quantized |= {f'{name}_blocks': blocks, f'{name}_scales': scales}
    save_file(floats, directory / 'model.safetensors')
    import_model(str(directory), str(tmp_path / 'floats'), show=False)
    save_file(quantized, directory / 'model.safetensors')
    config = json.loads((directory / 'config.json').read_text())
    (directory / 'config.json').write_text(json.dumps({**config, 'quantization_config': MXFP4}))
    import_model(str(directory), str(tmp_path / 'quantized'), show=False)
    found, expected = (ParamsReader(tmp_path / name / 'checkpoints' / '0') for name in ('quantized', 'floats'))
    assert found.shapes == expected.shapes
    for path in expected.shapes:
        np.testing.assert_array_equal(found.read(path), expected.read(path))
    # Control: gates and up-projections are different columns.
    gate, up = (found.read(f'blocks.feedforward.experts.{name}.kernel') for name in ('gate', 'up'))
    assert np.abs(gate - up).max() > 1


CODES, SCALES = fp8((130, 130))
BLOCKS, EXPONENTS = mxfp4(2, 4, 1)


@pytest.mark.parametrize(
    ('tensors', 'quantization', 'parts'),
    [
        ({'a': CODES, 'a_scale_inv': SCALES}, {**FP8, 'fmt': 'e5m2'}, ["fmt='e5m2'", 'e4m3']),
        ({'a': CODES, 'a_scale_inv': SCALES}, {'quant_method': 'fp8'}, ['weight_block_size=None', '[128, 128]']),
        ({'a': CODES, 'a_scale_inv': SCALES[:1]}, FP8, ['a_scale_inv has shape (1, 2)', 'a has shape (130, 130)']),
        ({'a': CODES, 'a_scale_inv': SCALES.to(torch.int32)}, FP8, ['a_scale_inv of dtype I32', 'F32, BF16, F16']),
        ({'a_scale_inv': SCALES}, FP8, ['a_scale_inv of dtype F32 needs a tensor a of dtype F8_E4M3']),
        ({'x_blocks': BLOCKS}, MXFP4, ['x_blocks (2, 4, 1, 16)', 'x_scales']),
        ({'x_blocks': BLOCKS.float(), 'x_scales': EXPONENTS}, MXFP4, ['x_blocks', 'of dtype F32 must be U8']),
    ],
)
def test_inconsistent_files_are_refused(tmp_path, tensors, quantization, parts):
    with input_error(*parts):
        opened(tmp_path, tensors, quantization)


def test_codes_without_scales_are_refused(tmp_path):
    files = opened(tmp_path, {'a': CODES}, FP8)
    with pytest.raises(InputError, match='tensor a has dtype F8_E4M3; must be'):
        files.check_dtypes(['a'])
