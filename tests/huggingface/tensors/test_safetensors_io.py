"""Tests directories of safetensors files against the library, and error messages for damaged files."""

import json

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.numpy import save_file
from safetensors.torch import load_file

from maxlm.errors import InputError
from maxlm.huggingface.tensors import safetensors_io as module
from maxlm.huggingface.tensors.safetensors_io import DTYPES, TensorEntry, TensorFiles, plan_shards, write_tensors
from tests.messages import input_error

TORCH = {'float32': torch.float32, 'bfloat16': torch.bfloat16, 'float16': torch.float16}


def random_arrays(**shapes):
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


ARRAYS = random_arrays(a=(5, 3), b=(7,), c=(2, 3, 4), d=(1, 9))


def write(path, arrays, dtype='float32', max_shard_size=10**9):
    entries = [TensorEntry(name, array.shape, lambda array=array: array) for name, array in arrays.items()]
    done = []
    path.mkdir(exist_ok=True)
    write_tensors(path, entries, dtype=dtype, max_shard_size=max_shard_size, on_written=done.append)
    assert done == list(arrays)
    return path


@pytest.mark.parametrize('dtype', DTYPES)
def test_torch_reads_written_files(tmp_path, dtype):
    write(tmp_path, ARRAYS, dtype)
    theirs = load_file(tmp_path / 'model.safetensors')
    assert list(theirs) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert torch.equal(theirs[name], torch.from_numpy(array).to(TORCH[dtype]))
    with safe_open(tmp_path / 'model.safetensors', 'np') as file:
        assert file.metadata() == {'format': 'pt'}


@pytest.mark.parametrize('dtype', DTYPES)
def test_written_files_are_read(tmp_path, dtype, monkeypatch):
    files = TensorFiles(write(tmp_path, ARRAYS, dtype))
    assert files.shapes == {name: array.shape for name, array in ARRAYS.items()}
    assert set(files.dtypes.values()) == {DTYPES[dtype][0]}
    # Blocks may be smaller than a tensor and need not divide it.
    for block in (10**6, 40, 1):
        monkeypatch.setattr(module, '_BLOCK', block)
        for name, array in ARRAYS.items():
            read = files.read(name)
            assert read.dtype == np.float32
            np.testing.assert_array_equal(read, array.astype(DTYPES[dtype][1]).astype(np.float32))


def test_blocks_do_not_change_the_file(tmp_path, monkeypatch):
    # The layouts give views with swapped axes.
    arrays = {name: array.T for name, array in ARRAYS.items()}
    single = (write(tmp_path / 'single', arrays, 'bfloat16') / 'model.safetensors').read_bytes()
    monkeypatch.setattr(module, '_BLOCK', 30)
    assert (write(tmp_path / 'parts', arrays, 'bfloat16') / 'model.safetensors').read_bytes() == single
    assert (write(tmp_path / 'other', ARRAYS, 'bfloat16') / 'model.safetensors').read_bytes() != single


def test_shards_and_their_index(tmp_path):
    write(tmp_path, ARRAYS, max_shard_size=100)
    index = json.loads((tmp_path / 'model.safetensors.index.json').read_text())
    # Sizes: a 60 bytes, b 28, c 96, d 36.
    names = [f'model-0000{number}-of-00003.safetensors' for number in (1, 2, 3)]
    assert index['weight_map'] == {'a': names[0], 'b': names[0], 'c': names[1], 'd': names[2]}
    assert index['metadata'] == {'total_size': 220}
    files = TensorFiles(tmp_path)
    for name, array in ARRAYS.items():
        assert files.path(name).name == index['weight_map'][name]
        np.testing.assert_array_equal(files.read(name), array)


def test_plans_of_shards():
    assert plan_shards({'a': 3, 'b': 3, 'c': 3}, 6) == [['a', 'b'], ['c']]
    assert plan_shards({'a': 3, 'b': 9, 'c': 3}, 6) == [['a'], ['b'], ['c']]
    assert plan_shards({'a': 3}, 1) == [['a']]


@pytest.mark.parametrize('value', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('dtype', DTYPES)
def test_values_that_are_not_finite(tmp_path, dtype, value):
    with pytest.raises(InputError, match=r'^b: .*not finite'):
        write(tmp_path, {**ARRAYS, 'b': np.array([1, value], np.float32)}, dtype)


def test_values_beyond_the_range(tmp_path):
    def written(value, dtype):
        path = tmp_path / dtype
        write(path, {'b': np.array([1, value], np.float32)}, dtype)
        return TensorFiles(path).read('b')[1]

    # 65 504 is the largest float16 number, and 65 519 still rounds to it.
    assert written(65_519, 'float16') == 65_504
    with pytest.raises(InputError, match=r'^b: 70000 is outside .*float16.*--dtype=bfloat16 or float32'):
        written(-70_000, 'float16')
    assert written(-70_000, 'bfloat16') == -70_144
    with pytest.raises(InputError, match=r'^b: .*outside .*bfloat16'):
        written(3.4e38, 'bfloat16')
    assert written(3.4e38, 'float32') == np.float32(3.4e38)


# --- damaged files


def refused(path, *parts):
    with input_error(*parts):
        TensorFiles(path)


@pytest.fixture
def single(tmp_path):
    return write(tmp_path / 'single', ARRAYS)


@pytest.fixture
def sharded(tmp_path):
    return write(tmp_path / 'sharded', ARRAYS, max_shard_size=100)


def change_index(path, change):
    file = path / 'model.safetensors.index.json'
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


@pytest.mark.parametrize('size', [0, 4, 30, -1])
def test_a_truncated_file(single, size):
    path = single / 'model.safetensors'
    path.write_bytes(path.read_bytes()[:size])
    refused(single, str(path), 'not a complete safetensors file')


def test_a_file_of_another_format(single):
    (single / 'model.safetensors').write_text('version https://git-lfs.github.com/spec/v1 oid sha256:0 size 1')
    refused(single, str(single / 'model.safetensors'), 'not a complete safetensors file')


def test_a_missing_shard(sharded):
    (sharded / 'model-00002-of-00003.safetensors').unlink()
    refused(sharded, 'model-00002-of-00003.safetensors', 'missing')


def test_a_tensor_only_in_the_index(sharded):
    change_index(sharded, lambda index: index['weight_map'].update(e='model-00001-of-00003.safetensors'))
    refused(sharded, 'model-00001-of-00003.safetensors', 'no tensor e')


def test_a_tensor_in_the_wrong_shard(sharded):
    change_index(sharded, lambda index: index['weight_map'].update(a='model-00002-of-00003.safetensors'))
    refused(sharded, 'model-00002-of-00003.safetensors', 'no tensor a')


def test_a_tensor_in_two_shards(sharded):
    save_file({'a': ARRAYS['a'], 'c': ARRAYS['c']}, sharded / 'model-00002-of-00003.safetensors')
    refused(sharded, 'model-00002-of-00003.safetensors', 'tensor a is also in model-00001-of-00003.safetensors')


@pytest.mark.parametrize(
    'name',
    [
        *('../single/model.safetensors', '/etc/passwd', 'sub/x.safetensors', 3),
        *('x' * 5000, 'ü' * 200, 'x\ny', 'x\0y', '\ud800.safetensors', '.'),
    ],
)
def test_an_index_with_paths_outside_of_the_directory(sharded, single, name):
    change_index(sharded, lambda index: index['weight_map'].update(a=name))
    refused(sharded, 'model.safetensors.index.json', 'weight_map')


@pytest.mark.parametrize('content', ['{', '[]', '{}', '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_garbled_index(sharded, content):
    (sharded / 'model.safetensors.index.json').write_text(content)
    refused(sharded, 'model.safetensors.index.json', 'weight_map')


@pytest.mark.parametrize('name', ['pytorch_model.bin', 'model.pt', 'x.ckpt', 'consolidated.00.pth'])
def test_pickles(tmp_path, name):
    (tmp_path / name).write_bytes(b'\x80\x04.')
    refused(tmp_path, str(tmp_path), name, 'pickle', 'safetensors')


def test_pickles_beside_safetensors_are_ignored(single):
    (single / 'pytorch_model.bin').write_bytes(b'\x80\x04.')
    assert TensorFiles(single).shapes


def test_nothing_to_read(tmp_path):
    refused(tmp_path, str(tmp_path), 'no model.safetensors')
    save_file(ARRAYS, tmp_path / 'adapter_model.safetensors')
    refused(tmp_path, 'adapter_model.safetensors', 'no model.safetensors.index.json')


@pytest.mark.parametrize('dtype', [np.int8, np.int64, np.float64, ml_dtypes.float8_e4m3fn])
def test_types_of_tensors(tmp_path, dtype):
    save_file({'a': np.ones((2, 2), dtype), 'b': np.ones(2, np.float16)}, tmp_path / 'model.safetensors')
    files = TensorFiles(tmp_path)
    files.check_dtypes(['b'])
    with pytest.raises(InputError, match=r'model\.safetensors: tensor a has dtype .*; must be BF16, F16, F32'):
        files.check_dtypes(['b', 'a'])


def test_equal_tensors(tmp_path, monkeypatch):
    monkeypatch.setattr(module, '_BLOCK', 8)
    other = ARRAYS['a'].copy()
    other[-1, -1] += 1
    files = TensorFiles(write(tmp_path, {'a': ARRAYS['a'], 'same': ARRAYS['a'], 'other': other, 'b': ARRAYS['b']}))
    assert files.equal('a', 'same')
    assert not files.equal('a', 'other')
    assert not files.equal('a', 'b')
